"""Shared attention code for BART, mBART, Marian, M2M100, PEGASUS and Whisper."""

from typing import Any

from torch import nn

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite, Projections
from ..attention.shared_rows import get_sentence_rows

__all__ = ["BART_FAMILY_SITES", "BartFamilyAttentionMixin"]

_BART_PROJECTIONS: Projections = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
BART_FAMILY_SITES = (
    AttentionSite(
        "encoder",
        r"encoder\.layers\.(\d+)\.self_attn",
        stack="encoder",
        kv_heads_field="encoder_num_key_value_heads",
        rank_field="encoder_kv_lora_rank",
        latent="kv_a_proj",
        **_BART_PROJECTIONS,
    ),
    AttentionSite(
        "decoder",
        r"decoder\.layers\.(\d+)\.self_attn",
        stack="decoder",
        rank_field="kv_lora_rank",
        latent="kv_a_proj",
        **_BART_PROJECTIONS,
    ),
    AttentionSite(
        "cross",
        r"decoder\.layers\.(\d+)\.encoder_attn",
        stack="decoder",
        is_cross_attention=True,
        rank_field="cross_kv_lora_rank",
        latent="decoder.cross_kv_a_proj",
        shares_latent=True,
        **_BART_PROJECTIONS,
    ),
)


class BartFamilyAttentionMixin(AttentionVariantMixin):
    """Mixin for attention modules in BART and related models. It must precede the Transformers class in the bases."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    roles = ("states", "encoder_outputs", "cache", "mask")
    transformers_attributes: tuple[str, ...] = ("dropout", "is_causal", "layer_idx", "scaling")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute self-attention over hidden states [b, n, d_model], or cross-attention to `key_value_states`.

        The arguments are the same as in the Transformers class.
        """
        states, encoder_outputs, cache, mask = self.arguments.read(args, kwargs)
        if encoder_outputs is not None and self.heads.rank is None:
            encoder_outputs, repeated = get_sentence_rows(encoder_outputs, (self.k_proj, self.v_proj)), encoder_outputs
            if encoder_outputs is not repeated:
                args, kwargs = (), self.arguments.to_keywords(args, kwargs, encoder_outputs=encoder_outputs)
        dynamic = self.prepare_variant_inputs(states, encoder_outputs, cache, kwargs)
        if not self.owns_projections:
            return super().forward(*args, **kwargs, **dynamic)
        _, others = self.arguments.split(args, kwargs)
        linears = (self.q_proj, self.k_proj, self.v_proj)
        output, weights = self.attend_with_projections(
            linears, states, mask, self.dropout, encoder_outputs=encoder_outputs, cache=cache, **others, **dynamic
        )
        return self.out_proj(output), weights
