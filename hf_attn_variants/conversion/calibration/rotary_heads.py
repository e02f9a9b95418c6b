"""Closed forms for key heads with rotary positions, whose maps must commute with the rotation.

A rotated query q and key k of one head have the score sum_p Re(conj(q_p) k_p) over pairs p of dimensions, which are
written as complex numbers. A new head is computed from the old projections, before the rotation. A map of a
projection commutes with the rotations at all positions only if it multiplies each pair with its own frequency by a
complex number (and the dimensions that are not rotated by any matrix). All second moments here are those of rotated
queries and keys, because a softmax ignores what all rotated keys have in common.

- Alignment: Each pair of a head is turned by a phase, towards the sum of the other heads in the group.
- Shared key head: For each pair, it is the first principal component of the keys of the g heads in the group, weighted
  by the second moments of their queries. Its maps and those of the queries are complex numbers, and it is optimal if
  different pairs of queries and keys are uncorrelated. Pairs whose frequencies nearly coincide can be correlated.
- Queries: With the shared keys fixed, the scores are linear in the complex factors b of a head. `fit_query_factors`
  minimizes the squared error over all pairs of a query n and a key m in the same text,

      sum_nm ( Re sum_p conj(b_p q_np) k'_mp  -  Re sum_p conj(q_np) k_mp )^2

  Each product of two features is a product of a query moment and a key moment, so no pair (n, m) is enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..rotary_positions import RotaryPairs
from .head_moments import find_shared_head, matrix_square_root, transform_moment

# Regularization of the regression for query factors, relative to the mean diagonal element of its matrix.
RIDGE_STRENGTH = 1e-6


def compute_pair_moments(moment: torch.Tensor, head_dim: int, pairs: RotaryPairs) -> torch.Tensor:
    """Return the complex second moments E[z_i conj(z_j)] of heads i and j for each pair, [p, g, g].

    Args:
        moment: Second moments of the stacked heads, [g*d, g*d].
        head_dim: Size of a head.
        pairs: The pairs of dimensions.
    """
    blocks = moment.unflatten(0, (-1, head_dim)).unflatten(2, (-1, head_dim))
    first, second = pairs.first, pairs.second
    real = blocks[:, first, :, first] + blocks[:, second, :, second]
    return torch.complex(real, blocks[:, second, :, first] - blocks[:, first, :, second])


def select_rest(moment: torch.Tensor, head_dim: int, pairs: RotaryPairs) -> torch.Tensor:
    """Return the second moments [g*r, g*r] of the dimensions that are not rotated."""
    blocks = moment.unflatten(0, (-1, head_dim)).unflatten(2, (-1, head_dim))
    return blocks[:, pairs.rest][:, :, :, pairs.rest].flatten(2).flatten(0, 1)


def make_commuting_maps(factors: torch.Tensor, rest: torch.Tensor, pairs: RotaryPairs) -> torch.Tensor:
    """Return the matrices [g, d, d] that multiply pairs by complex factors [g, p], and the other dimensions by `rest`.

    Args:
        factors: The complex factor of each head and pair, [g, p].
        rest: The matrices for the dimensions that are not rotated, [g, r, r].
        pairs: The pairs of dimensions.
    """
    first, second, size = pairs.first, pairs.second, 2 * len(pairs.first) + len(pairs.rest)
    maps = rest.new_zeros(len(factors), size, size)
    maps[:, first, first] = maps[:, second, second] = factors.real
    maps[:, first, second], maps[:, second, first] = -factors.imag, factors.imag
    maps[:, pairs.rest[:, None], pairs.rest] = rest
    return maps


def find_phases(moments: torch.Tensor, rounds: int) -> torch.Tensor:
    """Return the phases [g, p] that bring heads with the complex moments [p, g, g] as close together as possible."""
    size = moments.shape[1]
    phases = torch.ones(moments.shape[:2], dtype=moments.dtype, device=moments.device)
    for _ in range(rounds if size > 1 else 0):
        for head in range(size):
            # The phase u of head i maximizes Re(u sum_j C_ij conj(u_j)).
            others = (moments[:, head] * phases.conj()).sum(-1) - moments[:, head, head] * phases[:, head].conj()
            phases[:, head] = torch.where(others.abs() > 0, others.conj().sgn(), 1.0)
    return phases.T


def _compute_weighted_pair_moments(moment: torch.Tensor, queries: torch.Tensor, pairs: RotaryPairs) -> torch.Tensor:
    """Return the complex moments of keys, [p, g, g], weighted by the query energies of both heads.

    Args:
        moment: Second moments of the stacked keys, [g*d, g*d].
        queries: Second moments of the queries of each head, [g, d, d].
        pairs: The pairs of dimensions.
    """
    scales = _get_query_scales(queries, pairs)
    return compute_pair_moments(moment, queries.shape[1], pairs) * scales.T[:, :, None] * scales.T[:, None]


def _get_query_scales(queries: torch.Tensor, pairs: RotaryPairs) -> torch.Tensor:
    """Return the root mean square of one dimension of the queries for each head and pair, [g, p]."""
    energies = queries.diagonal(dim1=1, dim2=2)
    return ((energies[:, pairs.first] + energies[:, pairs.second]) / 2).clamp_min(1e-30).sqrt()


def _find_shared_pairs(
    moment: torch.Tensor, queries: torch.Tensor, pairs: RotaryPairs
) -> tuple[torch.Tensor, torch.Tensor, tuple[float, float]]:
    """Find the best shared key head for rotated dimensions if different pairs are uncorrelated.

    See `_compute_weighted_pair_moments` for the arguments.

    Returns:
        The complex factors of the old key heads, whose sum is the new key head, and those of the queries, both [g, p].
        The third value contains the energy of the scores that the new head preserves, and the total energy.
    """
    weighted = _compute_weighted_pair_moments(moment, queries, pairs)
    values, vectors = torch.linalg.eigh(weighted)
    best = vectors[:, :, -1].T  # [g, p]
    scales = _get_query_scales(queries, pairs)
    return best.conj() * scales, best.conj() / scales, (float(values[:, -1].sum()), float(values.sum()))


def find_shared_rotary_head(
    queries: torch.Tensor, moment: torch.Tensor, pairs: RotaryPairs
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Find the best key head that a group of heads with rotary positions can share.

    Args:
        queries: Second moments of the queries of each head, [g, d, d].
        moment: Second moments of the stacked keys, [g*d, g*d].
        pairs: The pairs of dimensions.

    Returns:
        The maps of the old key heads [g, d, d], whose sum is the new key head, the maps of the queries [g, d, d], and
        the share of energy that is preserved.
    """
    size, head_dim, count = *queries.shape[:2], len(pairs.rest)
    key_factors, query_factors, (preserved, total) = _find_shared_pairs(moment, queries, pairs)
    key_rest = query_rest = queries.new_zeros(size, 0, 0)
    if count:
        rest = select_rest(moment, head_dim, pairs)
        metric = [matrix_square_root(matrix[pairs.rest][:, pairs.rest]) for matrix in queries]
        eye = torch.eye(size * count).to(moment).unflatten(0, (size, count))
        shared, old, share = find_shared_head(eye, metric, rest)
        key_rest, query_rest = shared.unflatten(1, (size, count)).transpose(0, 1), old.mT
        energy = float(transform_moment(rest, metric).trace())
        preserved, total = preserved + share * energy, total + energy
    maps = make_commuting_maps(key_factors, key_rest, pairs), make_commuting_maps(query_factors, query_rest, pairs)
    return *maps, preserved / max(total, 1e-300)


def make_shared_key_loss(
    moment: torch.Tensor, queries: torch.Tensor, pairs: RotaryPairs
) -> Callable[[Sequence[int]], float]:
    """Return a function that computes the share of score energy that heads lose if they share one key head.

    Args:
        moment: Second moments of the stacked keys of all heads, [h*d, h*d].
        queries: Second moments of the queries of each head, [h, d, d].
        pairs: The pairs of dimensions.
    """
    weighted, size = _compute_weighted_pair_moments(moment, queries, pairs), len(pairs.rest)
    rest = _weight_rest_moments(moment, queries, pairs)
    total = weighted.diagonal(dim1=1, dim2=2).real.sum() + rest.trace()

    def compute_loss(heads: Sequence[int]) -> float:
        heads = list(heads)
        lost = torch.linalg.eigvalsh(weighted[:, heads][:, :, heads])[:, :-1].sum()
        if size:
            rows = torch.cat([torch.arange(head * size, (head + 1) * size, device=rest.device) for head in heads])
            lost = lost + torch.linalg.eigvalsh(rest[rows][:, rows])[:-size].sum()
        return float(lost / total.clamp_min(1e-300))

    return compute_loss


def _weight_rest_moments(moment: torch.Tensor, queries: torch.Tensor, pairs: RotaryPairs) -> torch.Tensor:
    """Return the moments of the keys in dimensions that are not rotated, weighted by the queries, [g*r, g*r]."""
    roots = [matrix_square_root(matrix[pairs.rest][:, pairs.rest]) for matrix in queries]
    return transform_moment(select_rest(moment, queries.shape[1], pairs), roots)


def fit_query_factors(texts: Iterable[tuple[torch.Tensor, ...]], pairs: RotaryPairs) -> torch.Tensor:
    """Return the query maps [h, d, d] that minimize the squared error of all scores with fixed shared keys.

    The features of a pair (a, b) are q_a k_a + q_b k_b and q_a k_b - q_b k_a, which are the scores of q and of i q.
    The features of dimensions that are not rotated are all products q_u k_v.

    Args:
        texts: For each batch of texts, the second moments of the rotated queries, those of the new keys, and the cross
            moments of the old keys and the new keys, each [b, h, d, d]. All of them are sums over tokens, and the keys
            are centered.
        pairs: The pairs of dimensions.
    """
    order, count, size = torch.cat(pairs), len(pairs.first), len(pairs.rest)
    gram: Any = 0.0
    target: Any = 0.0
    for moments in texts:
        batches = [moment[..., order, :][..., order] for moment in moments]
        for queries, keys, cross in zip(*batches, strict=True):
            gram = gram + _compute_feature_moments(queries, keys, count)
            target = target + _compute_feature_targets(queries @ cross, count)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(RIDGE_STRENGTH * diagonal.mean(-1, keepdim=True) + 1e-300)
    coefficients = torch.linalg.solve(gram, target)
    factors = torch.complex(coefficients[:, :count], coefficients[:, count : 2 * count])
    return make_commuting_maps(factors, coefficients[:, 2 * count :].unflatten(1, (size, size)).mT, pairs)


def _compute_feature_moments(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sums of products of two features over all pairs of a query and a key, [h, s, s].

    Args:
        queries, keys: The moments [h, d, d]. The first dimensions of all pairs precede the second ones and the rest.
        count: The number of pairs.
    """
    sizes = (count, count, queries.shape[-1] - 2 * count)
    q, k = ([rows.split(sizes, -1) for rows in moment.split(sizes, -2)] for moment in (queries, keys))
    aligned = q[0][0] * k[0][0] + q[0][1] * k[0][1] + q[1][0] * k[1][0] + q[1][1] * k[1][1]
    rotated = q[0][0] * k[1][1] - q[0][1] * k[1][0] - q[1][0] * k[0][1] + q[1][1] * k[0][0]
    mixed = q[0][0] * k[0][1] - q[0][1] * k[0][0] + q[1][0] * k[1][1] - q[1][1] * k[1][0]

    def multiply(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hpu,hpv->hpuv", first, second).flatten(2)

    aligned_rest = multiply(q[0][2], k[0][2]) + multiply(q[1][2], k[1][2])
    rotated_rest = multiply(q[0][2], k[1][2]) - multiply(q[1][2], k[0][2])
    rest = torch.einsum("hux,hvy->huvxy", q[2][2], k[2][2]).flatten(3).flatten(1, 2)
    rows = (aligned, mixed, aligned_rest), (mixed.mT, rotated, rotated_rest), (aligned_rest.mT, rotated_rest.mT, rest)
    return torch.cat([torch.cat(row, -1) for row in rows], -2)


def _compute_feature_targets(cross: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sums of products of a feature and the old score, [h, s].

    Args:
        cross: The query moments times the cross moments of old and new keys, [h, d, d], in the same order as in
            `_compute_feature_moments`.
        count: The number of pairs.
    """
    first, second, rest = slice(count), slice(count, 2 * count), slice(2 * count, None)

    def get_diagonal(rows: slice, columns: slice) -> torch.Tensor:
        return cross[:, rows, columns].diagonal(dim1=1, dim2=2)

    aligned = get_diagonal(first, first) + get_diagonal(second, second)
    rotated = get_diagonal(first, second) - get_diagonal(second, first)
    return torch.cat([aligned, rotated, cross[:, rest, rest].flatten(1)], -1)
