"""The configuration fields of encoder-decoders and of decoders with cross-attention."""

from dataclasses import dataclass
from typing import ClassVar

from .field_table import variant_field
from .variant_config import AttnVariantConfigMixin

__all__ = ["CrossAttentionConfigMixin", "EncoderDecoderConfigMixin"]


@dataclass(kw_only=True, repr=False)
class CrossAttentionConfigMixin(AttnVariantConfigMixin):
    """The fields of `AttnVariantConfigMixin`, with further fields for cross-attention.

    Args:
        cross_talking_heads, cross_num_softmax_heads, cross_num_value_heads, cross_talking_heads_init,
        cross_talking_heads_dynamic: the fields without `cross_` for cross-attention. If any of the five is given,
            cross-attention uses only these five. "none" as `cross_talking_heads` means no talking heads.
        cross_score_function: the `score_function` of cross-attention. None = the value of `score_function`; "none" =
            dot products.
    """

    cross_talking_heads: str | None = variant_field("cross_talking_heads")
    cross_num_softmax_heads: int | None = variant_field("cross_num_softmax_heads")
    cross_num_value_heads: int | None = variant_field("cross_num_value_heads")
    cross_talking_heads_init: str | None = variant_field("cross_talking_heads_init")
    cross_talking_heads_dynamic: list[str] | tuple[str, ...] | None = variant_field("cross_talking_heads_dynamic")
    cross_score_function: str | None = variant_field("cross_score_function")


@dataclass(kw_only=True, repr=False)
class EncoderDecoderConfigMixin(CrossAttentionConfigMixin):
    """The fields of `CrossAttentionConfigMixin` for the decoder, with further fields for the encoder.

    The fields without a prefix apply to the decoder. `num_key_value_heads` applies to its self-attention and
    cross-attention, as in arXiv 2305.13245, section 2.2.

    Args:
        encoder_num_key_value_heads: the number of key/value heads per encoder layer. None = the number of query heads
            (MHA).
        encoder_kv_lora_rank: the `kv_lora_rank` of the encoder layers.
        cross_kv_lora_rank: the rank of the latent that all decoder layers compute from the encoder outputs. The width
            of the encoder outputs caches these themselves, so that any checkpoint decodes unchanged.
        encoder_attention_pattern, encoder_attention_window, encoder_attention_dilation, encoder_num_global_tokens,
        encoder_attention_block_size, encoder_num_random_blocks, encoder_attention_seed, encoder_num_summary_tokens,
        encoder_split_attention_heads: the pattern of the encoder. Cross-attention has no pattern and attends to all
            encoder outputs.
        encoder_talking_heads, encoder_num_softmax_heads, encoder_num_value_heads, encoder_talking_heads_init,
        encoder_talking_heads_dynamic, encoder_score_function: the same as the fields with `cross_`, for the encoder.
        encoder_attention_kernel, cross_attention_kernel: the `attention_kernel` of the encoder and of cross-attention.
    """

    encoder_decoder_layers: ClassVar[tuple[str, str]] = ("num_hidden_layers", "num_hidden_layers")
    encoder_decoder_heads: ClassVar[tuple[str, str]] = ("num_attention_heads", "num_attention_heads")

    encoder_num_key_value_heads: int | None = variant_field("encoder_num_key_value_heads")
    encoder_kv_lora_rank: int | None = variant_field("encoder_kv_lora_rank")
    cross_kv_lora_rank: int | None = variant_field("cross_kv_lora_rank")
    encoder_talking_heads: str | None = variant_field("encoder_talking_heads")
    encoder_num_softmax_heads: int | None = variant_field("encoder_num_softmax_heads")
    encoder_num_value_heads: int | None = variant_field("encoder_num_value_heads")
    encoder_talking_heads_init: str | None = variant_field("encoder_talking_heads_init")
    encoder_talking_heads_dynamic: list[str] | tuple[str, ...] | None = variant_field("encoder_talking_heads_dynamic")
    encoder_score_function: str | None = variant_field("encoder_score_function")
    encoder_attention_pattern: str | None = variant_field("encoder_attention_pattern")
    encoder_attention_window: int | None = variant_field("encoder_attention_window")
    encoder_attention_dilation: int = variant_field("encoder_attention_dilation")
    encoder_num_global_tokens: int = variant_field("encoder_num_global_tokens")
    encoder_attention_block_size: int | None = variant_field("encoder_attention_block_size")
    encoder_num_random_blocks: int = variant_field("encoder_num_random_blocks")
    encoder_attention_seed: int = variant_field("encoder_attention_seed")
    encoder_num_summary_tokens: int = variant_field("encoder_num_summary_tokens")
    encoder_split_attention_heads: bool = variant_field("encoder_split_attention_heads")
    encoder_attention_kernel: str | None = variant_field("encoder_attention_kernel")
    cross_attention_kernel: str | None = variant_field("cross_attention_kernel")

    def query_heads_field(self, kv_heads_field: str = "num_key_value_heads") -> str:
        """Return the name of the field with the number of query heads that belongs to a key/value heads field."""
        encoder, decoder = self.encoder_decoder_heads
        return encoder if kv_heads_field.startswith("encoder_") else decoder

    def layer_count(self, name: str) -> int:
        """Return the number of encoder or decoder layers that may have different values of a field."""
        encoder, decoder = self.encoder_decoder_layers
        return getattr(self, encoder if name.startswith("encoder_") else decoder)
