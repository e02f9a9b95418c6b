"""Linear attention for the attention interface of Transformers: its masks, its weights and its cache."""

from typing import Any

import torch

from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..ops.query_folding import is_exporting

__all__ = ["attend_by_kernel", "kernel_attention_forward", "keys_read", "weights_of_kernel"]

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
            f"`attention_kernel` reads keys by sums that all queries share: a mask must be of keys alone, "
            f"[b, 1, 1, m]; got {list(mask.shape)}."
        )
    read = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    read = read[:, :1, :1, -key.shape[2] :].transpose(-1, -2)  # the mask of a decoder covers all tokens seen
    beams = read.shape[0] // key.shape[0]
    return read[::beams] if beams > 1 else read


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
            "`output_attentions=True` needs the keys of all tokens, of which `attention_kernel` keeps sums alone: "
            "pass `use_cache=False`."
        )
    kernel: Any = module.kernel
    if with_weights or (is_exporting() and kernel.is_exported_as_weights and cache is None):
        weights = weights_of_kernel(module, query, key, mask, scaling).to(value.dtype)
        values = value.repeat_interleave(query.shape[0] // value.shape[0], dim=0)[:, :, None]
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
