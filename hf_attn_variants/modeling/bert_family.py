"""What BERT and its relatives (RoBERTa, ELECTRA) share: self-attention, and cross-attention of a decoder."""

from typing import Any

import torch

from .attention_sites import AttentionSite
from .variant_mixins import AttentionVariantMixin

__all__ = ["BERT_FAMILY_SITES", "BertFamilyCrossAttentionMixin", "BertFamilySelfAttentionMixin"]

PROJECTIONS = {
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output": "output.dense",
    "core": "self",
}
BERT_FAMILY_SITES = (
    AttentionSite(
        "self",
        r"encoder\.layer\.(\d+)\.attention",
        rank_field="kv_lora_rank",
        latent="self.kv_a_proj",
        **PROJECTIONS,
    ),
    AttentionSite(
        "cross", r"encoder\.layer\.(\d+)\.crossattention", stack="decoder", is_cross_attention=True, **PROJECTIONS
    ),
)


class BertFamilySelfAttentionMixin(AttentionVariantMixin):
    """What a variant adds to the self-attention of BERT or of a relative; listed before it among the bases."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within `hidden_states` [b, n, hidden size]; see upstream's `BertSelfAttention.forward`."""
        dynamic = self.variant_inputs(hidden_states, None, past_key_values, kwargs)
        if self.heads.rank is None:
            return super().forward(hidden_states, attention_mask, past_key_values, **kwargs, **dynamic)
        maps, dropout = (self.query, self.key, self.value), self.dropout.p
        return self.from_latent(
            maps, hidden_states, attention_mask, dropout, cache=past_key_values, **kwargs, **dynamic
        )


class BertFamilyCrossAttentionMixin(AttentionVariantMixin):
    """The same of their cross-attention."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to `encoder_hidden_states`; see upstream's `BertCrossAttention.forward`."""
        dynamic = self.variant_inputs(hidden_states, encoder_hidden_states, past_key_values, kwargs)
        return super().forward(
            hidden_states, encoder_hidden_states, attention_mask, past_key_values, **kwargs, **dynamic
        )
