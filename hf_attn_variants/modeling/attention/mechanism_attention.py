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
    """Compute attention and its weights ("eager"); arguments as for `eager_attention_forward`."""
    refuse_unknown(kwargs)
    if module.kernel is not None:
        call = (module, query, key, value, attention_mask, scaling, wants_weights(module, kwargs))
        return kernel_attention_forward(*call, kwargs | {"position_bias": position_bias})
    if (reach := kwargs.get("reach", module.reach)) is not None:  # the key range of padded rows may differ
        is_global = global_tokens_of(reach, kwargs)
        attention_mask, position_bias = as_full_attention(reach, query, key, attention_mask, position_bias, is_global)
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
    """Compute attention by the fastest exact function ("sdpa"); arguments as for `eager_attention_forward`.

    Talking heads and windows use functions whose memory is linear in n and m. `attention_with_weights` is used if the
    call requests the weights, if scores are additive, if the projections depend on the input, if the mask has a
    gradient, or if there is only one query.
    """
    refuse_unknown(kwargs)
    returns_weights = wants_weights(module, kwargs)
    if module.kernel is not None:
        call = (module, query, key, value, attention_mask, scaling, returns_weights)
        return kernel_attention_forward(*call, kwargs | {"position_bias": position_bias})
    with_weights = returns_weights or module.score is not None
    talking_heads, reach = bool(module.projection_names), kwargs.get("reach", module.reach)
    in_blocks = reach is not None and not with_weights and fills_blocks(reach, query, key, attention_mask)
    is_global = global_tokens_of(reach, kwargs)
    if not returns_weights and is_global is None and gathers(reach, query, key, attention_mask):
        options = call_options(module, query, None, scaling, dropout, False)
        attend: Callable[..., Any] = partial(fused_attention, **options)
        if talking_heads or with_weights:
            attend = partial(attention_with_weights, **options, **_projections(module), score=module.score)
        return attend_in_blocks(attend, reach, (query, key, value), attention_mask, position_bias), None
    if with_weights or (talking_heads and not in_blocks and _needs_weights(module, query, attention_mask)):
        output, weights = eager_with_mechanisms(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, **kwargs
        )
        return output, weights if returns_weights else None
    if reach is not None and not in_blocks:
        attention_mask, position_bias = as_full_attention(reach, query, key, attention_mask, position_bias, is_global)
    options = call_options(module, query, attention_mask, scaling, dropout, is_causal)
    if talking_heads or in_blocks:
        options |= _projections(module)
        if not in_blocks:
            return talking_heads_attention(query, key, value, attention_mask, position_bias, **options), None
        options |= {"is_causal": False, "position_bias": position_bias}  # the key range is causal or not
        if is_global is None:
            return attention_in_windows(query, key, value, attention_mask, reach=reach, **options), None
        attend = partial(attention_in_windows, **options)
        return with_global_tokens_first(attend, reach, (query, key, value), attention_mask, is_global), None
    return fused_attention(query, key, value, attention_mask, position_bias, **options), None


def _projections(module: VariantAttention) -> dict[str, Any]:
    """Return the talking-heads projections of a module by name."""
    return {name: getattr(module, name, None) for name in PROJECTIONS}


def _needs_weights(module: VariantAttention, query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether talking heads are computed with their weights."""
    # The weights of one query are small and faster to compute. The custom operator must not be in an exported graph,
    # and it has no gradient for masks.
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
