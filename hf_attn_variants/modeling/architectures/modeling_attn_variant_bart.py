"""BART models with attention variants."""

from ..attention.latent_attention import CrossLatentMixin
from ..attention.shared_rows import SharedEncoderOutputsMixin
from ..attention.variant_mixins import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantBartConfig

with guarded_imports():
    from transformers import (
        BartForCausalLM,
        BartForConditionalGeneration,
        BartForQuestionAnswering,
        BartForSequenceClassification,
        BartModel,
        BartPreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.bart.modeling_bart import BartAttention, BartDecoder, BartDecoderWrapper, BartEncoder

__all__ = [
    "AttnVariantBartForCausalLM",
    "AttnVariantBartForConditionalGeneration",
    "AttnVariantBartForQuestionAnswering",
    "AttnVariantBartForSequenceClassification",
    "AttnVariantBartModel",
    "AttnVariantBartPreTrainedModel",
]


class AttnVariantBartAttention(BartFamilyAttentionMixin, BartAttention):
    """`BartAttention` with k key/value heads and, if configured, a latent or talking heads."""


class AttnVariantBartPreTrainedModel(AttnVariantModelMixin, BartPreTrainedModel):
    """Base class of the BART models with variant attention. See Transformers for the original models."""

    config_class = AttnVariantBartConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantBartEncoder(AttnVariantBartPreTrainedModel, BartEncoder):
    """`BartEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantBartDecoder(CrossLatentMixin, AttnVariantBartPreTrainedModel, BartDecoder):
    """`BartDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantBartModel(AttnVariantBartPreTrainedModel, BartModel):
    """`BartModel` with variant attention."""


class AttnVariantBartDecoderWrapper(AttnVariantBartPreTrainedModel, BartDecoderWrapper):
    """The decoder wrapper in `BartForCausalLM`, with variant attention."""


AttnVariantBartPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantBartForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantBartPreTrainedModel, BartForConditionalGeneration
):
    """`BartForConditionalGeneration` with variant attention."""


class AttnVariantBartForSequenceClassification(AttnVariantBartPreTrainedModel, BartForSequenceClassification):
    """`BartForSequenceClassification` with variant attention."""


class AttnVariantBartForQuestionAnswering(AttnVariantBartPreTrainedModel, BartForQuestionAnswering):
    """`BartForQuestionAnswering` with variant attention."""


class AttnVariantBartForCausalLM(AttnVariantBartPreTrainedModel, BartForCausalLM):
    """`BartForCausalLM` (decoder only) with variant attention."""


# With label smoothing, the Transformers Trainer shifts the labels for the model classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantBartConfig.model_type] = AttnVariantBartForCausalLM.__name__
