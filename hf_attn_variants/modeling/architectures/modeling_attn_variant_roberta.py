"""RoBERTa models with attention variants."""

from ..attention.model_mixin import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import PositionEmbeddingsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .bert_family import BERT_FAMILY_SITES, BertFamilyCrossAttentionMixin, BertFamilySelfAttentionMixin
from .configuration_attn_variants import AttnVariantRobertaConfig

with guarded_imports():
    from transformers import (
        RobertaForCausalLM,
        RobertaForMaskedLM,
        RobertaForMultipleChoice,
        RobertaForQuestionAnswering,
        RobertaForSequenceClassification,
        RobertaForTokenClassification,
        RobertaModel,
        RobertaPreTrainedModel,
    )
    from transformers.models.roberta.modeling_roberta import (
        RobertaCrossAttention,
        RobertaEmbeddings,
        RobertaSelfAttention,
    )

__all__ = [
    "AttnVariantRobertaForCausalLM",
    "AttnVariantRobertaForMaskedLM",
    "AttnVariantRobertaForMultipleChoice",
    "AttnVariantRobertaForQuestionAnswering",
    "AttnVariantRobertaForSequenceClassification",
    "AttnVariantRobertaForTokenClassification",
    "AttnVariantRobertaModel",
    "AttnVariantRobertaPreTrainedModel",
]


class AttnVariantRobertaSelfAttention(BertFamilySelfAttentionMixin, RobertaSelfAttention):
    """`RobertaSelfAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantRobertaCrossAttention(BertFamilyCrossAttentionMixin, RobertaCrossAttention):
    """`RobertaCrossAttention` with grouped key/value heads and, if configured, talking heads."""


class AttnVariantRobertaEmbeddings(PositionEmbeddingsMixin, RobertaEmbeddings):
    """RoBERTa embeddings with learned or sinusoidal positions."""


class AttnVariantRobertaPreTrainedModel(AttnVariantModelMixin, RobertaPreTrainedModel):
    """Base class of RoBERTa models with variant attention. It extends `RobertaPreTrainedModel`."""

    config_class = AttnVariantRobertaConfig
    attention_sites = BERT_FAMILY_SITES


class AttnVariantRobertaModel(AttnVariantRobertaPreTrainedModel, RobertaModel):
    """`RobertaModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaModel
    >>> config = AttnVariantRobertaConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaModel(config)
    ```
    """


AttnVariantRobertaPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantRobertaForMaskedLM(AttnVariantRobertaPreTrainedModel, RobertaForMaskedLM):
    """`RobertaForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaForMaskedLM
    >>> config = AttnVariantRobertaConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaForMaskedLM(config)
    ```
    """


class AttnVariantRobertaForCausalLM(AttnVariantRobertaPreTrainedModel, RobertaForCausalLM):
    """`RobertaForCausalLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaForCausalLM
    >>> config = AttnVariantRobertaConfig(vocab_size=99, is_decoder=True, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaForCausalLM(config)
    ```
    """


class AttnVariantRobertaForSequenceClassification(AttnVariantRobertaPreTrainedModel, RobertaForSequenceClassification):
    """`RobertaForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaForSequenceClassification
    >>> config = AttnVariantRobertaConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaForSequenceClassification(config)
    ```
    """


class AttnVariantRobertaForMultipleChoice(AttnVariantRobertaPreTrainedModel, RobertaForMultipleChoice):
    """`RobertaForMultipleChoice` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaForMultipleChoice
    >>> config = AttnVariantRobertaConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaForMultipleChoice(config)
    ```
    """


class AttnVariantRobertaForTokenClassification(AttnVariantRobertaPreTrainedModel, RobertaForTokenClassification):
    """`RobertaForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaForTokenClassification
    >>> config = AttnVariantRobertaConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaForTokenClassification(config)
    ```
    """


class AttnVariantRobertaForQuestionAnswering(AttnVariantRobertaPreTrainedModel, RobertaForQuestionAnswering):
    """`RobertaForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantRobertaConfig, AttnVariantRobertaForQuestionAnswering
    >>> config = AttnVariantRobertaConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantRobertaForQuestionAnswering(config)
    ```
    """
