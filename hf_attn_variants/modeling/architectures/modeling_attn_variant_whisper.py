"""Whisper with the attention variants: upstream's heads, our attention inside."""

from typing import Any

from ..attention.encoder_decoder_mixins import BeamsShareMemory, MakesCrossLatent
from ..attention.variant_mixins import AttnVariantModelMixin
from ..upstream import Arguments, known_imports, variants_of
from ..upstream_checks import check_attention_function
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantWhisperConfig

with known_imports():
    from transformers import (
        WhisperForAudioClassification,
        WhisperForCausalLM,
        WhisperForConditionalGeneration,
        WhisperModel,
        WhisperPreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.bart.modeling_bart import BartAttention
    from transformers.models.whisper.modeling_whisper import (
        WhisperAttention,
        WhisperDecoder,
        WhisperDecoderWrapper,
        WhisperEncoder,
    )

__all__ = [
    "AttnVariantWhisperForAudioClassification",
    "AttnVariantWhisperForCausalLM",
    "AttnVariantWhisperForConditionalGeneration",
    "AttnVariantWhisperModel",
    "AttnVariantWhisperPreTrainedModel",
]


class CountsHeadsByProjection:
    """What gives keys and values of `WhisperAttention` as many heads as their projections have.

    Upstream's forward takes them to have the query's. BART's is the same attention and does not; it scales products
    where Whisper's scales queries.
    """

    arguments: Arguments

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Attend as `BartAttention` does; arguments of `WhisperAttention.forward`."""
        values, others = self.arguments.split(args, kwargs)
        return BartAttention.forward(self, **dict(zip(BART_ARGUMENTS.names, values, strict=True)), **others)


class AttnVariantWhisperAttention(BartFamilyAttentionMixin, CountsHeadsByProjection, WhisperAttention):
    """`WhisperAttention` with k key/value heads and, where asked for, a latent or talking heads."""

    upstream_attributes = (*BartFamilyAttentionMixin.upstream_attributes, "head_dim")


BART_ARGUMENTS = Arguments(BartAttention, AttnVariantWhisperAttention.roles, returns=2)
check_attention_function(BartAttention)


class AttnVariantWhisperPreTrainedModel(AttnVariantModelMixin, WhisperPreTrainedModel):
    """The base of every Whisper model and head here; upstream's class without the prefix says what each does."""

    config_class = AttnVariantWhisperConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantWhisperEncoder(AttnVariantWhisperPreTrainedModel, WhisperEncoder):
    """`WhisperEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantWhisperDecoder(MakesCrossLatent, AttnVariantWhisperPreTrainedModel, WhisperDecoder):
    """`WhisperDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantWhisperModel(AttnVariantWhisperPreTrainedModel, WhisperModel):
    """`WhisperModel` with variant attention."""


class AttnVariantWhisperDecoderWrapper(AttnVariantWhisperPreTrainedModel, WhisperDecoderWrapper):
    """What `WhisperForCausalLM` holds its decoder in."""


AttnVariantWhisperPreTrainedModel.variant_classes = variants_of(globals())


class AttnVariantWhisperForConditionalGeneration(
    BeamsShareMemory, AttnVariantWhisperPreTrainedModel, WhisperForConditionalGeneration
):
    """`WhisperForConditionalGeneration` with variant attention."""


class AttnVariantWhisperForCausalLM(AttnVariantWhisperPreTrainedModel, WhisperForCausalLM):
    """`WhisperForCausalLM` (the decoder alone) with variant attention."""


class AttnVariantWhisperForAudioClassification(AttnVariantWhisperPreTrainedModel, WhisperForAudioClassification):
    """`WhisperForAudioClassification` (the encoder alone) with variant attention."""


# By the class names in this table, upstream's Trainer knows whose labels it has to shift.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantWhisperConfig.model_type] = AttnVariantWhisperForCausalLM.__name__
