"""ModernBERT models with attention variants.

One fused linear layer (`Wqkv`) computes the queries, keys and values. With fewer key/value heads, it has fewer rows:

    rows     0 ... h_k d        h_k d ... (h_k + k) d    (h_k + k) d ...
             queries            keys                     values

Transformers splits `Wqkv` into three equal parts, so only the classes in this file can load such a layer.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ..attention.attention_interface import get_attention_function
from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite
from ..attention.variant_mixins import AttnVariantModelMixin
from ..mechanisms.attention_extension import HEAD_STAGE, OUTPUT_STAGE, apply_extensions
from ..transformers_internals import collect_variant_classes, guarded_imports
from .configuration_attn_variants import AttnVariantModernBertConfig

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


class AttnVariantModernBertAttention(AttentionVariantMixin, ModernBertAttention):
    """`ModernBertAttention` with grouped key/value heads and, if configured, talking heads or a kernel."""

    roles = ("states", "mask", "rotary")
    transformers_attributes = ("Wo", "Wqkv", "attention_dropout", "is_causal", "out_drop")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention over hidden states [b, n, D]. The arguments are the same as in Transformers."""
        (states, mask, rotary), options = self.arguments.split(args, kwargs)
        options |= self.prepare_attention_kwargs(states, None, None, options)
        heads = self.heads
        sizes = (heads.head_dim, heads.head_dim, heads.value_dim)
        rows = self.Wqkv(states).split(heads.fused_rows, dim=-1)
        query, key, value = (
            apply_extensions(self, HEAD_STAGE, part.unflatten(-1, (-1, size)).transpose(1, 2), role)  # [b, h, n, d]
            for part, size, role in zip(rows, sizes, ("query", "key", "value"), strict=True)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        options |= {"dropout": self.attention_dropout if self.training else 0.0, "scaling": heads.head_dim**-0.5}
        attend = get_attention_function(self.implementation)
        if "flash" in self.implementation:
            # Other functions read the window from the mask, but flash attention has no such mask.
            options |= {"deterministic": self.deterministic_flash_attn}
            attend = partial(attend, sliding_window=self.sliding_window)
        output, weights = attend(self, query, key, value, mask, **options)
        output = apply_extensions(self, OUTPUT_STAGE, output, states).flatten(2)
        return self.out_drop(self.Wo(output)), weights


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
