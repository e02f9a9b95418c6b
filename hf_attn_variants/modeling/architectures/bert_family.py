"""Shared attention code for BERT, RoBERTa and ELECTRA."""

from typing import Any

from torch import nn

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite, Projections

__all__ = ["BERT_FAMILY_SITES", "BertFamilyCrossAttentionMixin", "BertFamilySelfAttentionMixin"]

_BERT_PROJECTIONS: Projections = {
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output": "output.dense",
}
BERT_FAMILY_SITES = (
    AttentionSite(
        "self",
        r"encoder\.layer\.(\d+)\.attention",
        rank_field="kv_lora_rank",
        latent="self.kv_a_proj",
        core="self",
        **_BERT_PROJECTIONS,
    ),
    AttentionSite(
        "cross",
        r"encoder\.layer\.(\d+)\.crossattention",
        stack="decoder",
        is_cross_attention=True,
        core="self",
        **_BERT_PROJECTIONS,
    ),
)


class BertFamilySelfAttentionMixin(AttentionVariantMixin):
    """Mixin for self-attention modules in BERT and related models.

    It must precede the Transformers class in the bases.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    roles = ("states", "mask", "cache")
    transformers_attributes = ("dropout", "is_causal", "layer_idx", "scaling")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute self-attention over hidden states [b, n, hidden size].

        See `BertSelfAttention.forward` for the arguments.
        """
        states, mask, cache = self.arguments.read(args, kwargs)
        dynamic = self.prepare_variant_inputs(states, None, cache, kwargs)
        if not self.owns_projections:
            return super().forward(*args, **kwargs, **dynamic)
        _, others = self.arguments.split(args, kwargs)
        linears, dropout = (self.query, self.key, self.value), self.dropout.p
        return self.attend_with_projections(linears, states, mask, dropout, cache=cache, **others, **dynamic)


class BertFamilyCrossAttentionMixin(AttentionVariantMixin):
    """Mixin for cross-attention modules in BERT and related models.

    It must precede the Transformers class in the bases.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    roles = ("states", "encoder_outputs", "mask", "cache")
    transformers_attributes = ("dropout", "is_causal", "layer_idx", "scaling")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute cross-attention from hidden states [b, n, hidden size] to encoder outputs.

        See `BertCrossAttention.forward` for the arguments.
        """
        states, encoder_outputs, mask, cache = self.arguments.read(args, kwargs)
        dynamic = self.prepare_variant_inputs(states, encoder_outputs, cache, kwargs)
        if not self.owns_projections:
            return super().forward(*args, **kwargs, **dynamic)
        _, others = self.arguments.split(args, kwargs)
        linears, dropout = (self.query, self.key, self.value), self.dropout.p
        return self.attend_with_projections(
            linears, states, mask, dropout, encoder_outputs=encoder_outputs, cache=cache, **others, **dynamic
        )
