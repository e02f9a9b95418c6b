"""DistilBERT models with attention variants."""

from torch import Tensor

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite
from ..attention.model_mixin import AttnVariantModelMixin
from ..mechanisms.sinusoidal_positions import PositionEmbeddingsMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantDistilBertConfig

with guarded_imports():
    from transformers import (
        DistilBertForMaskedLM,
        DistilBertForMultipleChoice,
        DistilBertForQuestionAnswering,
        DistilBertForSequenceClassification,
        DistilBertForTokenClassification,
        DistilBertModel,
        DistilBertPreTrainedModel,
    )
    from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention, Embeddings

__all__ = [
    "AttnVariantDistilBertForMaskedLM",
    "AttnVariantDistilBertForMultipleChoice",
    "AttnVariantDistilBertForQuestionAnswering",
    "AttnVariantDistilBertForSequenceClassification",
    "AttnVariantDistilBertForTokenClassification",
    "AttnVariantDistilBertModel",
    "AttnVariantDistilBertPreTrainedModel",
]


class AttnVariantDistilBertSelfAttention(AttentionVariantMixin, DistilBertSelfAttention):
    """`DistilBertSelfAttention` with grouped key/value heads and, if configured, a latent or talking heads."""

    roles = ("states", "mask")
    linears = ("q_lin", "k_lin", "v_lin")
    transformers_attributes = ("dropout", "is_causal", "scaling")

    def compute_output(self, head_outputs: Tensor, states: Tensor) -> Tensor:
        """Apply the output projection to the outputs of all heads [b, n, h_v d_v]."""
        return self.out_lin(head_outputs)


class AttnVariantDistilBertEmbeddings(PositionEmbeddingsMixin, Embeddings):
    """DistilBERT embeddings with learned or sinusoidal positions."""

    roles = ("ids", "embedded", "positions")


class AttnVariantDistilBertPreTrainedModel(AttnVariantModelMixin, DistilBertPreTrainedModel):
    """Base class of DistilBERT models with variant attention. It extends `DistilBertPreTrainedModel`."""

    config_class = AttnVariantDistilBertConfig
    attention_sites = (
        AttentionSite(
            "self",
            r"transformer\.layer\.(\d+)\.attention",
            query="q_lin",
            key="k_lin",
            value="v_lin",
            output="out_lin",
            rank_field="kv_lora_rank",
            latent="kv_a_proj",
        ),
    )


class AttnVariantDistilBertModel(AttnVariantDistilBertPreTrainedModel, DistilBertModel):
    """`DistilBertModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig, AttnVariantDistilBertModel
    >>> config = AttnVariantDistilBertConfig(vocab_size=99, n_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantDistilBertModel(config)
    ```
    """


AttnVariantDistilBertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantDistilBertForMaskedLM(AttnVariantDistilBertPreTrainedModel, DistilBertForMaskedLM):
    """`DistilBertForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig, AttnVariantDistilBertForMaskedLM
    >>> config = AttnVariantDistilBertConfig(vocab_size=99, n_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantDistilBertForMaskedLM(config)
    ```
    """


class AttnVariantDistilBertForSequenceClassification(
    AttnVariantDistilBertPreTrainedModel, DistilBertForSequenceClassification
):
    """`DistilBertForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig, AttnVariantDistilBertForSequenceClassification
    >>> config = AttnVariantDistilBertConfig(vocab_size=99, n_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantDistilBertForSequenceClassification(config)
    ```
    """


class AttnVariantDistilBertForMultipleChoice(AttnVariantDistilBertPreTrainedModel, DistilBertForMultipleChoice):
    """`DistilBertForMultipleChoice` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig, AttnVariantDistilBertForMultipleChoice
    >>> config = AttnVariantDistilBertConfig(vocab_size=99, n_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantDistilBertForMultipleChoice(config)
    ```
    """


class AttnVariantDistilBertForTokenClassification(
    AttnVariantDistilBertPreTrainedModel, DistilBertForTokenClassification
):
    """`DistilBertForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig, AttnVariantDistilBertForTokenClassification
    >>> config = AttnVariantDistilBertConfig(vocab_size=99, n_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantDistilBertForTokenClassification(config)
    ```
    """


class AttnVariantDistilBertForQuestionAnswering(AttnVariantDistilBertPreTrainedModel, DistilBertForQuestionAnswering):
    """`DistilBertForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantDistilBertConfig, AttnVariantDistilBertForQuestionAnswering
    >>> config = AttnVariantDistilBertConfig(vocab_size=99, n_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantDistilBertForQuestionAnswering(config)
    ```
    """
