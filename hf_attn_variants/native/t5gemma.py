"""The declaration of T5Gemma."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from transformers import T5GemmaConfig

from ..modeling.attention.attention_sites import AttentionSite, ProjectionPaths
from ..modeling.fields.variant_config import EncoderDecoderConfigMixin
from ..modeling.transformers_internals import get_auto_class_names
from .native_config import NativeConfigMixin

_PROJECTIONS: ProjectionPaths = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


class NativeT5GemmaConfig(NativeConfigMixin, EncoderDecoderConfigMixin, T5GemmaConfig):
    """Configuration for T5Gemma with the interface of variant configurations.

    The encoder and the decoder have their own configurations, which may have different sizes. `num_key_value_heads` is
    that of the decoder.
    """

    if TYPE_CHECKING:  # the constructor turns dictionaries into configurations
        encoder: Any
        decoder: Any

    transformers_class = T5GemmaConfig
    transformers_model_types = ("t5gemma",)
    head_dim_field = "head_dim"
    encoder_decoder_layers = layer_fields = ("encoder_layers", "num_hidden_layers")
    encoder_decoder_heads = ("encoder_attention_heads", "num_attention_heads")
    auto_classes = get_auto_class_names("t5gemma")
    attention_sites = (
        AttentionSite(
            "encoder",
            r"encoder\.layers\.(\d+)\.self_attn",
            stack="encoder",
            kv_heads_field="encoder_num_key_value_heads",
            rotary="half",
            **_PROJECTIONS,
        ),
        AttentionSite("decoder", r"decoder\.layers\.(\d+)\.self_attn", stack="decoder", rotary="half", **_PROJECTIONS),
        AttentionSite(
            "cross", r"decoder\.layers\.(\d+)\.cross_attn", stack="decoder", is_cross_attention=True, **_PROJECTIONS
        ),
    )

    def check_variant(self) -> None:
        """Check the fields, and set the numbers of key/value heads in the encoder's and decoder's configurations."""
        for name, part in (("num_key_value_heads", self.decoder), ("encoder_num_key_value_heads", self.encoder)):
            if getattr(self, name) is None:
                setattr(self, name, part.num_key_value_heads)
        super().check_variant()
        self.decoder.num_key_value_heads = self.num_key_value_heads
        self.encoder.num_key_value_heads = self.encoder_num_key_value_heads

    def get_window(self, site: AttentionSite, module: Any) -> int | None:
        """Return the window size of a layer of the type "sliding_attention"."""
        return None if site.is_cross_attention else module.sliding_window

    def get_attention_head_dim(self, kv_heads_field: str = "num_key_value_heads") -> int:
        """Return d, the size of a query or key head, in the encoder or decoder to which a field applies."""
        return (self.encoder if kv_heads_field.startswith("encoder_") else self.decoder).head_dim

    # The encoder and the decoder store these values. Those without a prefix are for the decoder.
    hidden_size = property(attrgetter("decoder.hidden_size"))
    intermediate_size = property(attrgetter("decoder.intermediate_size"))
    num_hidden_layers = property(attrgetter("decoder.num_hidden_layers"))
    num_attention_heads = property(attrgetter("decoder.num_attention_heads"))
    encoder_layers = property(attrgetter("encoder.num_hidden_layers"))
    encoder_attention_heads = property(attrgetter("encoder.num_attention_heads"))

    @property
    def max_position_embeddings(self) -> int:
        """The maximum number of positions in the encoder and the decoder."""
        return min(self.encoder.max_position_embeddings, self.decoder.max_position_embeddings)
