"""BERT models with attention variants."""

from ..attention.model_mixin import AttnVariantModelMixin
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
    """`BertSelfAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantBertCrossAttention(BertFamilyCrossAttentionMixin, BertCrossAttention):
    """`BertCrossAttention` with grouped key/value heads and, if configured, talking heads."""


class AttnVariantBertEmbeddings(PositionEmbeddingsMixin, BertEmbeddings):
    """BERT embeddings with learned or sinusoidal positions."""


class AttnVariantBertPreTrainedModel(AttnVariantModelMixin, BertPreTrainedModel):
    """Base class of BERT models with variant attention. It extends `BertPreTrainedModel`."""

    config_class = AttnVariantBertConfig
    attention_sites = BERT_FAMILY_SITES


class AttnVariantBertModel(AttnVariantBertPreTrainedModel, BertModel):
    """`BertModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertModel(config)
    ```
    """


AttnVariantBertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantBertForPreTraining(AttnVariantBertPreTrainedModel, BertForPreTraining):
    """`BertForPreTraining` (masked language modeling and next-sentence prediction) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForPreTraining
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForPreTraining(config)
    ```
    """


class AttnVariantBertForMaskedLM(AttnVariantBertPreTrainedModel, BertForMaskedLM):
    """`BertForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForMaskedLM
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForMaskedLM(config)
    ```
    """


class AttnVariantBertLMHeadModel(AttnVariantBertPreTrainedModel, BertLMHeadModel):
    """`BertLMHeadModel` (the decoder, with cross-attention if configured) with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertLMHeadModel
    >>> config = AttnVariantBertConfig(vocab_size=99, is_decoder=True, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertLMHeadModel(config)
    ```
    """


class AttnVariantBertForNextSentencePrediction(AttnVariantBertPreTrainedModel, BertForNextSentencePrediction):
    """`BertForNextSentencePrediction` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForNextSentencePrediction
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForNextSentencePrediction(config)
    ```
    """


class AttnVariantBertForSequenceClassification(AttnVariantBertPreTrainedModel, BertForSequenceClassification):
    """`BertForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForSequenceClassification
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForSequenceClassification(config)
    ```
    """


class AttnVariantBertForMultipleChoice(AttnVariantBertPreTrainedModel, BertForMultipleChoice):
    """`BertForMultipleChoice` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForMultipleChoice
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForMultipleChoice(config)
    ```
    """


class AttnVariantBertForTokenClassification(AttnVariantBertPreTrainedModel, BertForTokenClassification):
    """`BertForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForTokenClassification
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForTokenClassification(config)
    ```
    """


class AttnVariantBertForQuestionAnswering(AttnVariantBertPreTrainedModel, BertForQuestionAnswering):
    """`BertForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForQuestionAnswering
    >>> config = AttnVariantBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantBertForQuestionAnswering(config)
    ```
    """
