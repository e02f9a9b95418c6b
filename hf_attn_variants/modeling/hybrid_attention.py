"""Attention with a softmax in a window and a kernel outside of it, under one normaliser (LoLCATs, arXiv 2410.10254).

Of query i, with s_ij its dot products, c_i the largest within its window and gamma learned for each head:

    w_ij = gamma exp(s_ij - c_i) in the window, phi(q_i) phi(k_j) elsewhere;  o_i = sum_j w_ij v_j / sum_j w_ij

A block of C queries has weights for the C + before + after keys that any of its windows touches. What lies before and
behind these it reads as two running sums of phi(k) v^T, so that nothing is taken off a sum again, and nothing is as
large as n x m. A decoder keeps the sum of the keys before the next token's window, and the window's own keys.

The formula is the package's `reference_linear.hybrid_attention`. Letters as in `linear_attention`.
"""

from typing import NamedTuple

import torch
from torch import nn

from .attention_patterns import Reach

__all__ = ["HybridState", "NearKeys", "attend_in_blocks_and_sums", "hybrid_weights"]

# Queries of a block, where the window is no longer: more of them read more keys one by one, fewer keep more sums.
LEAST_BLOCK, MOST_BLOCK = 64, 128


class HybridState(NamedTuple):
    """What a decoder keeps: sums [b, k, F, d + 1] of the keys before the next window, and those that may be in it."""

    sums: torch.Tensor
    keys: torch.Tensor  # [b, k, before, d]
    values: torch.Tensor  # [b, k, before, d]
    read: torch.Tensor  # [b, 1, before, 1]: which are tokens


class NearKeys(NamedTuple):
    """The keys of one call behind as many as a window has before a query: those kept, or places that are not read."""

    keys: torch.Tensor  # [b, k, before + m, d]
    values: torch.Tensor  # [b, k, before + m, d]
    read: torch.Tensor  # [b, 1, before + m, 1]

    @classmethod
    def of(
        cls,
        reach: Reach,
        key: torch.Tensor,
        value: torch.Tensor,
        read: torch.Tensor | None,
        state: HybridState | None,
    ) -> "NearKeys":
        """Return the keys of a call, after a state's.

        Args:
            reach: of the window.
            key, value: [b, k, m, d].
            read: which keys are tokens, [b or 1, 1, m, 1]; None = all.
            state: of the tokens before, if there are any.
        """
        read = key.new_ones(1, 1, key.shape[2], 1, dtype=torch.bool) if read is None else read
        read = read.expand(key.shape[0], -1, -1, -1)
        if state is None:
            front = (0, 0, reach.before, 0)
            return cls(*(nn.functional.pad(each, front) for each in (key, value, read)))
        kept = zip((state.keys, state.values, state.read), (key, value, read), strict=True)
        return cls(*(torch.cat([old.to(new.dtype), new], dim=2) for old, new in kept))

    def state(self, features: torch.Tensor, sums: torch.Tensor | None, reach: Reach) -> HybridState:
        """Return what is kept for the next token.

        Args:
            features: phi(k) [b, k, before + m, F], zeros where nothing is read.
            sums: of the keys before these, if there are any.
            reach: of the window.
        """
        older = features.shape[2] - reach.before
        values = nn.functional.pad(self.values[:, :, :older], (0, 1), value=1.0)
        new = features[:, :, :older].mT @ values
        return HybridState(new if sums is None else sums + new, *(each[:, :, older:] for each in self))


def attend_in_blocks_and_sums(
    queries: torch.Tensor,
    query_features: torch.Tensor,
    near: NearKeys,
    key_features: torch.Tensor,
    log_factor: torch.Tensor,
    sums: torch.Tensor | None,
    reach: Reach,
    scaling: float,
) -> torch.Tensor:
    """Return for each query its sum of weighted values and, behind it, the sum of the weights.

    Args:
        queries, query_features: q [b, k, g, n, d] and phi(q) [b, k, g, n, F].
        near: the keys.
        key_features: their phi(k) [b, k, before + n, F], zeros where nothing is read.
        log_factor: the logarithm of gamma, [k, g].
        sums: of the keys before all of these, [b, k, F, d + 1], if there are any.
        reach: of the window.
        scaling: the factor of the dot products.

    Returns:
        [b, k, g, n, d + 1].
    """
    length, around = queries.shape[3], reach.before + reach.after
    block = min(length, max(LEAST_BLOCK, min(MOST_BLOCK, around)))
    count = -(-length // block)
    missing = count * block - length
    queries, query_features = (
        nn.functional.pad(each, (0, 0, 0, missing)).unflatten(3, (count, block)).transpose(2, 3)
        for each in (queries, query_features)
    )  # [b, k, N, g, C, ...]
    values = nn.functional.pad(near.values, (0, 1), value=1.0)
    operands = [near.keys, values, key_features, near.read]
    operands = [nn.functional.pad(each, (0, 0, 0, missing + reach.after)) for each in operands]
    spans = [each.unfold(2, block + around, block) for each in operands]  # [b, k, N, ..., S]
    is_near, is_far = _places(block, reach, queries.device)
    logits = queries.flatten(3, 4) @ spans[0] * scaling
    logits = logits.unflatten(3, (-1, block)).masked_fill(~(is_near & spans[3][:, :, :, None]), -torch.inf)
    weights = _window_weights(logits, log_factor[:, None, :, None, None])
    by_features = (query_features.flatten(3, 4) @ spans[2]).unflatten(3, (-1, block))
    weights = weights + by_features.masked_fill(~is_far, 0)
    output = weights.flatten(3, 4) @ spans[1].mT
    if count > 1 or sums is not None:
        others = _sums_of_others(operands[2], operands[1], sums, block, around, reach.is_causal)
        output = output + query_features.flatten(3, 4) @ others
    return output.unflatten(3, (-1, block)).transpose(2, 3).flatten(3, 4)[:, :, :, :length]


def _places(block: int, reach: Reach, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which keys of a block's span [C, S] are in a query's window, and which are read outside of it."""
    around = reach.before + reach.after
    distance = torch.arange(block + around, device=device) - torch.arange(block, device=device)[:, None]
    is_before, is_behind = distance < 0, distance > around
    return ~(is_before | is_behind), is_before if reach.is_causal else is_before | is_behind


def _window_weights(logits: torch.Tensor, log_factor: torch.Tensor) -> torch.Tensor:
    """Return gamma exp(s - c) of logits that are -inf outside of the window, c the largest of a row."""
    top = logits.amax(-1, keepdim=True)
    top = top.clamp_min(torch.finfo(top.dtype).min)  # of an empty window: -inf - -inf would be NaN
    return (logits - top + log_factor).exp()


def _sums_of_others(
    features: torch.Tensor,
    values: torch.Tensor,
    sums: torch.Tensor | None,
    block: int,
    around: int,
    is_causal: bool,
) -> torch.Tensor:
    """Return for each block the sum over all keys before its span and, unless causal, behind it: [b, k, N, F, d + 1].

    The spans begin with each block's first place and go on for `around` more than the block's own.
    """
    size = features.shape[2] - around
    before = _block_sums(features[:, :, :size], values[:, :, :size], block).cumsum(2)
    first = torch.zeros_like(before[:, :, :1]) if sums is None else sums[:, :, None]
    before = torch.cat([first, first + before[:, :, :-1]], dim=2)
    if is_causal:
        return before
    behind = _block_sums(features[:, :, around:], values[:, :, around:], block).flip(2).cumsum(2).flip(2)
    return before + nn.functional.pad(behind[:, :, 1:], (0, 0, 0, 0, 0, 1))


def _block_sums(features: torch.Tensor, values: torch.Tensor, block: int) -> torch.Tensor:
    features, values = (each.unflatten(2, (-1, block)) for each in (features, values))
    return features.mT @ values


def hybrid_weights(
    logits: torch.Tensor,
    by_features: torch.Tensor,
    read: torch.Tensor | None,
    log_factor: torch.Tensor,
    reach: Reach,
) -> torch.Tensor:
    """Return all weights [b, h, n, m], not yet divided by their sums.

    Args:
        logits: the dot products with their factor, [b, h, n, m].
        by_features: phi(q) phi(k) [b, h, n, m], zeros where nothing is read.
        read: which keys are tokens, [b or 1, 1, m, 1]; None = all.
        log_factor: the logarithm of gamma, [h].
        reach: of the window.
    """
    length, memory = logits.shape[2:]
    places = torch.arange(memory, device=logits.device)
    is_near = reach.allowed(places[memory - length :], places)
    logits = logits.masked_fill(~is_near if read is None else ~(is_near & read.mT), -torch.inf)
    return torch.where(is_near, _window_weights(logits, log_factor[:, None, None]), by_features)
