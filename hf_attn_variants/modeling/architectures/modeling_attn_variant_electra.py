"""ELECTRA models with attention variants."""

from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import PositionEmbeddingsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bert_family import BERT_FAMILY_SITES, BertFamilyCrossAttentionMixin, BertFamilySelfAttentionMixin
from .configuration_attn_variants import AttnVariantElectraConfig

with guarded_imports():
    from transformers import (
        ElectraForCausalLM,
        ElectraForMaskedLM,
        ElectraForMultipleChoice,
        ElectraForPreTraining,
        ElectraForQuestionAnswering,
        ElectraForSequenceClassification,
        ElectraForTokenClassification,
        ElectraModel,
        ElectraPreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.electra.modeling_electra import (
        ElectraCrossAttention,
        ElectraEmbeddings,
        ElectraSelfAttention,
    )

__all__ = [
    "AttnVariantElectraForCausalLM",
    "AttnVariantElectraForMaskedLM",
    "AttnVariantElectraForMultipleChoice",
    "AttnVariantElectraForPreTraining",
    "AttnVariantElectraForQuestionAnswering",
    "AttnVariantElectraForSequenceClassification",
    "AttnVariantElectraForTokenClassification",
    "AttnVariantElectraModel",
    "AttnVariantElectraPreTrainedModel",
]


class AttnVariantElectraSelfAttention(BertFamilySelfAttentionMixin, ElectraSelfAttention):
    """`ElectraSelfAttention` with k key/value heads and, if configured, a latent or talking heads."""


class AttnVariantElectraCrossAttention(BertFamilyCrossAttentionMixin, ElectraCrossAttention):
    """`ElectraCrossAttention` with k key/value heads and, if configured, talking heads."""


class AttnVariantElectraEmbeddings(PositionEmbeddingsMixin, ElectraEmbeddings):
    """ELECTRA embeddings with learned or sinusoidal positions."""


class AttnVariantElectraPreTrainedModel(AttnVariantModelMixin, ElectraPreTrainedModel):
    """Base class of the ELECTRA models with variant attention. See Transformers for the original models."""

    config_class = AttnVariantElectraConfig
    attention_sites = BERT_FAMILY_SITES


class AttnVariantElectraModel(AttnVariantElectraPreTrainedModel, ElectraModel):
    """`ElectraModel` with variant attention."""


AttnVariantElectraPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantElectraForPreTraining(AttnVariantElectraPreTrainedModel, ElectraForPreTraining):
    """`ElectraForPreTraining` with variant attention."""


class AttnVariantElectraForMaskedLM(AttnVariantElectraPreTrainedModel, ElectraForMaskedLM):
    """`ElectraForMaskedLM` with variant attention."""


class AttnVariantElectraForCausalLM(AttnVariantElectraPreTrainedModel, ElectraForCausalLM):
    """`ElectraForCausalLM` with variant attention."""


class AttnVariantElectraForSequenceClassification(AttnVariantElectraPreTrainedModel, ElectraForSequenceClassification):
    """`ElectraForSequenceClassification` with variant attention."""


class AttnVariantElectraForMultipleChoice(AttnVariantElectraPreTrainedModel, ElectraForMultipleChoice):
    """`ElectraForMultipleChoice` with variant attention."""


class AttnVariantElectraForTokenClassification(AttnVariantElectraPreTrainedModel, ElectraForTokenClassification):
    """`ElectraForTokenClassification` with variant attention."""


class AttnVariantElectraForQuestionAnswering(AttnVariantElectraPreTrainedModel, ElectraForQuestionAnswering):
    """`ElectraForQuestionAnswering` with variant attention."""


# With label smoothing, the Transformers Trainer shifts the labels for the model classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantElectraConfig.model_type] = AttnVariantElectraForCausalLM.__name__
