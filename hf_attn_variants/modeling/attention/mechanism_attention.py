"""Attention of modules with mechanisms other than grouped heads, as `attention_interface` calls it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..mechanisms.patterns.compressed_pattern import compressing
from ..mechanisms.patterns.global_tokens import global_tokens_of, with_global_tokens_first
from ..mechanisms.patterns.scattered_attention import attend_in_blocks, gathers
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, PROJECTIONS
from ..ops.flex_windows import attention_in_windows
from ..ops.memory_efficient_attention import talking_heads_attention
from ..ops.padded_rows import from_first_token
from ..ops.query_folding import is_exporting
from ..ops.softmax_attention import attention_with_weights, fused_attention
from ..ops.variant_attention import VariantAttention, call_options, wants_weights
from ..ops.window_blocks import as_full_attention, fills_blocks
from ..upstream import refuse_unknown
from .kernel_interface import kernel_attention_forward

__all__ = ["attend_with_mechanisms"]


def eager_with_mechanisms(
    module: VariantAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with its weights ("eager"); arguments as for Transformers' attention functions."""
    refuse_unknown(kwargs)
    if module.kernel is not None:
        call = (module, query, key, value, attention_mask, scaling, wants_weights(module, kwargs))
        return kernel_attention_forward(*call, kwargs | {"position_bias": position_bias})
    if (reach := kwargs.get("reach", module.reach)) is not None:  # of rows with padding it may be another
        told = (reach, query, key, attention_mask, position_bias, global_tokens_of(reach, kwargs))
        attention_mask, position_bias = as_full_attention(*told)
    options = call_options(module, query, attention_mask, scaling, dropout, is_causal)
    options |= _projections(module) | {name: kwargs.get(name) for name in DYNAMIC_PROJECTIONS}
    options["score"] = module.score
    return attention_with_weights(query, key, value, attention_mask, position_bias, **options)


def sdpa_with_mechanisms(
    module: VariantAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fastest exact attention ("sdpa"); arguments as for Transformers' attention functions.

    Talking heads, and windows in a longer text, go to `talking_heads_attention`, in memory linear in n and m; where
    the weights are asked for, scores are no dot products, the projections depend on the input, the mask is trained or
    there is one query only, to `attention_with_weights`.
    """
    refuse_unknown(kwargs)
    asked = wants_weights(module, kwargs)
    if module.kernel is not None:
        call = (module, query, key, value, attention_mask, scaling, asked)
        return kernel_attention_forward(*call, kwargs | {"position_bias": position_bias})
    with_weights = asked or module.score is not None
    talking_heads, reach = bool(module.projection_names), kwargs.get("reach", module.reach)
    in_blocks = reach is not None and not with_weights and fills_blocks(reach, query, key, attention_mask)
    is_global = global_tokens_of(reach, kwargs)
    if not asked and is_global is None and gathers(reach, query, key, attention_mask):
        options = call_options(module, query, None, scaling, dropout, False)
        attend: Callable[..., Any] = partial(fused_attention, **options)
        if talking_heads or with_weights:
            attend = partial(attention_with_weights, **options, **_projections(module), score=module.score)
        return attend_in_blocks(attend, reach, (query, key, value), attention_mask, position_bias), None
    if with_weights or (talking_heads and not in_blocks and _needs_weights(module, query, attention_mask)):
        output, weights = eager_with_mechanisms(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, **kwargs
        )
        return output, weights if asked else None
    if reach is not None and not in_blocks:
        told = (reach, query, key, attention_mask, position_bias, is_global)
        attention_mask, position_bias = as_full_attention(*told)
    options = call_options(module, query, attention_mask, scaling, dropout, is_causal)
    if talking_heads or in_blocks:
        options |= _projections(module)
        if not in_blocks:
            return talking_heads_attention(query, key, value, attention_mask, position_bias, **options), None
        options |= {"is_causal": False, "position_bias": position_bias}  # the reach says what is causal
        if is_global is None:
            return attention_in_windows(query, key, value, attention_mask, reach=reach, **options), None
        attend = partial(attention_in_windows, **options)
        return with_global_tokens_first(attend, reach, (query, key, value), attention_mask, is_global), None
    return fused_attention(query, key, value, attention_mask, position_bias, **options), None


def _projections(module: VariantAttention) -> dict[str, Any]:
    return {name: getattr(module, name, None) for name in PROJECTIONS}


def _needs_weights(module: VariantAttention, query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    # One query's weights are small and made faster at once; our operator must not be in an exported graph, and gives a
    # mask no gradient.
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return True
    return query.shape[2] == 1 or bool(module.dynamic_names) or is_exporting()


# Rows with padding are aligned first, then keys are compressed.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eager": from_first_token(compressing(eager_with_mechanisms)),
    "sdpa": from_first_token(compressing(sdpa_with_mechanisms)),
}


def attend_with_mechanisms(implementation: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs and weights by an implementation, "eager" or "sdpa"; arguments as for its function."""
    return FUNCTIONS[implementation](*args, **kwargs)
