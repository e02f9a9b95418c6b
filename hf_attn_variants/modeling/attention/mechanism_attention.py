"""Attention functions for modules with mechanisms other than grouped heads and latents.

`attention_interface` calls them. Linear attention has its own masks, weights and cache. All other mechanisms share the
functions in `ops`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..mechanisms.attention_extension import get_normalization
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.patterns.block_patterns import attend_to_gathered_keys, should_gather_keys
from ..mechanisms.patterns.compressed_pattern import compress_keys_and_values
from ..mechanisms.patterns.window_pattern import attend_with_global_tokens_first, get_global_token_mask
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, HEAD_PROJECTIONS
from ..ops.beams import repeat_for_beams, select_first_beams
from ..ops.flex_windows import windowed_attention
from ..ops.key_ranges import key_range_to_mask_and_bias, should_compute_in_blocks
from ..ops.memory_efficient_attention import talking_heads_attention
from ..ops.padded_rows import KEEP_ROWS, roll_padded_rows
from ..ops.softmax_attention import attention_with_weights, fused_attention
from ..ops.variant_attention import VariantAttention, get_attention_kwargs, is_exporting, should_return_weights

__all__ = [
    "attend_with_kernel",
    "attend_with_mechanisms",
    "compute_kernel_weights",
    "kernel_attention_forward",
    "mask_to_allowed_keys",
]

# A cache layer's attribute with the state of cross-attention, and with the keys and mask from which it was computed.
ENCODER_STATE = "_memory_state"


def attend_with_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, state: Any = None
) -> tuple[Tensor, Any]:
    """Compute linear attention with a module's kernel. Memory and time grow linearly with n and m.

    Args:
        module: the attention module, which contains its `kernel` and the kernel's parameters.
        mask: a boolean or additive mask that is the same for all queries, broadcastable to [b, 1, 1, m]. If it covers
            more than m keys, only its last m columns are used.
        query, key, value, scaling, state: see `AttentionKernel.attend`, which also describes the result.

    Raises:
        ValueError: if the mask differs between queries.
    """
    kernel: AttentionKernel = module.kernel
    return kernel.attend(module, query, key, value, mask_to_allowed_keys(mask, key), scaling, state)


def compute_kernel_weights(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return the weights [b, h, n, m] of linear attention. See `attend_with_kernel` for the arguments."""
    kernel: AttentionKernel = module.kernel
    return kernel.compute_weights(module, query, key, mask_to_allowed_keys(mask, key), scaling)


def mask_to_allowed_keys(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Convert a mask to a boolean mask [b or 1, 1, m, 1] of the allowed keys, or to None if there is no mask.

    Raises:
        ValueError: if the mask differs between queries or heads.
    """
    if mask is None:
        return None
    is_same_for_all_queries = all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (-3, -2))
    if not is_same_for_all_queries:
        raise ValueError(
            "The mask must be the same for all queries with `attention_kernel`, [b, 1, 1, m], got "
            f"{list(mask.shape)}. Pass a padding mask [b, m] to the model."
        )
    allowed_keys = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    allowed_keys = allowed_keys[:, :1, :1, -key.shape[2] :].transpose(
        -1, -2
    )  # a decoder mask covers all tokens seen so far
    return select_first_beams(allowed_keys, allowed_keys.shape[0] // key.shape[0])


def kernel_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Compute linear attention for one call, using the call's cache, if any. Return the weights if requested.

    Args:
        module, query, key, value, mask: see `attend_with_kernel`.
        options: the remaining arguments of the call. If they contain a "kernel_cache", it stores the states.

    Returns:
        The outputs [b, n, h, d] and, if requested, the weights [b, h, n, m].

    Raises:
        ValueError: if the mask differs between queries, or if the weights are requested but the cache contains only
            sums.
    """
    with_weights = should_return_weights(module, options)
    scaling = get_attention_kwargs(module, query, mask, options)["scaling"]
    cache = options.get("kernel_cache")
    if with_weights and cache is not None and module.kernel.is_causal:
        raise ValueError(
            "`use_cache` must be False with `output_attentions=True` and `attention_kernel`, got a "
            "cache. The weights require the keys of all tokens, but the cache stores only their sums."
        )
    kernel: Any = module.kernel
    if with_weights or (is_exporting() and kernel.exports_explicit_weights and cache is None):
        weights = compute_kernel_weights(module, query, key, mask, scaling).to(value.dtype)
        values = repeat_for_beams(value, query.shape[0])[:, :, None]
        output = weights.unflatten(1, (value.shape[1], -1)) @ values
        return output.flatten(1, 2).transpose(1, 2), weights if with_weights else None
    call = (module, query, key, value, mask, scaling)
    if cache is None:
        return attend_with_kernel(*call)[0], None
    layer = cache.layers[module.layer_idx]
    if kernel.is_causal:
        output, layer.state = attend_with_kernel(*call, layer.state)
        return output, None
    # In cross-attention, the encoder outputs and their mask do not change between decoding steps.
    stored, allowed_keys = vars(layer).get(ENCODER_STATE), mask_to_allowed_keys(mask, key)
    if stored is None or stored[0] is not key or not _are_equal(stored[1], allowed_keys):
        output, state = attend_with_kernel(*call)
        if state is not None:
            setattr(layer, ENCODER_STATE, (key, allowed_keys, state))
        return output, None
    return kernel.attend_to_state(module, query, stored[2], scaling), None


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def eager_attention_with_mechanisms(
    module: VariantAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with explicit weights ("eager"). See `eager_attention_forward` for the arguments."""
    if module.kernel is not None:
        return kernel_attention_forward(module, query, key, value, mask, kwargs)
    bias = kwargs.get("position_bias")
    if (key_range := kwargs.get("key_range", module.key_range)) is not None:  # it may differ for padded rows
        is_global = get_global_token_mask(key_range, kwargs)
        mask, bias = key_range_to_mask_and_bias(key_range, query, key, mask, bias, is_global)
    options = get_attention_kwargs(module, query, mask, kwargs) | {"position_bias": bias, "score": module.score}
    options |= _get_talking_heads_projections(module) | {name: kwargs.get(name) for name in DYNAMIC_PROJECTIONS}
    options["normalize"] = get_normalization(module) if module.extensions else None
    return attention_with_weights(query, key, value, mask, **options)


def sdpa_attention_with_mechanisms(
    module: VariantAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the fastest exact function ("sdpa"). See `eager_attention_forward` for the arguments.

    For talking heads and windows, memory grows linearly with n and m, unless `attention_with_weights` is used. This is
    the case if weights are requested, scores are additive, an extension changes the weights, projections are
    input-dependent, the mask requires a gradient, or there is only one query.
    """
    if module.kernel is not None:
        return kernel_attention_forward(module, query, key, value, mask, kwargs)
    returns_weights = should_return_weights(module, kwargs)
    normalize = get_normalization(module) if module.extensions else None
    with_weights = returns_weights or module.score is not None or normalize is not None
    talking_heads, key_range = bool(module.projection_names), kwargs.get("key_range", module.key_range)
    in_blocks = key_range is not None and not with_weights and should_compute_in_blocks(key_range, query, key, mask)
    is_global, bias = get_global_token_mask(key_range, kwargs), kwargs.get("position_bias")
    if not returns_weights and is_global is None and should_gather_keys(key_range, query, key, mask):
        options = get_attention_kwargs(module, query, None, kwargs | {"is_causal": False})
        attend: Callable[..., Any] = partial(fused_attention, **options)
        if talking_heads or with_weights:
            options |= {"score": module.score, "normalize": normalize}
            attend = partial(attention_with_weights, **options, **_get_talking_heads_projections(module))
        return attend_to_gathered_keys(attend, key_range, (query, key, value), mask, bias), None
    if with_weights or (talking_heads and not in_blocks and _needs_explicit_weights(module, query, mask)):
        output, weights = eager_attention_with_mechanisms(module, query, key, value, mask, **kwargs)
        return output, weights if returns_weights else None
    if key_range is not None and not in_blocks:
        mask, bias = key_range_to_mask_and_bias(key_range, query, key, mask, bias, is_global)
    options = get_attention_kwargs(module, query, mask, kwargs) | {"position_bias": bias}
    if not (talking_heads or in_blocks):
        return fused_attention(query, key, value, mask, **options), None
    options |= _get_talking_heads_projections(module)
    if not in_blocks:
        return talking_heads_attention(query, key, value, mask, **options), None
    options["is_causal"] = False  # causality is part of the key range
    if is_global is None:
        return windowed_attention(query, key, value, mask, key_range=key_range, **options), None
    attend = partial(windowed_attention, **options)
    return attend_with_global_tokens_first(attend, key_range, (query, key, value), mask, is_global), None


def _get_talking_heads_projections(module: VariantAttention) -> dict[str, Any]:
    """Return a dictionary with the talking-heads projections of a module."""
    return {name: getattr(module, name, None) for name in HEAD_PROJECTIONS}


def _needs_explicit_weights(module: VariantAttention, query: Tensor, mask: Tensor | None) -> bool:
    """Return True if talking-heads attention must be computed with explicit weights."""
    # For a single query, the weights are small and faster to compute. The custom operator must not be in exported
    # graphs, and it computes no gradient for masks.
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return True
    return query.shape[2] == 1 or bool(module.dynamic_names) or is_exporting()


FUNCTIONS = {"eager": eager_attention_with_mechanisms, "sdpa": sdpa_attention_with_mechanisms}
# For modules that depend on positions, such as those that compress keys. Padded rows are rolled before compression.
POSITION_FUNCTIONS = {
    name: roll_padded_rows(compress_keys_and_values(function)) for name, function in FUNCTIONS.items()
}


def attend_with_mechanisms(
    implementation: str, module: VariantAttention, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the "eager" or "sdpa" function with the given arguments, and return the outputs and weights."""
    functions = FUNCTIONS if module.padding_rule == KEEP_ROWS else POSITION_FUNCTIONS
    return functions[implementation](module, *args, **kwargs)
