"""BERT models with attention variants."""

from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import PositionEmbeddingsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bert_family import BERT_FAMILY_SITES, BertFamilyCrossAttentionMixin, BertFamilySelfAttentionMixin
from .configuration_attn_variants import AttnVariantBertConfig

with guarded_imports():
    from transformers import (
        BertForMaskedLM,
        BertForMultipleChoice,
        BertForNextSentencePrediction,
        BertForPreTraining,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertLMHeadModel,
        BertModel,
        BertPreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.bert.modeling_bert import BertCrossAttention, BertEmbeddings, BertSelfAttention

__all__ = [
    "AttnVariantBertForMaskedLM",
    "AttnVariantBertForMultipleChoice",
    "AttnVariantBertForNextSentencePrediction",
    "AttnVariantBertForPreTraining",
    "AttnVariantBertForQuestionAnswering",
    "AttnVariantBertForSequenceClassification",
    "AttnVariantBertForTokenClassification",
    "AttnVariantBertLMHeadModel",
    "AttnVariantBertModel",
    "AttnVariantBertPreTrainedModel",
]


class AttnVariantBertSelfAttention(BertFamilySelfAttentionMixin, BertSelfAttention):
    """BERT self-attention with k key/value heads and, if configured, a latent or talking heads."""


class AttnVariantBertCrossAttention(BertFamilyCrossAttentionMixin, BertCrossAttention):
    """BERT cross-attention with k key/value heads and, if configured, talking heads."""


class AttnVariantBertEmbeddings(PositionEmbeddingsMixin, BertEmbeddings):
    """BERT embeddings with learned or sinusoidal positions."""


class AttnVariantBertPreTrainedModel(AttnVariantModelMixin, BertPreTrainedModel):
    """Base class of the BERT models with variant attention. See Transformers for the original models."""

    config_class = AttnVariantBertConfig
    attention_sites = BERT_FAMILY_SITES


class AttnVariantBertModel(AttnVariantBertPreTrainedModel, BertModel):
    """`BertModel` with variant attention."""


AttnVariantBertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantBertForPreTraining(AttnVariantBertPreTrainedModel, BertForPreTraining):
    """`BertForPreTraining` (masked language modeling and next-sentence prediction) with variant attention."""


class AttnVariantBertForMaskedLM(AttnVariantBertPreTrainedModel, BertForMaskedLM):
    """`BertForMaskedLM` with variant attention."""


class AttnVariantBertLMHeadModel(AttnVariantBertPreTrainedModel, BertLMHeadModel):
    """`BertLMHeadModel` (the decoder, with cross-attention if configured) with variant attention."""


class AttnVariantBertForNextSentencePrediction(AttnVariantBertPreTrainedModel, BertForNextSentencePrediction):
    """`BertForNextSentencePrediction` with variant attention."""


class AttnVariantBertForSequenceClassification(AttnVariantBertPreTrainedModel, BertForSequenceClassification):
    """`BertForSequenceClassification` with variant attention."""


class AttnVariantBertForMultipleChoice(AttnVariantBertPreTrainedModel, BertForMultipleChoice):
    """`BertForMultipleChoice` with variant attention."""


class AttnVariantBertForTokenClassification(AttnVariantBertPreTrainedModel, BertForTokenClassification):
    """`BertForTokenClassification` with variant attention."""


class AttnVariantBertForQuestionAnswering(AttnVariantBertPreTrainedModel, BertForQuestionAnswering):
    """`BertForQuestionAnswering` with variant attention."""


# With label smoothing, the Transformers Trainer shifts the labels for the model classes in this table. The
# text-generation pipeline also accepts them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantBertConfig.model_type] = AttnVariantBertLMHeadModel.__name__
