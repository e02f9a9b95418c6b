"""Searches for the groups of query heads that lose the least if each group shares a key/value head."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence

import torch

from ...modeling.mechanisms.head_sharing import get_consecutive_groups
from ..attention_tensors import AttentionInputs, AttentionTensors, HeadCounts
from .head_moments import (
    compute_head_moments,
    get_rotary_pairs,
    matrix_square_root,
    split_output_heads,
    transform_moment,
)
from .rotary_heads import make_shared_key_loss

logger = logging.getLogger(__name__)

# Approximate number of tokens for the search. It needs joint moments of all heads, which are much more expensive than
# the moments of groups.
SEARCH_TOKENS = 8192


RANDOM_STARTS = 16


# Maximum memory for the search, which needs two sets of moments.
MAX_SEARCH_BYTES = 8 * 2**30


Groups = list[list[int]]


def can_reorder_heads(heads: HeadCounts, inputs: Sequence[AttentionInputs]) -> bool:
    """Return whether heads can be reordered, which requires that they differ only in their projections.

    Heads in T5's self-attention cannot be reordered because all layers share the position bias of head i.
    """
    is_symmetric = heads.query == heads.output and heads.key == heads.value
    return is_symmetric and all(batch.position_bias is None for batch in inputs)


@torch.no_grad()
def find_best_groups(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    generator: torch.Generator,
    num_uses: int = 1,
) -> Groups:
    """Search for the groups of query heads that lose the least logit and value energy if each group shares one head.

    The search first minimizes the pairwise loss within groups by swapping heads, from random starting points. The best
    result, or groups of consecutive heads if they are better, is then improved by swaps that minimize the loss of
    whole groups.

    Args:
        tensors: The projections of the module. `can_reorder_heads` must be True.
        heads: The head counts.
        inputs: Recorded inputs to the module.
        generator: Random number generator for the starting points.
        num_uses: Number of consecutive inputs that belong to the same batch of text.

    Returns:
        The query heads in each group.
    """
    count = heads.key[1]
    units = get_consecutive_groups(heads.query, heads.key[0])  # query heads that already share a head stay together
    if count == 1 or count == len(units):
        return get_consecutive_groups(heads.query, count)
    if (needed_bytes := 16 * heads.query * (heads.query * heads.head_dim) ** 2) > MAX_SEARCH_BYTES:
        logger.warning(f"Grouping consecutive heads because the search would need {needed_bytes / 1e9:.0f} GB.")
        return get_consecutive_groups(heads.query, count)
    compute_loss = _make_sharing_loss(tensors, heads, _sample_inputs(inputs, num_uses), units)

    def compute_pairs_loss(group: Sequence[int]) -> float:
        """Return the total loss of all pairs in a group."""
        return sum(compute_loss(pair) for pair in itertools.combinations(sorted(group), 2))

    starts = [torch.randperm(len(units), generator=generator).tolist() for _ in range(RANDOM_STARTS)]
    size = len(units) // count
    groupings = [
        _improve_by_swaps([order[i : i + size] for i in range(0, len(order), size)], compute_pairs_loss)
        for order in starts
    ]
    best_grouping = min(groupings, key=lambda groups: sum(map(compute_pairs_loss, groups)))
    candidates = (best_grouping, get_consecutive_groups(len(units), count))
    best = _improve_by_swaps(min(candidates, key=lambda groups: sum(map(compute_loss, groups))), compute_loss)
    return [[head for unit in group for head in units[unit]] for group in sorted(sorted(group) for group in best)]


def _make_sharing_loss(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], units: Groups
) -> Callable[[Sequence[int]], float]:
    """Return a function that computes the share of logit and value energy that a group of units loses.

    Each unit contains the query heads that already share a key/value head.
    """
    d = heads.head_dim
    all_heads = list(range(heads.query))
    queries, (keys,), (values,), _ = compute_head_moments(tensors, heads, inputs, [all_heads])
    output = split_output_heads(tensors, heads)
    # In these coordinates the energy is the trace, and d dimensions preserve the sum of the d largest eigenvalues.
    pairs = get_rotary_pairs(heads, inputs)
    rotary_loss = None if pairs is None else make_shared_key_loss(keys, queries, pairs)
    keys = transform_moment(keys, [matrix_square_root(moment) for moment in queries])
    metric = [matrix_square_root(weight.T @ weight) for weight in output]
    values = torch.stack([transform_moment(moment, metric) for moment in values])
    total_keys = keys.trace()
    total_values = sum(values[i, i * d : (i + 1) * d, i * d : (i + 1) * d].trace() for i in all_heads)

    @functools.cache
    def compute_loss(group: tuple[int, ...]) -> float:
        members = [head for unit in group for head in units[unit]]
        rows = torch.cat([torch.arange(head * d, (head + 1) * d, device=keys.device) for head in members])
        value_moment = values[members].mean(0)[rows][:, rows]
        lost_values = float(torch.linalg.eigvalsh(value_moment)[:-d].sum() / total_values)
        if rotary_loss is not None:
            return rotary_loss(members) + lost_values
        return float(torch.linalg.eigvalsh(keys[rows][:, rows])[:-d].sum() / total_keys) + lost_values

    return lambda group: compute_loss(tuple(sorted(group)))


def _sample_inputs(inputs: Sequence[AttentionInputs], num_uses: int) -> list[AttentionInputs]:
    """Return evenly spaced inputs with about `SEARCH_TOKENS` tokens."""
    tokens = sum(int(batch.valid.sum()) for batch in inputs)
    stride = max(1, tokens // SEARCH_TOKENS)
    while math.gcd(stride, num_uses) > 1:  # otherwise, the sample would only contain some of the layers
        stride += 1
    return list(inputs)[::stride]


def _improve_by_swaps(groups: Groups, loss: Callable[[Sequence[int]], float]) -> Groups:
    """Swap members between groups until no swap decreases the total loss."""
    groups, has_improved = [list(group) for group in groups], True
    while has_improved:
        has_improved = False
        for a, b in itertools.combinations(range(len(groups)), 2):
            for i, j in itertools.product(range(len(groups[a])), range(len(groups[b]))):
                first, second = list(groups[a]), list(groups[b])
                first[i], second[j] = second[j], first[i]
                if loss(first) + loss(second) < loss(groups[a]) + loss(groups[b]) - 1e-9:
                    groups[a], groups[b], has_improved = first, second, True
    return groups
