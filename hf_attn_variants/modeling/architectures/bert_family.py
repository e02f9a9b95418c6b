"""Shared attention code for BERT, RoBERTa and ELECTRA."""

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite, ProjectionPaths

__all__ = ["BERT_FAMILY_SITES", "BertFamilyCrossAttentionMixin", "BertFamilySelfAttentionMixin"]

_BERT_PROJECTIONS: ProjectionPaths = {
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


class BertFamilyCrossAttentionMixin(AttentionVariantMixin):
    """Mixin for cross-attention modules in BERT and related models.

    It must precede the Transformers class in the bases.
    """

    transformers_attributes = ("dropout", "is_causal", "layer_idx", "scaling")


class BertFamilySelfAttentionMixin(BertFamilyCrossAttentionMixin):
    """Mixin for self-attention modules in BERT and related models.

    It must precede the Transformers class in the bases.
    """

    roles = ("states", "mask", "cache")
