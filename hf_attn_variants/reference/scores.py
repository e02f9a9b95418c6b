"""Score functions, recurrent attention and sinusoidal positions (arXiv 1409.0473, 1508.04025, 1706.03762).

a is the size of the hidden layer in the additive score function, and s is the state of a recurrent decoder.
"""

import math

import torch
from torch import Tensor, cat, einsum

from .heads import Maybe, masked_softmax


def additive_scores(Q: Tensor, K: Tensor, W: Tensor, U: Tensor, v: Tensor) -> Tensor:
    """Return v^T tanh(W q + U k) for every query and key (1409.0473, A.1.2).

    Q [b, n, k], K [b, m, k], W and U [a, k], v [a] -> [b, n, m].
    """
    return torch.tanh((Q @ W.T).unsqueeze(2) + (K @ U.T).unsqueeze(1)) @ v


def additive_attention(
    Q: Tensor, K: Tensor, V: Tensor, W: Tensor, U: Tensor, v: Tensor, *, mask: Maybe = None
) -> Tensor:
    """Compute attention with additive scores (1409.0473, A.1.2), with W and v per query head and U per key head.

    Q [b, h, n, k], K and V [b, G, m, k] (query heads g*i .. g*i + g-1 share head i), W [h, k, k], U [G, k, k],
    v [h, k], mask [b, h, n, m] -> [b, h, n, k].
    """
    g = Q.shape[1] // K.shape[1]
    heads = [additive_scores(Q[:, i], K[:, i // g], W[i], U[i // g], v[i]) for i in range(Q.shape[1])]
    return masked_softmax(torch.stack(heads, dim=1), mask) @ V.repeat_interleave(g, dim=1)


def dot_scores(Q: Tensor, K: Tensor) -> Tensor:
    """Return q^T k for every query and key (1508.04025, 3.1): Q [b, n, k], K [b, m, k] -> [b, n, m]."""
    return einsum("bnk,bmk->bnm", Q, K)


def general_scores(Q: Tensor, K: Tensor, W: Tensor) -> Tensor:
    """Return q^T W k for every query and key (1508.04025, 3.1): Q [b, n, k], K [b, m, l], W [k, l] -> [b, n, m].

    This is the dot product of W^T q and k. A Transformer's learned projection P_q is therefore equally general.
    """
    return einsum("bnk,kl,bml->bnm", Q, W, K)


def bahdanau_context(s: Tensor, H: Tensor, W: Tensor, U: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context of a decoding step, c_t = sum_j alpha_tj h_j (1409.0473, 3.1).

    The query is the previous state s = s_{t-1} [b, d_s], and the annotations H [b, m, d_h] are the keys and values. W
    [a, d_s], U [a, d_h], v [a] -> c_t [b, d_h] and alpha_t [b, m]. The recurrent cell then computes s_t from s_{t-1},
    the last word and c_t.
    """
    alpha = masked_softmax(additive_scores(s.unsqueeze(1), H, W, U, v)[:, 0])
    return einsum("bm,bmd->bd", alpha, H), alpha


def luong_output(h: Tensor, H: Tensor, W_a: Tensor, W_c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attentional output of a decoding step, tanh(W_c [c_t; h_t]) (1508.04025, 3).

    The query is the current state h = h_t [b, d], W_a [d, d_h] is the matrix of a general score (the identity gives
    the dot score), and H [b, m, d_h] are the encoder states. W_c [d, d_h + d] -> the output [b, d] and the weights a_t
    [b, m].
    """
    weights = masked_softmax(general_scores(h.unsqueeze(1), H, W_a)[:, 0])
    c = einsum("bm,bmd->bd", weights, H)
    return torch.tanh(cat([c, h], dim=-1) @ W_c.T), weights


def sinusoidal_positions(n: int, d: int) -> Tensor:
    """Return the sinusoidal encodings of the positions 0 .. n - 1, float64 [n, d] (1706.03762, 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d)).
    """
    PE = torch.empty(n, d, dtype=torch.float64)
    for position in range(n):
        for column in range(d):
            angle = position / 10000 ** (2 * (column // 2) / d)
            PE[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return PE
