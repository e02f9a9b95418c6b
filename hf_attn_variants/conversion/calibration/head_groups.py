"""Second moments of heads on text, and the groups of heads that lose least when they share keys and values."""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...modeling.mechanisms.head_sharing import consecutive_groups
from ..attention_tensors import AttentionTensors, HeadCounts
from .recording import AttentionInputs, attention_weights

__all__ = ["HeadMoments", "best_groups", "head_moments", "heads_are_free", "pseudo_inverse", "square_root"]

logger = logging.getLogger(__name__)

# Relative to the largest: directions of less weight than this are numerical noise of float32 activations.
RANK_TOLERANCE = 1e-7
# The text that the search looks at; its moments are of all heads together, which costs h times those of groups.
SEARCH_TOKENS = 8192
RANDOM_STARTS = 16
# What the search may hold: two sets of the heads' moments.
MAX_SEARCH_BYTES = 8 * 2**30
Groups = list[list[int]]


def _heads_of(tensors: AttentionTensors, role: str, heads: HeadCounts, states: torch.Tensor) -> torch.Tensor:
    """Return the queries, keys or values (`role`) of all heads, shared ones repeated: [b, n, D] to [b, n, h, d]."""
    projected = tensors.project(role, states).unflatten(-1, (-1, heads.head_dim))
    return projected.repeat_interleave(heads.query // projected.shape[2], dim=2)


def _centred_keys(tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs) -> torch.Tensor:
    """Return the keys of all tokens less their mean in each text, which no softmax sees: [rows, h, d]."""
    present = batch.memory_valid()
    keys = _heads_of(tensors, "key", heads, batch.memory)
    counts = present.sum(1).clamp_min(1)[:, None, None]
    keys = keys - ((keys * present[..., None, None]).sum(1) / counts)[:, None]
    return keys[present]


class HeadMoments(NamedTuple):
    """Second moments in float64: what the closed form knows of the text.

    Attributes:
        queries: of each head's queries, [h, d, d].
        keys: for each group of query heads that will share a key/value head, of its stacked centred keys, [g*d, g*d].
        values: for each group, of its stacked values as each of its heads reads them, [g, g*d, g*d].
        attended_keys: for each group, of its stacked keys as its heads attend to them, [g*d, g*d]: each key counts by
            the weight p that a query gives it, less the mean z under p. An error E of the keys changes the softmax by
            a Kullback-Leibler divergence of half of sum_j p_j (q^T E (k_j - z))^2, to second order. Empty unless they
            are asked for.
    """

    queries: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    attended_keys: list[torch.Tensor]


def head_moments(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    groups: Sequence[Sequence[int]],
    with_attended_keys: bool = False,
) -> HeadMoments:
    """Return the moments of an attention's heads on text.

    Args:
        tensors, heads: the attention.
        inputs: what it is called with.
        groups: of query heads that will share a key/value head.
        with_attended_keys: whether these are wanted.
    """
    d = heads.head_dim
    like: dict[str, Any] = {"dtype": torch.float64, "device": tensors.query_weight.device}
    queries = torch.zeros(heads.query, d, d, **like)
    keys = [torch.zeros(len(group) * d, len(group) * d, **like) for group in groups]
    values = [torch.zeros(len(group), len(group) * d, len(group) * d, **like) for group in groups]
    attended = [torch.zeros_like(moment) for moment in keys] if with_attended_keys else []
    query_count = key_count = 0
    for batch in inputs:
        query = _heads_of(tensors, "query", heads, batch.states)[batch.valid]  # [rows, h, d]
        key = _centred_keys(tensors, heads, batch)
        queries += torch.einsum("rhd,rhe->hde", query, query)
        query_count, key_count = query_count + query.shape[0], key_count + key.shape[0]
        for group, moment in zip(groups, keys, strict=True):
            of_group = key[:, list(group)].flatten(1)
            moment += of_group.T @ of_group
        weights = attention_weights(tensors, batch, heads.query)  # [b, h, n, m]
        value = _heads_of(tensors, "value", heads, batch.memory)  # [b, m, h, d]
        for group, moments in zip(groups, values, strict=True):
            of_group = value[:, :, list(group)].flatten(2)
            for head, moment in zip(group, moments, strict=True):
                read = (weights[:, head] @ of_group)[batch.valid]
                moment += read.T @ read
        for group, moment in zip(groups, attended, strict=False):
            moment += _attended(tensors, heads, batch, weights[:, list(group)], list(group))
    return HeadMoments(
        queries / query_count,
        [moment / key_count for moment in keys],
        [moment / query_count for moment in values],
        [moment / query_count for moment in attended],
    )


def _attended(
    tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs, weights: torch.Tensor, group: list[int]
) -> torch.Tensor:
    """Return what a batch adds to a group's moment of attended keys; `weights` are its heads', [b, g, n, m]."""
    keys = _heads_of(tensors, "key", heads, batch.memory)[:, :, group].flatten(2)  # [b, m, g*d]
    weights = weights.masked_fill(~batch.valid[:, None, :, None], 0.0)
    weighted = keys * weights.sum((1, 2))[..., None]
    means = (weights @ keys[:, None]).transpose(1, 2)[batch.valid].flatten(0, 1)  # z of each query and head
    return (keys.flatten(0, 1).T @ weighted.flatten(0, 1) - means.T @ means).double() / len(group)


def square_root(moment: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def pseudo_inverse(root: torch.Tensor) -> torch.Tensor:
    """Return the pseudo-inverse of a `square_root`."""
    values, vectors = torch.linalg.eigh((root + root.T) / 2)
    floor = values.max().clamp_min(1e-300) * math.sqrt(RANK_TOLERANCE)
    return (vectors * torch.where(values > floor, 1 / values.clamp_min(floor), 0.0)) @ vectors.T


def heads_are_free(heads: HeadCounts, inputs: Sequence[AttentionInputs]) -> bool:
    """Say whether heads may change places: nothing but their own projections may tell them apart.

    T5's self-attentions may not: the position bias of head i is one for all layers.
    """
    own = heads.query == heads.output and heads.key == heads.value
    return own and all(batch.position_bias is None for batch in inputs)


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
