"""Measures the second moments of the heads in an attention module on text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..attention_tensors import AttentionInputs, AttentionTensors, HeadCounts
from ..rotary_positions import RotaryPairs
from .recording import compute_attention_weights

# Directions with a smaller weight, relative to the largest weight, are numerical noise in float32 activations.
RANK_TOLERANCE = 1e-7


def project_heads(tensors: AttentionTensors, role: str, heads: HeadCounts, batch: AttentionInputs) -> torch.Tensor:
    """Return the rotated queries or keys, or the values, [b, n, h, d] of all query heads, with repeated heads."""
    states = batch.states if role == "query" else batch.key_value_states
    projected = tensors.project(role, states).unflatten(-1, (-1, heads.head_dim))
    if batch.rotary is not None and role != "value":
        projected = batch.rotary.rotate(projected)
    return projected.repeat_interleave(heads.query // projected.shape[2], dim=2)


def center_keys(tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs) -> torch.Tensor:
    """Return the keys [b, m, h, d] minus their mean in each text, because a softmax ignores it. Padding is zero."""
    present = batch.get_key_mask()
    keys = project_heads(tensors, "key", heads, batch)
    counts = present.sum(1).clamp_min(1)[:, None, None]
    keys = keys - ((keys * present[..., None, None]).sum(1) / counts)[:, None]
    return keys * present[..., None, None]


def get_rotary_pairs(heads: HeadCounts, inputs: Sequence[AttentionInputs]) -> RotaryPairs | None:
    """Return the pairs of dimensions that rotary positions rotate, or None if there are no rotary positions."""
    rotary = inputs[0].rotary if inputs else None
    return None if rotary is None else rotary.get_pairs(heads.head_dim)


class HeadMoments(NamedTuple):
    """Second-moment matrices for the closed form, measured on text (float64).

    Attributes:
        queries: Moments of the queries of each head, [h, d, d].
        keys: For each group of query heads that will share a key/value head, the moments of the stacked centered keys,
            [g*d, g*d].
        values: For each group, the moments of the stacked values after averaging with the attention weights of each
            head, [g, g*d, g*d].
        attended_keys: For each group, the attention-weighted moments of the stacked keys, [g*d, g*d]. Each key is
            weighted by its attention weight p, and the mean z under p is subtracted. To second order, an error E in
            the keys changes the softmax by a Kullback-Leibler divergence of half of sum_j p_j (q^T E (k_j - z))^2.
            The list is empty unless `with_attended_keys` is set.
    """

    queries: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    attended_keys: list[torch.Tensor]


def compute_head_moments(
    tensors: AttentionTensors,
    heads: HeadCounts,
    inputs: Sequence[AttentionInputs],
    groups: Sequence[Sequence[int]],
    with_attended_keys: bool = False,
) -> HeadMoments:
    """Compute the second moments of an attention module's heads on text.

    Args:
        tensors: The projections of the module.
        heads: The head counts.
        inputs: Recorded inputs to the module.
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
        query = project_heads(tensors, "query", heads, batch)[batch.valid]  # [rows, h, d]
        key = center_keys(tensors, heads, batch)[batch.get_key_mask()]
        queries += torch.einsum("rhd,rhe->hde", query, query)
        query_count, key_count = query_count + query.shape[0], key_count + key.shape[0]
        for group, moment in zip(groups, keys, strict=True):
            stacked = key[:, list(group)].flatten(1)
            moment += stacked.T @ stacked
        weights = compute_attention_weights(tensors, batch, heads.query)  # [b, h, n, m]
        value = project_heads(tensors, "value", heads, batch)  # [b, m, h, d]
        for group, moments in zip(groups, values, strict=True):
            stacked = value[:, :, list(group)].flatten(2)
            for head, moment in zip(group, moments, strict=True):
                attended = (weights[:, head] @ stacked)[batch.valid]
                moment += attended.T @ attended
        for group, moment in zip(groups, attended_keys, strict=False):
            moment += _compute_attended_key_moment(tensors, heads, batch, weights[:, list(group)], list(group))
    return HeadMoments(
        queries / query_count,
        [moment / key_count for moment in keys],
        [moment / query_count for moment in values],
        [moment / query_count for moment in attended_keys],
    )


def _compute_attended_key_moment(
    tensors: AttentionTensors, heads: HeadCounts, batch: AttentionInputs, weights: torch.Tensor, group: list[int]
) -> torch.Tensor:
    """Return the contribution of one batch to `HeadMoments.attended_keys` for a group with weights [b, g, n, m]."""
    keys = project_heads(tensors, "key", heads, batch)[:, :, group].flatten(2)  # [b, m, g*d]
    weights = weights.masked_fill(~batch.valid[:, None, :, None], 0.0)
    weighted = keys * weights.sum((1, 2))[..., None]
    means = (weights @ keys[:, None]).transpose(1, 2)[batch.valid].flatten(0, 1)  # z of each query and head
    return (keys.flatten(0, 1).T @ weighted.flatten(0, 1) - means.T @ means).double() / len(group)


def matrix_square_root(moment: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def pseudo_inverse(root: torch.Tensor) -> torch.Tensor:
    """Return the pseudo-inverse of a matrix from `matrix_square_root`."""
    values, vectors = torch.linalg.eigh((root + root.T) / 2)
    min_eigenvalue = values.max().clamp_min(1e-300) * math.sqrt(RANK_TOLERANCE)
    return (vectors * torch.where(values > min_eigenvalue, 1 / values.clamp_min(min_eigenvalue), 0.0)) @ vectors.T


def transform_moment(moment: torch.Tensor, roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the second-moment matrix of stacked heads after multiplying each head by its matrix in `roots`."""
    scale = torch.block_diag(*roots)
    return scale @ moment @ scale.T


def find_shared_head(
    old: torch.Tensor, metric: Sequence[torch.Tensor], moment: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Find the best d-dimensional projection that all heads in a group can share.

    Args:
        old: The group's projections, [g, d, D + 1].
        metric: For each head, the square root [d, d] of the matrix that weights its errors.
        moment: The second-moment matrix of the stacked outputs of these projections, [g*d, g*d].

    Returns:
        The shared projection [d, D + 1], the matrices [g, d, d] that approximate each old head from it, and the share
        of energy that it preserves.
    """
    size, head_dim = old.shape[0], old.shape[1]
    root = matrix_square_root(moment)
    _, singular, right = torch.linalg.svd(torch.block_diag(*metric) @ root)
    basis = right[:head_dim]
    energy = singular.square()
    shared = basis @ pseudo_inverse(root) @ old.flatten(0, 1)
    query_maps = (root @ basis.T).unflatten(0, (size, head_dim))
    return shared, query_maps, float(energy[:head_dim].sum() / energy.sum().clamp_min(1e-300))


def split_output_heads(tensors: AttentionTensors, heads: HeadCounts) -> torch.Tensor:
    """Return the output projection of each query head, [h, D, d], in float64."""
    return tensors.output_weight.double().unflatten(1, (heads.query, -1)).transpose(0, 1)
