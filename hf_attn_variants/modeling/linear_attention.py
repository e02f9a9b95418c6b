"""Linear attention: weights that are products of features, so that keys and values are summed before any query asks.

With features phi(q), phi(k) of F numbers a head, the weights phi(q) phi(k)^T over their row sums are never made:

    S = sum_j phi(k_j) [v_j, 1]^T    [F, d + 1], the whole memory
    o_i = phi(q_i) S                 d sums of values, and the sum of the weights that they are divided by

in n F d multiply-adds each, for any length. Causally S is a running sum: within a chunk of C tokens weights are made,
before it S is what all earlier chunks left, and S alone is what a decoder keeps. Sums are in float32 at least.
Attention dropout has no weights to drop, and is not applied.

Sources: arXiv 2006.16236 (elu, and the recurrence), 2402.04347 (hedgehog), 2009.14794 (favor), 2103.02143 (rfa); the
formulas are in the package's `reference_linear`. Letters as in `attention_variants`; F features a head.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from .attention_sites import KernelAttention
from .hybrid_attention import HybridState, NearKeys, attend_in_blocks_and_sums, hybrid_weights
from .length_projection import attend_to_projected, projected_weights
from .query_folding import QueryFold, beams_of, is_exporting
from .talking_heads import without_autocast

__all__ = [
    "KernelState",
    "attend_by_kernel",
    "causal_sums",
    "kernel_attention_forward",
    "key_features",
    "query_features",
]

# Tokens of a chunk: its weights, C x C, are as large as a state of usual sizes.
CHUNK = 128
# The attribute of a cache's layer that holds the state of a memory, with the keys and the mask that it is of.
MEMORY_STATE = "_memory_state"
# What the sum of a query's weights is at least: rfa's estimates may be near zero or below (as in its authors' code).
LEAST_SUM = 1e-2


class KernelState(NamedTuple):
    """What is kept of a memory: sums [b, k, F, d + 1], and of favor the logarithm of what they are divided by."""

    sums: torch.Tensor
    log_scale: torch.Tensor | None = None  # [b, k, 1, 1]


def query_features(module: KernelAttention, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return phi(q) [b, h, n, F] of queries [b, h, n, d]; a factor of a row, which its sum takes out, is left out."""
    name = module.kernel.name
    if name == "favor":
        logits = _favor_logits(module, query, scaling)
        return (logits - logits.amax(-1, keepdim=True).detach()).exp()
    return _features(module, query, "query_kernel_proj")


def key_features(
    module: KernelAttention, key: torch.Tensor, read: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return phi(k) [b, k, m, F] of keys [b, k, m, d], and the logarithm of what they are divided by [b, k, 1, 1].

    Args:
        read: which keys are read, [b or 1, 1, m, 1]; the others' features are zeros. None = all.
        scaling: the factor of a softmax's dot products; of favor a square root of it is in queries and in keys.
    """
    if module.kernel.name != "favor":
        features = _features(module, key, "key_kernel_proj")
        return (features if read is None else features * read), None
    logits = _favor_logits(module, key, scaling)
    logits = logits if read is None else logits.masked_fill(~read, -torch.inf)
    top = logits.detach().amax((-2, -1), keepdim=True)
    top = top.clamp_min(torch.finfo(top.dtype).min)  # of no keys: -inf - -inf would be NaN
    return (logits - top).exp(), top


def _features(module: KernelAttention, states: torch.Tensor, proj: str) -> torch.Tensor:
    name = module.kernel.maps
    if name == "elu":
        return nn.functional.elu(states) + 1
    if name == "hedgehog":
        mapped = states @ getattr(module, proj).to(states.dtype)
        return torch.cat([mapped, -mapped], -1).softmax(-1)
    heads, scale = states.shape[1], module.kernel_scale.to(states.dtype)
    states = nn.functional.normalize(states, dim=-1) * scale.repeat_interleave(heads // scale.shape[0], 0)[:, None]
    angles = states @ module.kernel_vectors.to(states.dtype).T
    return torch.cat([angles.sin(), angles.cos()], -1) * module.kernel_vectors.shape[0] ** -0.5


def _favor_logits(module: KernelAttention, states: torch.Tensor, scaling: float) -> torch.Tensor:
    states = states * scaling**0.5
    return states @ module.kernel_vectors.to(states.dtype).T - states.square().sum(-1, keepdim=True) / 2


def causal_sums(
    queries: torch.Tensor, features: torch.Tensor, values: torch.Tensor, sums: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each query, phi(q) times the sum of phi(k) v^T over the keys up to its own, and the whole sum.

    Args:
        queries: phi(q) [b, k, g n, F], the n queries of each of a group's g heads.
        features: phi(k) [b, k, n, F].
        values: [b, k, n, x].
        sums: of earlier keys [b, k, F, x], if there are any.
        rows: g.

    Returns:
        [b, k, g n, x] and [b, k, F, x].
    """
    length, chunk = features.shape[2], min(CHUNK, features.shape[2])
    missing = -length % chunk
    queries = nn.functional.pad(queries.unflatten(2, (rows, length)), (0, 0, 0, missing))
    features, values = (nn.functional.pad(each, (0, 0, 0, missing)) for each in (features, values))
    queries = queries.unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)  # [b, k, chunks, g C, F]
    features, values = (each.unflatten(2, (-1, chunk)) for each in (features, values))  # [b, k, chunks, C, ...]
    within = features.mT @ values  # [b, k, chunks, F, x]
    after = within.cumsum(2) if sums is None else within.cumsum(2) + sums[:, :, None]
    weights = (queries @ features.mT).unflatten(3, (rows, chunk)).tril().flatten(3, 4)
    output = weights @ values + queries @ (after - within)
    output = output.unflatten(3, (rows, chunk)).transpose(2, 3).flatten(3, 4)[:, :, :, :length]
    return output.flatten(2, 3), after[:, :, -1]


def attend_by_kernel(
    module: KernelAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    state: Any = None,
) -> tuple[torch.Tensor, KernelState | HybridState | None]:
    """Attend by a kernel, in memory and time linear in n and m.

    Args:
        module: the attention, with its `kernel`.
        query: [b, h, n, d], or [b B, h, n, d] of B beams of each memory.
        key, value: [b, k, m, d].
        mask: of keys alone, broadcastable to [b, 1, 1, m]: boolean or additive. Of its keys the last m count.
        scaling: as in `key_features`.
        state: where causal, of the keys before these: a `KernelState`, of a hybrid a `HybridState`.

    Returns:
        The outputs [b, n, h, d], zeros where nothing is read; and the state, of these keys too, if there is one.

    Raises:
        ValueError: for a mask that is another one for each query.
    """
    exact = torch.promote_types(value.dtype, torch.float32)
    read = keys_read(mask, key)
    if module.kernel.length is not None:
        return attend_to_projected(module.length_proj, query, key, value, read, scaling), None
    with without_autocast(query):
        if module.kernel.window is not None:
            output, state = _attend_by_hybrid(module, query, key.to(exact), value.to(exact), read, scaling, state)
            return output.to(value.dtype), state
        features, log_scale = key_features(module, key.to(exact), read, scaling)
        values = nn.functional.pad(value.to(exact), (0, 1), value=1.0)
        if not module.kernel.is_causal:
            state = KernelState(features.mT @ values, log_scale)
            return read_state(module, query, state, scaling), state
        sums, fold = None, QueryFold(query, key, 1)
        if state is not None:
            features, sums, log_scale = _same_scale(features, log_scale, state)
        queries = fold.rows(query_features(module, query.to(exact), scaling))
        output, sums = causal_sums(queries, features, values, sums, fold.groups)
        return fold.unfolded(_divided(module, output).to(value.dtype)), KernelState(sums, log_scale)


def _attend_by_hybrid(
    module: KernelAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    read: torch.Tensor | None,
    scaling: float,
    state: HybridState | None,
) -> tuple[torch.Tensor, HybridState | None]:
    reach, fold, sums = module.kernel.reach, QueryFold(query, key, 1), None if state is None else state.sums
    near = NearKeys.of(reach, key, value, read, state)
    features, _ = key_features(module, near.keys, near.read, scaling)
    query = query.to(key.dtype)
    rows = (fold.rows(each) for each in (query, query_features(module, query, scaling)))
    queries, by_query = (each.unflatten(2, (fold.groups, -1)) for each in rows)
    log_factor = module.window_log_factor.to(key.dtype).unflatten(0, (key.shape[1], -1))
    output = attend_in_blocks_and_sums(queries, by_query, near, features, log_factor, sums, reach, scaling)
    output = output.flatten(2, 3)
    kept = near.state(features, sums, reach) if reach.is_causal else None
    return fold.unfolded(_divided(module, output)), kept


def read_state(module: KernelAttention, query: torch.Tensor, state: KernelState, scaling: float) -> torch.Tensor:
    """Return the outputs [b, n, h, d] of queries that read all that a state is of; arguments: `attend_by_kernel`'s."""
    fold = QueryFold(query, state.sums, beams_of(query, state.sums))
    with without_autocast(query):
        queries = fold.rows(query_features(module, query.to(state.sums.dtype), scaling))
        return fold.unfolded(_divided(module, queries @ state.sums).to(query.dtype))


def _divided(module: KernelAttention, output: torch.Tensor) -> torch.Tensor:
    return output[..., :-1] / _divisor(module, output[..., -1:])


def weights_of_kernel(
    module: KernelAttention, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the weights [b, h, n, m] that an attention by a kernel stands for; arguments as in `attend_by_kernel`."""
    exact = torch.promote_types(query.dtype, torch.float32)
    if module.kernel.length is not None:
        return projected_weights(module.length_proj, query, key, keys_read(mask, key), scaling)
    if (beams := beams_of(query, key)) > 1:
        key = key.repeat_interleave(beams, dim=0)
    with without_autocast(query):
        queries = query_features(module, query.to(exact), scaling)
        features, _ = key_features(module, key.to(exact), keys_read(mask, key), scaling)
        groups = queries.shape[1] // features.shape[1]
        weights = (queries.unflatten(1, (-1, groups)) @ features.mT[:, :, None]).flatten(1, 2)
        if module.kernel.window is not None:
            logits = (query.to(exact).unflatten(1, (-1, groups)) @ key.to(exact).mT[:, :, None]).flatten(1, 2)
            factor, reach = module.window_log_factor.to(exact), module.kernel.reach
            weights = hybrid_weights(logits * scaling, weights, keys_read(mask, key), factor, reach)
        if module.kernel.is_causal:
            weights = weights.tril(weights.shape[3] - weights.shape[2])
        return weights / _divisor(module, weights.sum(-1, keepdim=True))


def keys_read(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """Return which keys [b, k, m, d] a mask lets be read, [b or 1, 1, m, 1]; None = all.

    Raises:
        ValueError: for a mask that is another one for each query or head.
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
    read = read[:, :1, :1, -key.shape[2] :].transpose(-1, -2)  # a decoder's is of all tokens seen
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
    """Attention by a kernel behind upstream's attention interface, whatever the implementation's name.

    Args:
        module, query, key, value, mask: as in `attend_by_kernel`.
        scaling: the factor of the dot products; None = d^-1/2.
        with_weights: whether the weights are asked for, which takes n m numbers.
        options: what else the call has; a "kernel_cache" among it is where states are kept.

    Returns:
        The outputs [b, n, h, d], and the weights [b, h, n, m] where asked for.

    Raises:
        ValueError: for a position bias, another mask than of keys alone, and weights of keys that a state is of.
    """
    if options.get("position_bias") is not None:
        raise ValueError("`attention_kernel` is of attention without a position bias; this call has one.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache = options.get("kernel_cache")
    if with_weights and cache is not None and module.kernel.is_causal:
        raise ValueError(
            "`output_attentions=True` needs the keys of all tokens, of which `attention_kernel` keeps sums alone: "
            "pass `use_cache=False`."
        )
    # A graph of the weights serves every length, one of chunks does not.
    has_chunks = module.kernel.is_causal or module.kernel.window is not None
    if with_weights or (is_exporting() and has_chunks and cache is None):
        weights = weights_of_kernel(module, query, key, mask, scaling).to(value.dtype)
        values = value.repeat_interleave(query.shape[0] // value.shape[0], dim=0)[:, :, None]
        output = weights.unflatten(1, (value.shape[1], -1)) @ values
        return output.flatten(1, 2).transpose(1, 2), weights if with_weights else None
    call = (module, query, key, value, mask, scaling)
    if cache is None:
        return attend_by_kernel(*call)[0], None
    layer = cache.layers[module.layer_idx]
    if module.kernel.is_causal:
        output, layer.state = attend_by_kernel(*call, layer.state)
        return output, None
    # Of cross-attention: the memory and its mask do not change between decoding steps.
    kept, read = vars(layer).get(MEMORY_STATE), keys_read(mask, key)
    if kept is None or kept[0] is not key or not _are_equal(kept[1], read):
        output, state = attend_by_kernel(*call)
        setattr(layer, MEMORY_STATE, (key, read, state))
        return output, None
    return read_state(module, query, kept[2], scaling), None


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _divisor(module: KernelAttention, sums: torch.Tensor) -> torch.Tensor:
    if module.kernel.name == "rfa":
        return sums.clamp_min(LEAST_SUM)
    return sums.masked_fill(sums == 0, 1)  # where nothing is read, zeros are divided


def _same_scale(
    features: torch.Tensor, log_scale: torch.Tensor | None, state: KernelState
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return features and earlier sums divided by the same number, the larger one, and its logarithm."""
    if log_scale is None or state.log_scale is None:  # of favor there are both
        return features, state.sums, None
    both = torch.maximum(log_scale, state.log_scale)
    return features * (log_scale - both).exp(), state.sums * (state.log_scale - both).exp(), both
