"""T5 and mT5 models with attention variants."""

from typing import Any

from torch import Tensor

from ..attention.beam_shared_rows import SharedEncoderOutputsMixin
from ..attention.latent_attention import CrossLatentMixin
from ..attention.model_mixin import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import SinusoidalInputsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantT5Config
from .t5_family import T5_FAMILY_SITES, T5FamilyAttentionMixin

with guarded_imports():
    from transformers import (
        T5EncoderModel,
        T5ForConditionalGeneration,
        T5ForQuestionAnswering,
        T5ForSequenceClassification,
        T5ForTokenClassification,
        T5Model,
        T5PreTrainedModel,
    )
    from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

__all__ = [
    "AttnVariantT5EncoderModel",
    "AttnVariantT5ForConditionalGeneration",
    "AttnVariantT5ForQuestionAnswering",
    "AttnVariantT5ForSequenceClassification",
    "AttnVariantT5ForTokenClassification",
    "AttnVariantT5Model",
    "AttnVariantT5PreTrainedModel",
]


class AttnVariantT5Attention(T5FamilyAttentionMixin, T5Attention):
    """`T5Attention` with grouped key/value heads and, if configured, a latent or talking heads."""

    roles = ("states", "encoder_outputs", "mask", "cache", "bias")
    returns = 3

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute self-attention over hidden states [b, n, d_model], or cross-attention to `key_value_states`.

        Unlike `T5Attention.forward`, this method creates no position bias in models without relative positions.
        Transformers adds a bias of zeros in every layer and decoding step.

        Returns:
            The outputs [b, n, d_model], the position bias [1, h, n, m] or None, and the weights or None.
        """
        (states, encoder_outputs, mask, cache, bias), other_arguments = self.arguments.split(args, kwargs)
        return self.compute_outputs_and_bias(states, encoder_outputs, mask, cache, bias, other_arguments)


class AttnVariantT5PreTrainedModel(AttnVariantModelMixin, T5PreTrainedModel):
    """Base class of T5 models with variant attention. It extends `T5PreTrainedModel`."""

    config_class = AttnVariantT5Config
    attention_sites = T5_FAMILY_SITES


class AttnVariantT5Stack(SinusoidalInputsMixin, CrossLatentMixin, AttnVariantT5PreTrainedModel, T5Stack):
    """`T5Stack` (an encoder or a decoder) with variant attention."""

    @property
    def stack_name(self) -> str:
        """The name of this encoder or decoder in the complete model."""
        return "decoder" if self.is_decoder else "encoder"


class AttnVariantT5Model(AttnVariantT5PreTrainedModel, T5Model):
    """`T5Model` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config, AttnVariantT5Model
    >>> config = AttnVariantT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantT5Model(config)
    ```
    """


class AttnVariantT5EncoderModel(AttnVariantT5PreTrainedModel, T5EncoderModel):
    """`T5EncoderModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config, AttnVariantT5EncoderModel
    >>> config = AttnVariantT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantT5EncoderModel(config)
    ```
    """


AttnVariantT5PreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantT5ForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantT5PreTrainedModel, T5ForConditionalGeneration
):
    """`T5ForConditionalGeneration` with variant attention, for T5 and mT5 checkpoints.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForConditionalGeneration
    >>> config = AttnVariantT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantT5ForConditionalGeneration(config)
    ```
    """


class AttnVariantT5ForSequenceClassification(AttnVariantT5PreTrainedModel, T5ForSequenceClassification):
    """`T5ForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForSequenceClassification
    >>> config = AttnVariantT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantT5ForSequenceClassification(config)
    ```
    """


class AttnVariantT5ForTokenClassification(AttnVariantT5PreTrainedModel, T5ForTokenClassification):
    """`T5ForTokenClassification` (the encoder with a classifier) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForTokenClassification
    >>> config = AttnVariantT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantT5ForTokenClassification(config)
    ```
    """


class AttnVariantT5ForQuestionAnswering(AttnVariantT5PreTrainedModel, T5ForQuestionAnswering):
    """`T5ForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForQuestionAnswering
    >>> config = AttnVariantT5Config(vocab_size=99, num_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantT5ForQuestionAnswering(config)
    ```
    """
