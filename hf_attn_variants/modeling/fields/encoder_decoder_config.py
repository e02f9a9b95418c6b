"""The fields of encoder-decoders: key/value heads and latents of each stack, and the latent of cross-attention."""

from dataclasses import dataclass, field
from typing import ClassVar

from .variant_config import AttnVariantConfigMixin

__all__ = ["EncoderDecoderConfigMixin"]


@dataclass(kw_only=True, repr=False)
class EncoderDecoderConfigMixin(AttnVariantConfigMixin):
    """The fields of `AttnVariantConfigMixin`, here the decoder's, and those of the encoder and of cross-attention.

    `num_key_value_heads` is the decoder's, in self- and cross-attention, the recipe of arXiv 2305.13245, section 2.2.

    Args:
        encoder_num_key_value_heads: the key/value heads of an encoder layer. None = as many as query heads (MHA).
        encoder_kv_lora_rank: `kv_lora_rank` of an encoder layer.
        cross_kv_lora_rank: the same of cross-attention: one latent of the encoder's outputs for all layers of the
            decoder. As wide as these: the outputs themselves, by which any checkpoint decodes as it is.
        encoder_attention_pattern, encoder_attention_window, encoder_attention_dilation, encoder_num_global_tokens,
        encoder_attention_block_size, encoder_num_random_blocks, encoder_attention_seed, encoder_num_summary_tokens,
        encoder_split_attention_heads: the pattern of the encoder's attention. Cross-attention reads the whole source.
        encoder_attention_kernel, cross_attention_kernel: `attention_kernel` of the encoder and of cross-attention.
    """

    encoder_decoder_layers: ClassVar[tuple[str, str]] = ("num_hidden_layers", "num_hidden_layers")
    encoder_decoder_heads: ClassVar[tuple[str, str]] = ("num_attention_heads", "num_attention_heads")

    encoder_num_key_value_heads: int | None = field(
        default=None,
        metadata={
            "variant": "key/value heads of an encoder layer",
            "query_heads": "num_attention_heads",
            "by_layer": True,
        },
    )
    encoder_kv_lora_rank: int | None = field(
        default=None,
        metadata={
            "variant": "numbers a token that an encoder layer makes its keys and values from",
            "latent": True,
            "by_layer": True,
        },
    )
    cross_kv_lora_rank: int | None = field(
        default=None,
        metadata={
            "variant": "numbers a source token that all decoder layers make their keys and values from",
            "latent": True,
        },
    )
    encoder_attention_pattern: str | None = field(
        default=None, metadata={"variant": "which tokens the encoder's attention reads", "pattern": True}
    )
    encoder_attention_window: int | None = field(
        default=None, metadata={"variant": "tokens in an encoder's window", "pattern": True, "by_layer": True}
    )
    encoder_attention_dilation: int = field(
        default=1, metadata={"variant": "step between the tokens of an encoder's window", "pattern": True}
    )
    encoder_num_global_tokens: int = field(
        default=0,
        metadata={"variant": "first tokens of the encoder that all read and that read all", "pattern": True},
    )
    encoder_attention_block_size: int | None = field(
        default=None, metadata={"variant": "tokens in a block of the encoder's pattern", "pattern": True}
    )
    encoder_num_random_blocks: int = field(
        default=0, metadata={"variant": "blocks that a block of the encoder reads by chance", "pattern": True}
    )
    encoder_attention_seed: int = field(
        default=0, metadata={"variant": "what the encoder's are drawn from", "pattern": True}
    )
    encoder_num_summary_tokens: int = field(
        default=0, metadata={"variant": "tokens at the end of an encoder's block that all read", "pattern": True}
    )
    encoder_split_attention_heads: bool = field(
        default=False,
        metadata={"variant": "half of the encoder's heads read near, the others far tokens", "pattern": True},
    )
    encoder_attention_kernel: str | None = field(
        default=None,
        metadata={"variant": "what the encoder's attention has for a softmax", "kernel": True, "by_layer": True},
    )
    cross_attention_kernel: str | None = field(
        default=None, metadata={"variant": "what cross-attention has for a softmax", "kernel": True, "by_layer": True}
    )

    def query_heads_field(self, kv_heads_field: str = "num_key_value_heads") -> str:
        """Return the field of the query heads that share the key/value heads of this one."""
        encoder, decoder = self.encoder_decoder_heads
        return encoder if kv_heads_field.startswith("encoder_") else decoder

    def layer_count(self, name: str) -> int:
        """Return how many layers of its stack may have a value of their own of a field."""
        encoder, decoder = self.encoder_decoder_layers
        return getattr(self, encoder if name.startswith("encoder_") else decoder)
