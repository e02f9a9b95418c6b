"""Shared attention code for BART, mBART, Marian, M2M100, PEGASUS and Whisper."""

from typing import Any

from torch import Tensor

from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite, ProjectionPaths
from ..attention.beam_shared_rows import share_encoder_outputs_between_beams

__all__ = ["BART_FAMILY_SITES", "BartFamilyAttentionMixin"]

_BART_PROJECTIONS: ProjectionPaths = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
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

    linears = ("q_proj", "k_proj", "v_proj")
    transformers_attributes: tuple[str, ...] = ("dropout", "is_causal", "layer_idx", "scaling")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute self-attention over hidden states [b, n, d_model], or cross-attention to `key_value_states`.

        The arguments are the same as in the Transformers class.
        """
        states, _, cache, encoder_outputs = self.arguments.read(args, kwargs)
        if encoder_outputs is not None:
            rows = share_encoder_outputs_between_beams(
                self, (self.k_proj, self.v_proj), states, encoder_outputs, cache
            )
            if rows is not encoder_outputs:
                args, kwargs = (), self.arguments.to_keywords(args, kwargs, encoder_outputs=rows)
        return super().forward(*args, **kwargs)

    def compute_output(self, head_outputs: Tensor, states: Tensor) -> Tensor:
        """Apply the output projection to the outputs of all heads [b, n, h_v d_v]."""
        return self.out_proj(head_outputs)
