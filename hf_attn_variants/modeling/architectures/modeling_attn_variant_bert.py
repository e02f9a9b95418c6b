"""BERT with multi-query, grouped-query and talking-heads attention: upstream's heads, our attention inside."""

from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import EmbeddingsMixin
from ..upstream import known_imports, variants_of
from .bert_family import BERT_FAMILY_SITES, BertFamilyCrossAttentionMixin, BertFamilySelfAttentionMixin
from .configuration_attn_variants import AttnVariantBertConfig

with known_imports():
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
    """BERT's self-attention with k key/value heads and, where asked for, a latent or talking heads."""


class AttnVariantBertCrossAttention(BertFamilyCrossAttentionMixin, BertCrossAttention):
    """BERT's cross-attention with k key/value heads and, where asked for, talking heads."""


class AttnVariantBertEmbeddings(EmbeddingsMixin, BertEmbeddings):
    """BERT's embeddings, their positions learned or sinusoidal."""


class AttnVariantBertPreTrainedModel(AttnVariantModelMixin, BertPreTrainedModel):
    """The base of every BERT model and head here; upstream's class without the prefix says what each does."""

    config_class = AttnVariantBertConfig
    attention_sites = BERT_FAMILY_SITES


class AttnVariantBertModel(AttnVariantBertPreTrainedModel, BertModel):
    """`BertModel` with variant attention."""


AttnVariantBertPreTrainedModel.variant_classes = variants_of(globals())


class AttnVariantBertForPreTraining(AttnVariantBertPreTrainedModel, BertForPreTraining):
    """`BertForPreTraining` (masked language modelling and next-sentence prediction) with variant attention."""


class AttnVariantBertForMaskedLM(AttnVariantBertPreTrainedModel, BertForMaskedLM):
    """`BertForMaskedLM` with variant attention."""


class AttnVariantBertLMHeadModel(AttnVariantBertPreTrainedModel, BertLMHeadModel):
    """`BertLMHeadModel` (the decoder, with cross-attention where the configuration says so) with variant attention."""


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


# By the class names in this table, upstream's Trainer knows whose labels it has to shift (where it smooths them) and
# the text-generation pipeline which models generate.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnVariantBertConfig.model_type] = AttnVariantBertLMHeadModel.__name__
