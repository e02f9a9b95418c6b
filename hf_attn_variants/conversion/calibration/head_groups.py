"""Which heads should share a key/value head: chosen by what sharing loses on text, where a model's heads are free."""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...modeling.mechanisms.head_sharing import consecutive_groups
from ..grouping import HeadCounts, join_heads, split_heads
from ..projections import AttentionTensors
from .moments import head_moments, square_root
from .recording import AttentionInputs

logger = logging.getLogger(__name__)

__all__ = ["best_groups", "heads_are_free", "reorder_heads"]

# The text that the search looks at; its moments are of all heads together, which costs h times those of groups.
SEARCH_TOKENS = 8192
RANDOM_STARTS = 16
# What the search may hold: two sets of the heads' moments.
MAX_SEARCH_BYTES = 8 * 2**30

Groups = list[list[int]]


def heads_are_free(heads: HeadCounts, inputs: Sequence[AttentionInputs]) -> bool:
    """Say whether heads may change places: nothing but their own projections may tell them apart.

    T5's self-attentions may not: the position bias of head i is one for all layers.
    """
    own = heads.query == heads.output and heads.key == heads.value
    return own and all(batch.position_bias is None for batch in inputs)


def reorder_heads(tensors: AttentionTensors, heads: HeadCounts, groups: Groups) -> AttentionTensors:
    """Return the same attention with its query heads in the order of `groups`, which changes no output.

    Query heads that share a key/value head of the source must be beside each other in `groups`.
    """
    order = torch.tensor([head for group in groups for head in group], device=tensors.query_weight.device)
    share = heads.query // heads.key[0]
    shared = order[::share] // share
    changed: dict[str, Any] = {}
    for role, rows in (("query", order), ("key", shared), ("value", shared)):
        changed |= tensors.mapped(role, partial(_heads_in_order, order=rows))
    output = tensors.output_weight.unflatten(1, (heads.output, -1))[:, order].flatten(1)
    return replace(tensors, **changed, output_weight=output)


def _heads_in_order(projection: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return join_heads(split_heads(projection, len(order))[order])


@torch.no_grad()
def best_groups(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    generator: torch.Generator,
    uses: int = 1,
) -> Groups:
    """Search for the groups of query heads that lose the least energy of logits and of values when each shares a head.

    Pairs of heads first: random starts, improved by swaps as long as the pairs inside groups lose less. From the best
    of them, or from consecutive heads where that is better, swaps go on by the loss of whole groups.

    Args:
        tensors, heads: the projections before; `heads_are_free` must hold.
        inputs: what the attention is called with, on text.
        generator: of the random starts.
        uses: how many of the calls are of one batch of text, one after the other.
    """
    count = heads.key[1]
    units = consecutive_groups(heads.query, heads.key[0])  # query heads that share a head already move together
    if count == 1 or count == len(units):
        return consecutive_groups(heads.query, count)
    if (needed := 16 * heads.query * (heads.query * heads.head_dim) ** 2) > MAX_SEARCH_BYTES:
        message = "choosing which of %d heads of %d share a key/value head would take %.0f GB: consecutive ones share"
        logger.warning(message, heads.query, heads.head_dim, needed / 1e9)
        return consecutive_groups(heads.query, count)
    loss = _sharing_loss(tensors, heads, _sample(inputs, uses), units)

    def pairs_loss(group: Sequence[int]) -> float:
        return sum(loss(pair) for pair in itertools.combinations(sorted(group), 2))

    starts = [torch.randperm(len(units), generator=generator).tolist() for _ in range(RANDOM_STARTS)]
    size = len(units) // count
    by_pairs = [_improve_by_swaps([o[i : i + size] for i in range(0, len(o), size)], pairs_loss) for o in starts]
    best_by_pairs = min(by_pairs, key=lambda groups: sum(map(pairs_loss, groups)))
    candidates = (best_by_pairs, consecutive_groups(len(units), count))
    best = min(candidates, key=lambda groups: sum(map(loss, groups)))
    best = _improve_by_swaps(best, loss)
    return [[head for unit in group for head in units[unit]] for group in sorted(sorted(group) for group in best)]


def _sharing_loss(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], units: Groups
) -> Callable[[Sequence[int]], float]:
    """Return what a group of units loses, as a share of all heads' energy: of the logits, and of the values."""
    d = heads.head_dim
    everything = list(range(heads.query))
    queries, (keys,), (values,), _ = head_moments(tensors, heads, inputs, [everything])
    output = tensors.output_weight.double().unflatten(1, (heads.query, -1)).transpose(0, 1)  # [h, D, d]
    # In these coordinates energy is the trace, and what d dimensions keep is the sum of the d largest eigenvalues.
    keys = _congruent(keys, [square_root(moment) for moment in queries])
    metric = [square_root(weight.T @ weight) for weight in output]
    values = torch.stack([_congruent(moment, metric) for moment in values])
    total_keys = keys.trace()
    total_values = sum(values[i, i * d : (i + 1) * d, i * d : (i + 1) * d].trace() for i in everything)
    known: dict[tuple[int, ...], float] = {}

    def loss(group: Sequence[int]) -> float:
        group = tuple(sorted(group))
        if group not in known:
            members = [head for unit in group for head in units[unit]]
            rows = torch.cat([torch.arange(head * d, (head + 1) * d, device=keys.device) for head in members])
            key_moment = keys[rows][:, rows]
            value_moment = values[members].mean(0)[rows][:, rows]
            lost = [torch.linalg.eigvalsh(moment)[:-d].sum() for moment in (key_moment, value_moment)]
            known[group] = float(lost[0] / total_keys + lost[1] / total_values)
        return known[group]

    return loss


def _congruent(moment: torch.Tensor, roots: Sequence[torch.Tensor]) -> torch.Tensor:
    scale = torch.block_diag(*roots)
    return scale @ moment @ scale.T


def _sample(inputs: Sequence[AttentionInputs], uses: int) -> list[AttentionInputs]:
    tokens = sum(int(batch.valid.sum()) for batch in inputs)
    stride = max(1, tokens // SEARCH_TOKENS)
    while math.gcd(stride, uses) > 1:  # it would always meet the same layers
        stride += 1
    return list(inputs)[::stride]


def _improve_by_swaps(groups: Groups, loss: Callable[[Sequence[int]], float]) -> Groups:
    """Swap members of two groups as long as that lowers the sum of the groups' losses."""
    groups = [list(group) for group in groups]
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(groups)), 2):
            for i, j in itertools.product(range(len(groups[a])), range(len(groups[b]))):
                one, other = list(groups[a]), list(groups[b])
                one[i], other[j] = other[j], one[i]
                if loss(one) + loss(other) < loss(groups[a]) + loss(groups[b]) - 1e-9:
                    groups[a], groups[b], improved = one, other, True
    return groups
