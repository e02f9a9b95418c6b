"""mBART models with attention variants."""

from ..attention.latent_attention import CrossLatentMixin
from ..attention.shared_rows import SharedEncoderOutputsMixin
from ..attention.variant_mixins import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bart_family import BART_FAMILY_SITES, BartFamilyAttentionMixin
from .configuration_attn_variants import AttnVariantMBartConfig

with guarded_imports():
    from transformers import (
        MBartForCausalLM,
        MBartForConditionalGeneration,
        MBartForQuestionAnswering,
        MBartForSequenceClassification,
        MBartModel,
        MBartPreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.mbart.modeling_mbart import (
        MBartAttention,
        MBartDecoder,
        MBartDecoderWrapper,
        MBartEncoder,
    )

__all__ = [
    "AttnVariantMBartForCausalLM",
    "AttnVariantMBartForConditionalGeneration",
    "AttnVariantMBartForQuestionAnswering",
    "AttnVariantMBartForSequenceClassification",
    "AttnVariantMBartModel",
    "AttnVariantMBartPreTrainedModel",
]


class AttnVariantMBartAttention(BartFamilyAttentionMixin, MBartAttention):
    """`MBartAttention` with k key/value heads and, if configured, a latent or talking heads."""


class AttnVariantMBartPreTrainedModel(AttnVariantModelMixin, MBartPreTrainedModel):
    """Base class of the mBART models with variant attention. See Transformers for the original models."""

    config_class = AttnVariantMBartConfig
    attention_sites = BART_FAMILY_SITES


class AttnVariantMBartEncoder(AttnVariantMBartPreTrainedModel, MBartEncoder):
    """`MBartEncoder` with variant attention."""

    stack_name = "encoder"


class AttnVariantMBartDecoder(CrossLatentMixin, AttnVariantMBartPreTrainedModel, MBartDecoder):
    """`MBartDecoder` with variant attention."""

    stack_name = "decoder"


class AttnVariantMBartModel(AttnVariantMBartPreTrainedModel, MBartModel):
    """`MBartModel` with variant attention."""


class AttnVariantMBartDecoderWrapper(AttnVariantMBartPreTrainedModel, MBartDecoderWrapper):
    """The decoder wrapper in `MBartForCausalLM`, with variant attention."""


AttnVariantMBartPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantMBartForConditionalGeneration(
    SharedEncoderOutputsMixin, AttnVariantMBartPreTrainedModel, MBartForConditionalGeneration
):
    """`MBartForConditionalGeneration` with variant attention."""


class AttnVariantMBartForSequenceClassification(AttnVariantMBartPreTrainedModel, MBartForSequenceClassification):
    """`MBartForSequenceClassification` with variant attention."""


class AttnVariantMBartForQuestionAnswering(AttnVariantMBartPreTrainedModel, MBartForQuestionAnswering):
    """`MBartForQuestionAnswering` with variant attention."""


class AttnVariantMBartForCausalLM(AttnVariantMBartPreTrainedModel, MBartForCausalLM):
    """`MBartForCausalLM` (decoder only) with variant attention."""


# With label smoothing, the Transformers Trainer shifts the labels for the model classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantMBartConfig.model_type] = AttnVariantMBartForCausalLM.__name__
