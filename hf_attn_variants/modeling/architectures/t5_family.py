"""Shared attention code for T5 and UMT5, which have a relative position bias."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.attention_interface import get_attention_function
from ..attention.attention_mixin import AttentionVariantMixin
from ..attention.attention_sites import AttentionSite, ProjectionPaths
from ..attention.beam_shared_rows import share_encoder_outputs_between_beams
from ..attention.latent_attention import (
    attend_to_latent,
    compute_keys_and_values_with_cache,
    compute_latent_with_cache,
)
from ..mechanisms.attention_extension import HEAD_STAGE, OUTPUT_STAGE, apply_extensions
from ..mechanisms.patterns.transient_global import (
    TransientGlobalPattern,
    add_summary_parameters,
    attend_with_summaries,
    compute_summary_bias,
)
from ..mechanisms.sinusoidal_positions import has_sinusoids
from ..ops.key_ranges import TransientGlobalKeyRange
from ..ops.variant_attention import AttentionHeads
from ..transformers_internals import check_attributes, check_method, get_transformers_class, guarded_imports

with guarded_imports():
    from transformers import initialization as init

__all__ = ["T5_FAMILY_SITES", "T5FamilyAttentionMixin"]

_T5_PROJECTIONS: ProjectionPaths = {"query": "q", "key": "k", "value": "v", "output": "o"}
T5_FAMILY_SITES = (
    AttentionSite(
        "encoder",
        r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention",
        stack="encoder",
        kv_heads_field="encoder_num_key_value_heads",
        rank_field="encoder_kv_lora_rank",
        latent="kv_a_proj",
        **_T5_PROJECTIONS,
    ),
    AttentionSite(
        "decoder",
        r"decoder\.block\.(\d+)\.layer\.0\.SelfAttention",
        stack="decoder",
        rank_field="kv_lora_rank",
        latent="kv_a_proj",
        **_T5_PROJECTIONS,
    ),
    AttentionSite(
        "cross",
        r"decoder\.block\.(\d+)\.layer\.1\.EncDecAttention",
        stack="decoder",
        is_cross_attention=True,
        rank_field="cross_kv_lora_rank",
        latent="decoder.cross_kv_a_proj",
        shares_latent=True,
        **_T5_PROJECTIONS,
    ),
)


class T5FamilyAttentionMixin(AttentionVariantMixin):
    """Mixin for attention modules in T5 and UMT5. It must precede the Transformers class in the bases.

    The relative position bias has one column per softmax head and is added after P_l (arXiv 2003.02436, section 3).
    """

    has_relative_attention_bias: bool
    relative_attention_bias: nn.Embedding
    transformers_attributes = (
        "dropout",
        "has_relative_attention_bias",
        "is_causal",
        "is_decoder",
        "layer_idx",
        "relative_attention_max_distance",
        "relative_attention_num_buckets",
        "scaling",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = get_transformers_class(cls, AttentionVariantMixin)
        check_method(owner, "compute_bias", ("query_length", "key_length", "device", "past_seen_tokens"))

    def install_variant(self, config: Any, heads: AttentionHeads, query_dim: int, key_input_dim: int) -> None:
        """Set the head counts, add the talking-heads parameters and resize the position bias for the softmax heads.

        With sinusoidal positions, the position bias is removed.
        """
        super().install_variant(config, heads, query_dim, key_input_dim)
        check_attributes(self, ("relative_attention_bias",) if self.has_relative_attention_bias else ())
        if self.has_relative_attention_bias and has_sinusoids(config):
            self.has_relative_attention_bias = False
            del self.relative_attention_bias
        if config.encoder_attention_pattern == TransientGlobalPattern.name and not self.is_decoder:
            add_summary_parameters(self, config, heads.softmax)
        if self.has_relative_attention_bias and heads.softmax != heads.query:
            like = self.relative_attention_bias.weight
            self.relative_attention_bias = nn.Embedding(
                like.shape[0], heads.softmax, dtype=like.dtype, device=like.device
            )

    def init_variant_parameters(self) -> None:
        """Initialize the talking-heads parameters and the bias for summaries.

        The bias for summaries is initialized like the token bias in Transformers. If value heads and key heads have
        different sizes, the output projection is initialized again. It follows the same rule as in Transformers, but
        for its own input size.
        """
        super().init_variant_parameters()
        if self.heads.value_dim != self.heads.head_dim:
            init.normal_(self.o.weight, mean=0.0, std=self.config.initializer_factor * self.o.in_features**-0.5)
        if hasattr(self, "global_relative_attention_bias"):
            std = self.config.initializer_factor * self.config.d_model**-0.5
            init.normal_(self.global_relative_attention_bias.weight, mean=0.0, std=std)

    def compute_outputs_and_bias(
        self,
        states: Tensor,
        encoder_outputs: Tensor | None,
        mask: Tensor | None,
        cache: Any,
        position_bias: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute self-attention over `states` [b, n, d_model], or cross-attention to `encoder_outputs`.

        Args:
            encoder_outputs: the encoder outputs [b, m, d_model], or None for self-attention.
            position_bias: the position bias from an earlier layer, [1, h, n, m]. If it is None, modules with relative
                positions compute it. If the module has a pattern, the bias is a table that is indexed by distance.
            kwargs: additional arguments of the attention function.

        Returns:
            The outputs [b, n, d_model], the position bias or None, and the weights or None.
        """
        if encoder_outputs is not None:
            encoder_outputs = share_encoder_outputs_between_beams(
                self, (self.k, self.v), states, encoder_outputs, cache
            )
        dynamic = self.prepare_attention_kwargs(states, encoder_outputs, cache, kwargs)
        makes_bias = position_bias is None and self.has_relative_attention_bias
        past_length: Any = _get_past_length(cache, self.layer_idx) if makes_bias else 0  # an integer, or a tensor
        query = self.q(states).unflatten(-1, (-1, self.heads.head_dim)).transpose(1, 2)  # [b, h_k, n, d]
        query = apply_extensions(self, HEAD_STAGE, query, "query")
        if self.heads.rank is None:
            key, value = compute_keys_and_values_with_cache(self, (self.k, self.v), states, encoder_outputs, cache)
            key_length = key.shape[2]
        else:
            latent, layer = compute_latent_with_cache(self, states, encoder_outputs, cache)  # [b, 1, m, r]
            key_length = latent.shape[2]
        if makes_bias:
            length = query.shape[2]
            if self.key_range is not None:  # a table that is indexed by distance (see `look_up_relative_bias`)
                length, past_length = 1, past_length + length - 1
                key_length = 2 * past_length + 1
            # In memory, the last axis of the computed bias is the heads, but fused CUDA kernels require it to be the
            # keys. The bias is copied only once, because all layers share it.
            position_bias = self.compute_bias(length, key_length, query.device, past_length).contiguous()
            if isinstance(self.key_range, TransientGlobalKeyRange):
                position_bias = torch.cat(
                    [position_bias, compute_summary_bias(self, query.shape[2], query.device)], -1
                )
        bias = position_bias
        if bias is not None and not self.is_own:
            # FlexAttention in Transformers indexes the bias by batch row, so a bias with a single row would be read
            # out of bounds.
            bias = bias.expand(query.shape[0], -1, -1, -1)
        options = {"dropout": self.dropout if self.training else 0.0, "scaling": self.scaling, "position_bias": bias}
        options |= kwargs | dynamic
        if isinstance(self.key_range, TransientGlobalKeyRange):
            operands = (query, key, value)
            output, weights = attend_with_summaries(self, states, operands, mask, bias, options["dropout"], kwargs)
        elif self.heads.rank is None:
            attend = get_attention_function(self.implementation)
            output, weights = attend(self, query, key, value, mask, **options)
        else:
            output, weights = attend_to_latent(self, query, latent, mask, (self.k, self.v), layer, **options)
        return self.o(apply_extensions(self, OUTPUT_STAGE, output, states).flatten(2)), position_bias, weights


def _get_past_length(cache: Any, layer: int) -> int | Tensor:
    if cache is None:
        return 0
    length = cache.get_seq_length(layer)
    # A static cache updates its length in place before the bias is computed.
    return length.clone() if isinstance(length, Tensor) else length
