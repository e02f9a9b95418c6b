"""ModernBERT models with attention variants.

One fused linear layer (`Wqkv`) computes the queries, keys and values. With fewer key/value heads, it has fewer rows:

    rows     0 ... h_k d        h_k d ... (h_k + k) d    (h_k + k) d ...
             queries            keys                     values

Transformers splits `Wqkv` into three equal parts, so only the classes in this file can load such a layer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..attention.attention_sites import AttentionSite
from ..attention.model_mixin import AttnVariantModelMixin
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantModernBertConfig
from .rotary_family import RotaryAttentionMixin

with guarded_imports():
    from transformers import (
        ModernBertForMaskedLM,
        ModernBertForMultipleChoice,
        ModernBertForQuestionAnswering,
        ModernBertForSequenceClassification,
        ModernBertForTokenClassification,
        ModernBertModel,
        ModernBertPreTrainedModel,
    )
    from transformers.models.modernbert.modeling_modernbert import ModernBertAttention, apply_rotary_pos_emb

__all__ = [
    "AttnVariantModernBertForMaskedLM",
    "AttnVariantModernBertForMultipleChoice",
    "AttnVariantModernBertForQuestionAnswering",
    "AttnVariantModernBertForSequenceClassification",
    "AttnVariantModernBertForTokenClassification",
    "AttnVariantModernBertModel",
    "AttnVariantModernBertPreTrainedModel",
]


class AttnVariantModernBertAttention(RotaryAttentionMixin, ModernBertAttention):
    """`ModernBertAttention` with grouped key/value heads and, if configured, talking heads or a kernel."""

    transformers_attributes = ("Wo", "Wqkv", "attention_dropout", "is_causal", "out_drop")
    rotate = staticmethod(apply_rotary_pos_emb)

    def project_states(self, states: Tensor) -> Sequence[Tensor]:
        """Compute the queries, keys and values with the fused layer."""
        return self.Wqkv(states).split(self.heads.fused_rows, dim=-1)

    def get_attention_function(self) -> Any:
        """Return the attention function of the selected implementation, with the window for flash attention."""
        attend = super().get_attention_function()
        if "flash" not in self.implementation:
            return attend
        # Other functions read the window from the mask, but flash attention has no such mask.
        return partial(attend, sliding_window=self.sliding_window, deterministic=self.deterministic_flash_attn)

    def compute_output(self, head_outputs: Tensor, states: Tensor) -> Tensor:
        """Apply the output projection to the head outputs [b, n, h_v d_v]."""
        return self.out_drop(self.Wo(head_outputs))


class AttnVariantModernBertPreTrainedModel(AttnVariantModelMixin, ModernBertPreTrainedModel):
    """Base class of ModernBERT models with variant attention. It extends `ModernBertPreTrainedModel`."""

    config_class = AttnVariantModernBertConfig
    attention_sites = (
        AttentionSite(
            "self", r"layers\.(\d+)\.attn", query="Wqkv", key="Wqkv", value="Wqkv", output="Wo", rotary="half"
        ),
    )


class AttnVariantModernBertModel(AttnVariantModernBertPreTrainedModel, ModernBertModel):
    """`ModernBertModel` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertModel
    >>> config = AttnVariantModernBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantModernBertModel(config)
    ```
    """


AttnVariantModernBertPreTrainedModel.variant_classes = collect_variant_classes(globals())


class AttnVariantModernBertForMaskedLM(AttnVariantModernBertPreTrainedModel, ModernBertForMaskedLM):
    """`ModernBertForMaskedLM` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertForMaskedLM
    >>> config = AttnVariantModernBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantModernBertForMaskedLM(config)
    ```
    """


class AttnVariantModernBertForSequenceClassification(
    AttnVariantModernBertPreTrainedModel, ModernBertForSequenceClassification
):
    """`ModernBertForSequenceClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertForSequenceClassification
    >>> config = AttnVariantModernBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantModernBertForSequenceClassification(config)
    ```
    """


class AttnVariantModernBertForMultipleChoice(AttnVariantModernBertPreTrainedModel, ModernBertForMultipleChoice):
    """`ModernBertForMultipleChoice` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertForMultipleChoice
    >>> config = AttnVariantModernBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantModernBertForMultipleChoice(config)
    ```
    """


class AttnVariantModernBertForTokenClassification(
    AttnVariantModernBertPreTrainedModel, ModernBertForTokenClassification
):
    """`ModernBertForTokenClassification` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertForTokenClassification
    >>> config = AttnVariantModernBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantModernBertForTokenClassification(config)
    ```
    """


class AttnVariantModernBertForQuestionAnswering(AttnVariantModernBertPreTrainedModel, ModernBertForQuestionAnswering):
    """`ModernBertForQuestionAnswering` with variant attention.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantModernBertConfig, AttnVariantModernBertForQuestionAnswering
    >>> config = AttnVariantModernBertConfig(vocab_size=99, num_hidden_layers=1, num_key_value_heads=4)
    >>> model = AttnVariantModernBertForQuestionAnswering(config)
    ```
    """
