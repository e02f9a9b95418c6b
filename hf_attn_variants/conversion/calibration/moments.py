"""Second moments of what an attention's heads compute on recorded text, and the roots of such matrices."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..grouping import HeadCounts
from ..projections import AttentionTensors
from .recording import AttentionInputs, attention_weights

__all__ = ["HeadMoments", "head_moments", "pseudo_inverse", "square_root"]

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
