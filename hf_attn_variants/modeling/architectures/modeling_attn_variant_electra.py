"""ELECTRA models with attention variants."""

from ..attention.model_mixin import AttnVariantModelMixin
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
    """`ElectraSelfAttention` with grouped key/value heads and, if configured, a latent or talking heads."""


class AttnVariantElectraCrossAttention(BertFamilyCrossAttentionMixin, ElectraCrossAttention):
    """`ElectraCrossAttention` with grouped key/value heads and, if configured, talking heads."""


class AttnVariantElectraEmbeddings(PositionEmbeddingsMixin, ElectraEmbeddings):
    """ELECTRA embeddings with learned or sinusoidal positions."""


class AttnVariantElectraPreTrainedModel(AttnVariantModelMixin, ElectraPreTrainedModel):
    """Base class of ELECTRA models with variant attention. It extends `ElectraPreTrainedModel`."""

    config_class = AttnVariantElectraConfig
    attention_sites = BERT_FAMILY_SITES


class AttnVariantElectraModel(AttnVariantElectraPreTrainedModel, ElectraModel):
    """`ElectraModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraModel
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraModel(config)
    ```
    """


AttnVariantElectraPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantElectraForPreTraining(AttnVariantElectraPreTrainedModel, ElectraForPreTraining):
    """`ElectraForPreTraining` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForPreTraining
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForPreTraining(config)
    ```
    """


class AttnVariantElectraForMaskedLM(AttnVariantElectraPreTrainedModel, ElectraForMaskedLM):
    """`ElectraForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForMaskedLM
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForMaskedLM(config)
    ```
    """


class AttnVariantElectraForCausalLM(AttnVariantElectraPreTrainedModel, ElectraForCausalLM):
    """`ElectraForCausalLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForCausalLM
    >>> config = AttnVariantElectraConfig(vocab_size=99, is_decoder=True, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForCausalLM(config)
    ```
    """


class AttnVariantElectraForSequenceClassification(AttnVariantElectraPreTrainedModel, ElectraForSequenceClassification):
    """`ElectraForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForSequenceClassification
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForSequenceClassification(config)
    ```
    """


class AttnVariantElectraForMultipleChoice(AttnVariantElectraPreTrainedModel, ElectraForMultipleChoice):
    """`ElectraForMultipleChoice` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForMultipleChoice
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForMultipleChoice(config)
    ```
    """


class AttnVariantElectraForTokenClassification(AttnVariantElectraPreTrainedModel, ElectraForTokenClassification):
    """`ElectraForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForTokenClassification
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForTokenClassification(config)
    ```
    """


class AttnVariantElectraForQuestionAnswering(AttnVariantElectraPreTrainedModel, ElectraForQuestionAnswering):
    """`ElectraForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantElectraConfig, AttnVariantElectraForQuestionAnswering
    >>> config = AttnVariantElectraConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=2)
    >>> model = AttnVariantElectraForQuestionAnswering(config)
    ```
    """
