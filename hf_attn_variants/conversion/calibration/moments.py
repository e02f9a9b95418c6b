"""Second moments of what an attention's heads compute on recorded text, and the roots of such matrices."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..grouping import HeadCounts
from ..projections import AttentionTensors
from .recording import AttentionInputs, attention_weights

__all__ = ["head_moments", "pseudo_inverse", "square_root"]

# Relative to the largest: directions of less weight than this are numerical noise of float32 activations.
RANK_TOLERANCE = 1e-7


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


def _values_read(
    tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs, groups: Sequence[Sequence[int]]
) -> Iterator[Iterator[torch.Tensor]]:
    """Yield for each group, for each of its heads, the group's values averaged by that head's weights: [rows, g*d]."""
    weights = attention_weights(tensors, batch, heads.query)  # [b, h, n, m]
    values = _heads_of(tensors, "value", heads, batch.memory)  # [b, m, h, d]
    for group in groups:
        of_group = values[:, :, list(group)].flatten(2)
        yield ((weights[:, head] @ of_group)[batch.valid] for head in group)


def attended_key_moments(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], groups: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return for each group the second moment [g*d, g*d] of its stacked keys as its heads attend to them, in float64.

    Each key counts by the weight p that a query gives it, less the mean z under p. An error E of the keys changes the
    softmax by a Kullback-Leibler divergence of half of sum_j p_j (q^T E (k_j - z))^2, to second order.
    """
    d = heads.head_dim
    like: dict[str, Any] = {"dtype": torch.float64, "device": tensors.query_weight.device}
    moments = [torch.zeros(len(group) * d, len(group) * d, **like) for group in groups]
    count = 0
    for batch in inputs:
        weights = attention_weights(tensors, batch, heads.query)  # [b, h, n, m]
        weights = weights * batch.valid[:, None, :, None]
        keys = _heads_of(tensors, "key", heads, batch.memory)  # [b, m, h, d]
        count += int(batch.valid.sum())
        for group, moment in zip(groups, moments, strict=True):
            of_group = keys[:, :, list(group)].flatten(2)
            for head in group:
                read = (weights[:, head] @ of_group)[batch.valid]  # z
                rows = of_group * weights[:, head].sum(1)[..., None]
                moment += (of_group.flatten(0, 1).T @ rows.flatten(0, 1) - read.T @ read) / len(group)
    return [moment / count for moment in moments]


def head_moments(
    tensors: AttentionTensors, heads: HeadCounts, inputs: Sequence[AttentionInputs], groups: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return second moments in float64: what the closed form knows of the text.

    Of each head's queries [h, d, d]; for each group of query heads that will share a key/value head, of its stacked
    centred keys [g*d, g*d]; and of its stacked values as each of its heads reads them, [g, g*d, g*d].
    """
    d = heads.head_dim
    like: dict[str, Any] = {"dtype": torch.float64, "device": tensors.query_weight.device}
    queries = torch.zeros(heads.query, d, d, **like)
    keys = [torch.zeros(len(group) * d, len(group) * d, **like) for group in groups]
    values = [torch.zeros(len(group), len(group) * d, len(group) * d, **like) for group in groups]
    query_count = key_count = 0
    for batch in inputs:
        query = _heads_of(tensors, "query", heads, batch.states)[batch.valid]  # [rows, h, d]
        key = _centred_keys(tensors, heads, batch)
        queries += torch.einsum("rhd,rhe->hde", query, query)
        query_count, key_count = query_count + query.shape[0], key_count + key.shape[0]
        for group, key_moment in zip(groups, keys, strict=True):
            of_group = key[:, list(group)].flatten(1)
            key_moment += of_group.T @ of_group
        for moments, reads in zip(values, _values_read(tensors, heads, batch, groups), strict=True):
            for moment, read in zip(moments, reads, strict=True):
                moment += read.T @ read
    return queries / query_count, [key / key_count for key in keys], [value / query_count for value in values]


def square_root(moment: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def pseudo_inverse(root: torch.Tensor) -> torch.Tensor:
    """Return the pseudo-inverse of a `square_root`."""
    values, vectors = torch.linalg.eigh((root + root.T) / 2)
    floor = values.max().clamp_min(1e-300) * math.sqrt(RANK_TOLERANCE)
    return (vectors * torch.where(values > floor, 1 / values.clamp_min(floor), 0.0)) @ vectors.T
