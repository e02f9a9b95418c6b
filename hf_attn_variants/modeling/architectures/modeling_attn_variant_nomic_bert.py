"""NomicBERT models with attention variants.

In NomicBERT checkpoints, one tensor contains the projections of queries, keys and values. Transformers splits it into
three equal parts while it loads a checkpoint, and joins them while it saves one. The classes in this file also load
such checkpoints, but they save three tensors, because the projections of a variant may have different sizes.
"""

from typing import Any

from torch import Tensor

from ..attention.attention_sites import AttentionSite
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantNomicBertConfig
from .rotary_family import RotaryAttentionMixin

with guarded_imports():
    from transformers import (
        NomicBertForMaskedLM,
        NomicBertForSequenceClassification,
        NomicBertForTokenClassification,
        NomicBertModel,
        NomicBertPreTrainedModel,
    )
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.nomic_bert.modeling_nomic_bert import NomicBertAttention, apply_rotary_pos_emb

__all__ = [
    "AttnVariantNomicBertForMaskedLM",
    "AttnVariantNomicBertForSequenceClassification",
    "AttnVariantNomicBertForTokenClassification",
    "AttnVariantNomicBertModel",
    "AttnVariantNomicBertPreTrainedModel",
]


class AttnVariantNomicBertAttention(RotaryAttentionMixin, NomicBertAttention):
    """`NomicBertAttention` with grouped key/value heads and, if configured, talking heads or a kernel."""

    transformers_attributes = ("attention_dropout", "is_causal", "k_proj", "o_proj", "q_proj", "v_proj")
    rotate = staticmethod(apply_rotary_pos_emb)

    def compute_output(self, head_outputs: Tensor, states: Tensor) -> Tensor:
        """Apply the output projection to the head outputs [b, n, h_v d_v]."""
        return self.o_proj(head_outputs)


class AttnVariantNomicBertPreTrainedModel(AttnVariantModelMixin, NomicBertPreTrainedModel):
    """Base class of NomicBERT models with variant attention. It extends `NomicBertPreTrainedModel`."""

    config_class = AttnVariantNomicBertConfig
    attention_sites = (
        AttentionSite("self", r"layers\.(\d+)\.self_attn", "q_proj", "k_proj", "v_proj", "o_proj", rotary="half"),
    )

    @property
    def _weight_conversions(self) -> list[Any]:
        # Transformers reverts the conversions in this list while it saves a model.
        return []

    @_weight_conversions.setter
    def _weight_conversions(self, conversions: list[Any]) -> None:
        pass


class AttnVariantNomicBertModel(AttnVariantNomicBertPreTrainedModel, NomicBertModel):
    """`NomicBertModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantNomicBertConfig, AttnVariantNomicBertModel
    >>> config = AttnVariantNomicBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantNomicBertModel(config)
    ```
    """


AttnVariantNomicBertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantNomicBertForMaskedLM(AttnVariantNomicBertPreTrainedModel, NomicBertForMaskedLM):
    """`NomicBertForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantNomicBertConfig, AttnVariantNomicBertForMaskedLM
    >>> config = AttnVariantNomicBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantNomicBertForMaskedLM(config)
    ```
    """


class AttnVariantNomicBertForSequenceClassification(
    AttnVariantNomicBertPreTrainedModel, NomicBertForSequenceClassification
):
    """`NomicBertForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantNomicBertConfig, AttnVariantNomicBertForSequenceClassification
    >>> config = AttnVariantNomicBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantNomicBertForSequenceClassification(config)
    ```
    """


class AttnVariantNomicBertForTokenClassification(AttnVariantNomicBertPreTrainedModel, NomicBertForTokenClassification):
    """`NomicBertForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantNomicBertConfig, AttnVariantNomicBertForTokenClassification
    >>> config = AttnVariantNomicBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantNomicBertForTokenClassification(config)
    ```
    """


# Transformers finds the conversions for loading by the model type.
register_checkpoint_conversion_mapping(
    AttnVariantNomicBertConfig.model_type, get_checkpoint_conversion_mapping("nomic_bert"), overwrite=True
)
