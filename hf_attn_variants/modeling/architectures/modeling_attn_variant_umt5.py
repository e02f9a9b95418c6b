"""UMT5 models with attention variants. Each layer has its own relative position bias."""

from typing import Any

from torch import Tensor

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import SinusoidalInputsMixin
from ..ops.variant_attention import AttentionHeads
from ..transformers_internals import check_attributes, collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantUMT5Config
from .t5_family import T5_FAMILY_SITES, T5FamilyAttentionMixin

with guarded_imports():
    from transformers import (
        UMT5EncoderModel,
        UMT5ForConditionalGeneration,
        UMT5ForQuestionAnswering,
        UMT5ForSequenceClassification,
        UMT5ForTokenClassification,
        UMT5Model,
        UMT5PreTrainedModel,
    )
    from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5Stack

__all__ = [
    "AttnVariantUMT5EncoderModel",
    "AttnVariantUMT5ForConditionalGeneration",
    "AttnVariantUMT5ForQuestionAnswering",
    "AttnVariantUMT5ForSequenceClassification",
    "AttnVariantUMT5ForTokenClassification",
    "AttnVariantUMT5Model",
    "AttnVariantUMT5PreTrainedModel",
]


class AttnVariantUMT5Attention(T5FamilyAttentionMixin, UMT5Attention):
    """`UMT5Attention` with grouped key/value heads and, if configured, a latent or talking heads."""

    roles = ("states", "encoder_outputs", "mask", "cache")

    def install_variant(self, config: Any, heads: AttentionHeads, query_dim: int, key_input_dim: int) -> None:
        """Install the variant as in T5, and make the decoder's self-attention causal."""
        check_attributes(self, ("is_decoder", "has_relative_attention_bias"))
        # In Transformers 5.15 and 5.17, this is False, so decoders that use sdpa attend to later tokens if there is no
        # padding.
        self.is_causal = self.is_decoder and self.has_relative_attention_bias
        super().install_variant(config, heads, query_dim, key_input_dim)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention over hidden states [b, n, d_model], or cross-attention to `encoder_hidden_states`."""
        (states, encoder_outputs, mask, cache), other_arguments = self.arguments.split(args, kwargs)
        output, _, weights = self.compute_outputs_and_bias(states, encoder_outputs, mask, cache, None, other_arguments)
        return output, weights


class AttnVariantUMT5PreTrainedModel(AttnVariantModelMixin, UMT5PreTrainedModel):
    """Base class of UMT5 models with variant attention. It extends `UMT5PreTrainedModel`."""

    config_class = AttnVariantUMT5Config
    attention_sites = T5_FAMILY_SITES


class AttnVariantUMT5Stack(SinusoidalInputsMixin, CrossLatentMixin, AttnVariantUMT5PreTrainedModel, UMT5Stack):
    """`UMT5Stack` (an encoder or a decoder) with variant attention."""

    @property
    def stack_name(self) -> str:
        """The name of this encoder or decoder in the complete model."""
        return "decoder" if self.is_decoder else "encoder"


class AttnVariantUMT5Model(AttnVariantUMT5PreTrainedModel, UMT5Model):
    """`UMT5Model` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config, AttnVariantUMT5Model
    >>> config = AttnVariantUMT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantUMT5Model(config)
    ```
    """


class AttnVariantUMT5EncoderModel(AttnVariantUMT5PreTrainedModel, UMT5EncoderModel):
    """`UMT5EncoderModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config, AttnVariantUMT5EncoderModel
    >>> config = AttnVariantUMT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantUMT5EncoderModel(config)
    ```
    """


AttnVariantUMT5PreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantUMT5ForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantUMT5PreTrainedModel, UMT5ForConditionalGeneration
):
    """`UMT5ForConditionalGeneration` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config, AttnVariantUMT5ForConditionalGeneration
    >>> config = AttnVariantUMT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantUMT5ForConditionalGeneration(config)
    ```
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.scale_decoder_outputs:
            # Transformers multiplies the outputs by model_dim ** -0.5, and did so unconditionally before version 5.24.
            self.model_dim = 1


class AttnVariantUMT5ForSequenceClassification(AttnVariantUMT5PreTrainedModel, UMT5ForSequenceClassification):
    """`UMT5ForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config, AttnVariantUMT5ForSequenceClassification
    >>> config = AttnVariantUMT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantUMT5ForSequenceClassification(config)
    ```
    """


class AttnVariantUMT5ForTokenClassification(AttnVariantUMT5PreTrainedModel, UMT5ForTokenClassification):
    """`UMT5ForTokenClassification` (the encoder with a classifier) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config, AttnVariantUMT5ForTokenClassification
    >>> config = AttnVariantUMT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantUMT5ForTokenClassification(config)
    ```
    """


class AttnVariantUMT5ForQuestionAnswering(AttnVariantUMT5PreTrainedModel, UMT5ForQuestionAnswering):
    """`UMT5ForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantUMT5Config, AttnVariantUMT5ForQuestionAnswering
    >>> config = AttnVariantUMT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantUMT5ForQuestionAnswering(config)
    ```
    """
