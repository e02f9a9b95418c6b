"""Second moments of heads on text, and the best groups of heads to share keys and values."""

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

# Directions with less weight than this, relative to the largest, are numerical noise of float32 activations.
RANK_TOLERANCE = 1e-7
# Maximum number of tokens for the search. It needs the moments of all heads together, which cost h times as much as
# those of groups.
SEARCH_TOKENS = 8192
RANDOM_STARTS = 16
# Maximum memory for the search, which needs two sets of the moments.
MAX_SEARCH_BYTES = 8 * 2**30
Groups = list[list[int]]


def _project_heads(tensors: AttentionTensors, role: str, heads: HeadCounts, states: torch.Tensor) -> torch.Tensor:
    """Return the queries, keys or values of all query heads (shared heads are repeated): [b, n, D] to [b, n, h, d]."""
    projected = tensors.project(role, states).unflatten(-1, (-1, heads.head_dim))
    return projected.repeat_interleave(heads.query // projected.shape[2], dim=2)


def _center_keys(tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs) -> torch.Tensor:
    """Return the keys of all tokens minus their mean in each text, which a softmax ignores: [rows, h, d]."""
    present = batch.key_mask()
    keys = _project_heads(tensors, "key", heads, batch.key_value_states)
    counts = present.sum(1).clamp_min(1)[:, None, None]
    keys = keys - ((keys * present[..., None, None]).sum(1) / counts)[:, None]
    return keys[present]


class HeadMoments(NamedTuple):
    """Second moments on text in float64, for the closed form.

    Attributes:
        queries: Moments of the queries of each head, [h, d, d].
        keys: For each group of query heads that will share a key/value head, the moment of its stacked centered keys,
            [g*d, g*d].
        values: For each group, the moments of its stacked values after the attention of each head, [g, g*d, g*d].
        attended_keys: For each group, the moment of its stacked keys as its heads attend to them, [g*d, g*d]. Each key
            has the weight p that a query gives it, and the mean z under p is subtracted. An error E of the keys
            changes the softmax by a Kullback-Leibler divergence of half of sum_j p_j (q^T E (k_j - z))^2, to second
            order. The list is empty unless it is requested.
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
    """Return the moments of the heads of an attention on text.

    Args:
        tensors: The projections of the attention.
        heads: The head counts.
        inputs: Inputs of the attention on text.
        groups: Groups of query heads that will share a key/value head.
        with_attended_keys: Whether to compute `HeadMoments.attended_keys`.
    """
    d = heads.head_dim
    like: dict[str, Any] = {"dtype": torch.float64, "device": tensors.query_weight.device}
    queries = torch.zeros(heads.query, d, d, **like)
    keys = [torch.zeros(len(group) * d, len(group) * d, **like) for group in groups]
    values = [torch.zeros(len(group), len(group) * d, len(group) * d, **like) for group in groups]
    attended_keys = [torch.zeros_like(moment) for moment in keys] if with_attended_keys else []
    query_count = key_count = 0
    for batch in inputs:
        query = _project_heads(tensors, "query", heads, batch.states)[batch.valid]  # [rows, h, d]
        key = _center_keys(tensors, heads, batch)
        queries += torch.einsum("rhd,rhe->hde", query, query)
        query_count, key_count = query_count + query.shape[0], key_count + key.shape[0]
        for group, moment in zip(groups, keys, strict=True):
            stacked = key[:, list(group)].flatten(1)
            moment += stacked.T @ stacked
        weights = attention_weights(tensors, batch, heads.query)  # [b, h, n, m]
        value = _project_heads(tensors, "value", heads, batch.key_value_states)  # [b, m, h, d]
        for group, moments in zip(groups, values, strict=True):
            stacked = value[:, :, list(group)].flatten(2)
            for head, moment in zip(group, moments, strict=True):
                attended = (weights[:, head] @ stacked)[batch.valid]
                moment += attended.T @ attended
        for group, moment in zip(groups, attended_keys, strict=False):
            moment += _attended_key_moment(tensors, heads, batch, weights[:, list(group)], list(group))
    return HeadMoments(
        queries / query_count,
        [moment / key_count for moment in keys],
        [moment / query_count for moment in values],
        [moment / query_count for moment in attended_keys],
    )


def _attended_key_moment(
    tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs, weights: torch.Tensor, group: list[int]
) -> torch.Tensor:
    """Return the moment of attended keys of a group in one batch. `weights` are those of its heads, [b, g, n, m]."""
    keys = _project_heads(tensors, "key", heads, batch.key_value_states)[:, :, group].flatten(2)  # [b, m, g*d]
    weights = weights.masked_fill(~batch.valid[:, None, :, None], 0.0)
    weighted = keys * weights.sum((1, 2))[..., None]
    means = (weights @ keys[:, None]).transpose(1, 2)[batch.valid].flatten(0, 1)  # z for each query and head
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
    """Return whether heads can be reordered, that is, whether only their own projections distinguish them.

    T5's self-attentions cannot, because head i has the same position bias in all layers.
    """
    is_symmetric = heads.query == heads.output and heads.key == heads.value
    return is_symmetric and all(batch.position_bias is None for batch in inputs)


@torch.no_grad()
def best_groups(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    generator: torch.Generator,
    uses: int = 1,
) -> Groups:
    """Search the groups of query heads that lose the least energy of logits and values if each group shares a head.

    The search first minimizes the loss of pairs of heads within groups, with swaps from random starts. The best
    result, or groups of consecutive heads if they are better, is then improved by swaps that minimize the loss of
    whole groups.

    Args:
        tensors: The projections of the attention. `heads_are_free` must hold.
        heads: The head counts.
        inputs: Inputs of the attention on text.
        generator: Random number generator for the starts.
        uses: Number of consecutive inputs that come from the same batch of text.

    Returns:
        The query heads of each group.
    """
    count = heads.key[1]
    units = consecutive_groups(heads.query, heads.key[0])  # heads that already share a head stay together
    if count == 1 or count == len(units):
        return consecutive_groups(heads.query, count)
    if (needed_bytes := 16 * heads.query * (heads.query * heads.head_dim) ** 2) > MAX_SEARCH_BYTES:
        message = "The search for groups of %d heads of size %d would need %.0f GB. Consecutive heads share a head."
        logger.warning(message, heads.query, heads.head_dim, needed_bytes / 1e9)
        return consecutive_groups(heads.query, count)
    loss = _make_sharing_loss(tensors, heads, _sample_inputs(inputs, uses), units)

    def pairs_loss(group: Sequence[int]) -> float:
        """Return the sum of the losses of all pairs in a group."""
        return sum(loss(pair) for pair in itertools.combinations(sorted(group), 2))

    starts = [torch.randperm(len(units), generator=generator).tolist() for _ in range(RANDOM_STARTS)]
    size = len(units) // count
    by_pairs = [
        _improve_by_swaps([order[i : i + size] for i in range(0, len(order), size)], pairs_loss) for order in starts
    ]
    best_by_pairs = min(by_pairs, key=lambda groups: sum(map(pairs_loss, groups)))
    candidates = (best_by_pairs, consecutive_groups(len(units), count))
    best = min(candidates, key=lambda groups: sum(map(loss, groups)))
    best = _improve_by_swaps(best, loss)
    return [[head for unit in group for head in units[unit]] for group in sorted(sorted(group) for group in best)]


def _make_sharing_loss(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], units: Groups
) -> Callable[[Sequence[int]], float]:
    """Return a function of a group of units: the share of the energy of logits and values that it loses."""
    d = heads.head_dim
    all_heads = list(range(heads.query))
    queries, (keys,), (values,), _ = head_moments(tensors, heads, inputs, [all_heads])
    output = tensors.output_weight.double().unflatten(1, (heads.query, -1)).transpose(0, 1)  # [h, D, d]
    # In these coordinates the energy is the trace, and d dimensions preserve the sum of the d largest eigenvalues.
    keys = _transform(keys, [square_root(moment) for moment in queries])
    metric = [square_root(weight.T @ weight) for weight in output]
    values = torch.stack([_transform(moment, metric) for moment in values])
    total_keys = keys.trace()
    total_values = sum(values[i, i * d : (i + 1) * d, i * d : (i + 1) * d].trace() for i in all_heads)
    losses: dict[tuple[int, ...], float] = {}

    def loss(group: Sequence[int]) -> float:
        """Return the loss of a group. Known losses are not computed again."""
        group = tuple(sorted(group))
        if group not in losses:
            members = [head for unit in group for head in units[unit]]
            rows = torch.cat([torch.arange(head * d, (head + 1) * d, device=keys.device) for head in members])
            key_moment = keys[rows][:, rows]
            value_moment = values[members].mean(0)[rows][:, rows]
            lost = [torch.linalg.eigvalsh(moment)[:-d].sum() for moment in (key_moment, value_moment)]
            losses[group] = float(lost[0] / total_keys + lost[1] / total_values)
        return losses[group]

    return loss


def _transform(moment: torch.Tensor, roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the moment of stacked heads after each head is multiplied by its matrix in `roots`."""
    scale = torch.block_diag(*roots)
    return scale @ moment @ scale.T


def _sample_inputs(inputs: Sequence[AttentionInputs], uses: int) -> list[AttentionInputs]:
    """Return evenly spaced inputs with about `SEARCH_TOKENS` tokens."""
    tokens = sum(int(batch.valid.sum()) for batch in inputs)
    stride = max(1, tokens // SEARCH_TOKENS)
    while math.gcd(stride, uses) > 1:  # otherwise the sample would only contain some of the layers
        stride += 1
    return list(inputs)[::stride]


def _improve_by_swaps(groups: Groups, loss: Callable[[Sequence[int]], float]) -> Groups:
    """Swap members of two groups as long as this decreases the sum of the losses of the groups."""
    groups = [list(group) for group in groups]
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(groups)), 2):
            for i, j in itertools.product(range(len(groups[a])), range(len(groups[b]))):
                first, second = list(groups[a]), list(groups[b])
                first[i], second[j] = second[j], first[i]
                if loss(first) + loss(second) < loss(groups[a]) + loss(groups[b]) - 1e-9:
                    groups[a], groups[b], improved = first, second, True
    return groups
