"""T5 and mT5 with multi-query, grouped-query and talking-heads attention: upstream's heads, our attention inside."""

from typing import Any

import torch

from ..attention.encoder_decoder_mixins import BeamsShareMemory, MakesCrossLatent
from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import AddsSinusoids
from ..upstream import known_imports, variants_of
from .configuration_attn_variants import AttnVariantT5Config
from .t5_family import T5_FAMILY_SITES, T5FamilyAttentionMixin

with known_imports():
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
    """T5's self- or cross-attention with k key/value heads and, where asked for, a latent or talking heads."""

    roles = ("states", "memory", "mask", "cache", "bias")
    returns = 3

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Attend within hidden states [b, n, d_model], or from them to `key_value_states` [b, m, d_model].

        As upstream's `T5Attention.forward`, except that an attention without relative positions has no position bias,
        where upstream builds a bias of zeros and adds it in every layer and decoding step.

        Returns:
            The outputs [b, n, d_model], the position bias [1, h, n, m] or None, and the weights or None.
        """
        (states, memory, mask, cache, bias), others = self.arguments.split(args, kwargs)
        return self.outputs_and_bias(states, memory, mask, cache, bias, others)


class AttnVariantT5PreTrainedModel(AttnVariantModelMixin, T5PreTrainedModel):
    """The base of every T5 model and head here; upstream's class without the prefix says what each does."""

    config_class = AttnVariantT5Config
    attention_sites = T5_FAMILY_SITES


class AttnVariantT5Stack(AddsSinusoids, MakesCrossLatent, AttnVariantT5PreTrainedModel, T5Stack):
    """`T5Stack`, the encoder or decoder inside the models below, with variant attention."""

    @property
    def stack_name(self) -> str:
        """What a whole model calls it."""
        return "decoder" if self.is_decoder else "encoder"


class AttnVariantT5Model(AttnVariantT5PreTrainedModel, T5Model):
    """`T5Model` with variant attention."""


class AttnVariantT5EncoderModel(AttnVariantT5PreTrainedModel, T5EncoderModel):
    """`T5EncoderModel` with variant attention."""


AttnVariantT5PreTrainedModel.variant_classes = variants_of(globals())


class AttnVariantT5ForConditionalGeneration(
    BeamsShareMemory, AttnVariantT5PreTrainedModel, T5ForConditionalGeneration
):
    """`T5ForConditionalGeneration` with variant attention, from T5 and mT5 checkpoints alike."""


class AttnVariantT5ForSequenceClassification(AttnVariantT5PreTrainedModel, T5ForSequenceClassification):
    """`T5ForSequenceClassification` with variant attention."""


class AttnVariantT5ForTokenClassification(AttnVariantT5PreTrainedModel, T5ForTokenClassification):
    """`T5ForTokenClassification` (the encoder with a classifier) with variant attention."""


class AttnVariantT5ForQuestionAnswering(AttnVariantT5PreTrainedModel, T5ForQuestionAnswering):
    """`T5ForQuestionAnswering` with variant attention."""
