"""Attention of modules with mechanisms other than grouped heads, as `attention_interface` calls it.

Linear attention has its own masks, weights and cache. All other mechanisms share the functions of `ops`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.patterns.block_patterns import attend_in_blocks, gathers
from ..mechanisms.patterns.compressed_pattern import compressing
from ..mechanisms.patterns.window_pattern import global_tokens_of, with_global_tokens_first
from ..mechanisms.talking_heads import DYNAMIC_PROJECTIONS, HEAD_PROJECTIONS
from ..ops.beams import first_beams, repeat_for_beams
from ..ops.flex_windows import attention_in_windows
from ..ops.key_ranges import as_full_attention, fills_blocks
from ..ops.memory_efficient_attention import talking_heads_attention
from ..ops.padded_rows import from_first_token
from ..ops.softmax_attention import attention_with_weights, fused_attention
from ..ops.variant_attention import VariantAttention, call_options, is_exporting, wants_weights
from ..transformers_internals import refuse_unknown

__all__ = [
    "attend_by_kernel",
    "attend_with_mechanisms",
    "kernel_attention_forward",
    "keys_read",
    "weights_of_kernel",
]

# The attribute of a cache layer with the state of cross-attention, and the keys and the mask that it was made from.
MEMORY_STATE = "_memory_state"


def attend_by_kernel(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    state: Any = None,
) -> tuple[torch.Tensor, Any]:
    """Compute linear attention with the kernel of a module, in memory and time linear in n and m.

    Args:
        module: the attention module, with its `kernel` and the parameters of the kernel.
        mask: boolean or additive, the same for all queries, broadcastable to [b, 1, 1, m]. The last m keys count.
        query, key, value, scaling, state: as for `AttentionKernel.attend`, which describes the result.

    Raises:
        ValueError: if the mask differs between queries.
    """
    kernel: AttentionKernel = module.kernel
    return kernel.attend(module, query, key, value, keys_read(mask, key), scaling, state)


def weights_of_kernel(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the weights [b, h, n, m] that linear attention corresponds to; arguments as for `attend_by_kernel`."""
    kernel: AttentionKernel = module.kernel
    return kernel.weights(module, query, key, keys_read(mask, key), scaling)


def keys_read(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """Return the keys that a mask allows, boolean [b or 1, 1, m, 1], or None for all keys.

    Raises:
        ValueError: if the mask differs between queries or heads.
    """
    if mask is None:
        return None
    one_row = all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (-3, -2))
    if not one_row:
        raise ValueError(
            "The mask must be the same for all queries with `attention_kernel`, [b, 1, 1, m], got "
            f"{list(mask.shape)}. Pass a padding mask [b, m] to the model."
        )
    read = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    read = read[:, :1, :1, -key.shape[2] :].transpose(-1, -2)  # the mask of a decoder covers all tokens seen
    return first_beams(read, read.shape[0] // key.shape[0])


def kernel_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    with_weights: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute linear attention for the attention interface of Transformers, for each implementation.

    Args:
        module, query, key, value, mask: as in `attend_by_kernel`.
        scaling: the factor of the dot products; None = d^-1/2.
        with_weights: whether to return the weights, which have n m entries.
        options: the other arguments of the call. The states are stored in the cache "kernel_cache", if it is given.

    Returns:
        The outputs [b, n, h, d] and, if requested, the weights [b, h, n, m].

    Raises:
        ValueError: if the mask differs between queries, or if the weights are requested but the cache has only sums.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache = options.get("kernel_cache")
    if with_weights and cache is not None and module.kernel.is_causal:
        raise ValueError(
            "`use_cache` must be False with `output_attentions=True` and `attention_kernel`, got a "
            "cache. The weights need the keys of all tokens, and the cache stores only their sums."
        )
    kernel: Any = module.kernel
    if with_weights or (is_exporting() and kernel.is_exported_as_weights and cache is None):
        weights = weights_of_kernel(module, query, key, mask, scaling).to(value.dtype)
        values = repeat_for_beams(value, query.shape[0])[:, :, None]
        output = weights.unflatten(1, (value.shape[1], -1)) @ values
        return output.flatten(1, 2).transpose(1, 2), weights if with_weights else None
    call = (module, query, key, value, mask, scaling)
    if cache is None:
        return attend_by_kernel(*call)[0], None
    layer = cache.layers[module.layer_idx]
    if kernel.is_causal:
        output, layer.state = attend_by_kernel(*call, layer.state)
        return output, None
    # In cross-attention, the encoder outputs and their mask do not change between decoding steps.
    stored, read = vars(layer).get(MEMORY_STATE), keys_read(mask, key)
    if stored is None or stored[0] is not key or not _are_equal(stored[1], read):
        output, state = attend_by_kernel(*call)
        if state is not None:
            setattr(layer, MEMORY_STATE, (key, read, state))
        return output, None
    return kernel.read_state(module, query, stored[2], scaling), None


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


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
    if (key_range := kwargs.get("key_range", module.key_range)) is not None:  # the key range of padded rows may differ
        is_global = global_tokens_of(key_range, kwargs)
        attention_mask, position_bias = as_full_attention(
            key_range, query, key, attention_mask, position_bias, is_global
        )
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
    talking_heads, key_range = bool(module.projection_names), kwargs.get("key_range", module.key_range)
    in_blocks = key_range is not None and not with_weights and fills_blocks(key_range, query, key, attention_mask)
    is_global = global_tokens_of(key_range, kwargs)
    if not returns_weights and is_global is None and gathers(key_range, query, key, attention_mask):
        options = call_options(module, query, None, scaling, dropout, False)
        attend: Callable[..., Any] = partial(fused_attention, **options)
        if talking_heads or with_weights:
            attend = partial(attention_with_weights, **options, **_projections(module), score=module.score)
        return attend_in_blocks(attend, key_range, (query, key, value), attention_mask, position_bias), None
    if with_weights or (talking_heads and not in_blocks and _needs_weights(module, query, attention_mask)):
        output, weights = eager_with_mechanisms(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, **kwargs
        )
        return output, weights if returns_weights else None
    if key_range is not None and not in_blocks:
        attention_mask, position_bias = as_full_attention(
            key_range, query, key, attention_mask, position_bias, is_global
        )
    options = call_options(module, query, attention_mask, scaling, dropout, is_causal)
    if talking_heads or in_blocks:
        options |= _projections(module)
        if not in_blocks:
            return talking_heads_attention(query, key, value, attention_mask, position_bias, **options), None
        options |= {"is_causal": False, "position_bias": position_bias}  # the key range is causal or not
        if is_global is None:
            return attention_in_windows(query, key, value, attention_mask, key_range=key_range, **options), None
        attend = partial(attention_in_windows, **options)
        return with_global_tokens_first(attend, key_range, (query, key, value), attention_mask, is_global), None
    return fused_attention(query, key, value, attention_mask, position_bias, **options), None


def _projections(module: VariantAttention) -> dict[str, Any]:
    """Return a dictionary with the talking-heads projections of a module."""
    return {name: getattr(module, name, None) for name in HEAD_PROJECTIONS}


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
