"""Scores other than the dot product, and positions (arXiv 1409.0473, 1508.04025, 1706.03762).

a is the size that the additive score sums over, s a decoder's state.
"""

import math

import torch
from torch import Tensor, cat, einsum

from .heads import Maybe, masked_softmax


def additive_scores(Q: Tensor, K: Tensor, W: Tensor, U: Tensor, v: Tensor) -> Tensor:
    """v^T tanh(W q + U k) of every query and key (1409.0473, A.1.2).

    Q [b, n, k], K [b, m, k], W and U [a, k], v [a] -> [b, n, m].
    """
    return torch.tanh((Q @ W.T).unsqueeze(2) + (K @ U.T).unsqueeze(1)) @ v


def additive_attention(
    Q: Tensor, K: Tensor, V: Tensor, W: Tensor, U: Tensor, v: Tensor, *, mask: Maybe = None
) -> Tensor:
    """Attention by additive scores (1409.0473, A.1.2), with W and v per query head and U per key head.

    Q [b, h, n, k], K and V [b, G, m, k] (query heads g*i .. g*i + g-1 share head i), W [h, k, k], U [G, k, k],
    v [h, k], mask [b, h, n, m] -> [b, h, n, k].
    """
    g = Q.shape[1] // K.shape[1]
    heads = [additive_scores(Q[:, i], K[:, i // g], W[i], U[i // g], v[i]) for i in range(Q.shape[1])]
    return masked_softmax(torch.stack(heads, dim=1), mask) @ V.repeat_interleave(g, dim=1)


def dot_scores(Q: Tensor, K: Tensor) -> Tensor:
    """q^T k of every query and key (1508.04025, 3.1): Q [b, n, k], K [b, m, k] -> [b, n, m]."""
    return einsum("bnk,bmk->bnm", Q, K)


def general_scores(Q: Tensor, K: Tensor, W: Tensor) -> Tensor:
    """q^T W k (1508.04025, 3.1): Q [b, n, k], K [b, m, l], W [k, l] -> [b, n, m].

    It is the dot product of W^T q with k. So a Transformer's learned projection P_q is already as general.
    """
    return einsum("bnk,kl,bml->bnm", Q, W, K)


def bahdanau_context(s: Tensor, H: Tensor, W: Tensor, U: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The context of the next step, from the state before it (1409.0473, 3.1): c_t = sum_j alpha_tj h_j.

    s = s_{t-1} [b, d_s] is the query, the annotations H [b, m, d_h] are keys and values; W [a, d_s], U [a, d_h],
    v [a] -> c_t [b, d_h] and alpha_t [b, m]. The recurrent cell then makes s_t of s_{t-1}, the last word and c_t.
    """
    alpha = masked_softmax(additive_scores(s.unsqueeze(1), H, W, U, v)[:, 0])
    return einsum("bm,bmd->bd", alpha, H), alpha


def luong_output(h: Tensor, H: Tensor, W_a: Tensor, W_c: Tensor) -> tuple[Tensor, Tensor]:
    """The attentional output of a step, from its own state (1508.04025, 3): tanh(W_c [c_t; h_t]).

    h = h_t [b, d] is the query of a general score W_a [d, d_h] (the identity: dot), H [b, m, d_h] the encoder's
    states, W_c [d, d_h + d] -> the output [b, d] and the weights a_t [b, m].
    """
    weights = masked_softmax(general_scores(h.unsqueeze(1), H, W_a)[:, 0])
    c = einsum("bm,bmd->bd", weights, H)
    return torch.tanh(cat([c, h], dim=-1) @ W_c.T), weights


def sinusoidal_positions(n: int, d: int) -> Tensor:
    """The positions 0 .. n - 1 as sines and cosines (1706.03762, 3.5), [n, d] in float64.

    PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d)).
    """
    PE = torch.empty(n, d, dtype=torch.float64)
    for position in range(n):
        for place in range(d):
            angle = position / 10000 ** (2 * (place // 2) / d)
            PE[position, place] = math.cos(angle) if place % 2 else math.sin(angle)
    return PE
