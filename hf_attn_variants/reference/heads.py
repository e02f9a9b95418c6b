"""Multi-head, multi-query, grouped-query and latent attention (arXiv 1911.02150, 2305.13245, 2405.04434).

    attention for all queries      X [b, n, d], M [b, m, d], mask [b, h, n, m] -> Y [b, n, d]
    one decoding step              x [b, d], prev_K [b, h, m, k], prev_V [b, h, m, v] -> y [b, d], and K and V with
                                   m + 1 positions (m = 0 in the first step)
    parameters                     P_q and P_k [h, d, k], P_v and P_o [h, d, v]

Grouped keys and values have G heads instead of h. Multi-query keys and values have no head axis.
"""

import torch
from torch import Tensor, cat, einsum

Maybe = Tensor | None  # None means that the term is left out of the formula


def masked_softmax(logits: Tensor, *terms: Maybe) -> Tensor:
    """Add biases and masks to logits, and return the softmax over the last axis.

    For rows of -inf, the result and the gradients are zero, as in `scaled_dot_product_attention`, whereas
    `torch.softmax` returns NaN. For rows to which `torch.finfo(dtype).min` was added, the result is 1 / m, because all
    logits are rounded to this number.

    Args:
        logits: The logits [..., n, m].
        terms: The additive biases and masks, which are broadcast to the shape of the logits.

    Raises:
        ValueError: If a term is a boolean mask.
    """
    for term in terms:
        if term is not None:
            if term.dtype == torch.bool:
                raise ValueError(
                    "A bias or mask must be additive (0 and -inf), got a boolean tensor. Convert it to numbers."
                )
            logits = logits + term.expand(logits.shape)  # `expand` raises an error if a bias has a larger shape
    top = logits.detach().amax(-1, keepdim=True)
    E = (logits - top.masked_fill(top == -torch.inf, 0)).exp()  # -inf - -inf would be NaN
    total = E.sum(-1, keepdim=True)
    return E / total.masked_fill(total == 0, 1)


def dot_product_attention(q: Tensor, K: Tensor, V: Tensor, *, scale: float = 1) -> Tensor:
    """Compute attention for one query (1911.02150, 2.1): q [k], K [m, k], V [m, v] -> [v]."""
    weights = masked_softmax(scale * einsum("k,mk->m", q, K))
    return einsum("m,mv->v", weights, V)


def multihead_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None, scale: float = 1
) -> Tensor:
    """Compute multi-head attention for all queries (1911.02150, 2.3)."""
    Q = einsum("bnd,hdk->bhnk", X, P_q)
    K = einsum("bmd,hdk->bhmk", M, P_k)
    V = einsum("bmd,hdv->bhmv", M, P_v)
    weights = masked_softmax(scale * einsum("bhnk,bhmk->bhnm", Q, K), mask)
    o = einsum("bhnm,bhmv->bhnv", weights, V)
    return einsum("bhnv,hdv->bnd", o, P_o)


def multihead_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one decoding step of multi-head self-attention (1911.02150, 2.4)."""
    q = einsum("bd,hdk->bhk", x, P_q)
    K = cat([prev_K, einsum("bd,hdk->bhk", x, P_k).unsqueeze(2)], dim=2)
    V = cat([prev_V, einsum("bd,hdv->bhv", x, P_v).unsqueeze(2)], dim=2)
    weights = masked_softmax(scale * einsum("bhk,bhmk->bhm", q, K))
    o = einsum("bhm,bhmv->bhv", weights, V)
    return einsum("bhv,hdv->bd", o, P_o), K, V


def multiquery_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None, scale: float = 1
) -> Tensor:
    """Compute multi-query attention, in which all heads share P_k [d, k] and P_v [d, v] (1911.02150, 3)."""
    Q = einsum("bnd,hdk->bhnk", X, P_q)
    K = einsum("bmd,dk->bmk", M, P_k)
    V = einsum("bmd,dv->bmv", M, P_v)
    weights = masked_softmax(scale * einsum("bhnk,bmk->bhnm", Q, K), mask)
    o = einsum("bhnm,bmv->bhnv", weights, V)
    return einsum("bhnv,hdv->bnd", o, P_o)


def multiquery_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one decoding step of multi-query attention (1911.02150, 3): prev_K [b, m, k], prev_V [b, m, v]."""
    q = einsum("bd,hdk->bhk", x, P_q)
    K = cat(
        [prev_K, einsum("bd,dk->bk", x, P_k).unsqueeze(1)], dim=1
    )  # axis 1 is the key axis, because there is no head axis
    V = cat([prev_V, einsum("bd,dv->bv", x, P_v).unsqueeze(1)], dim=1)
    weights = masked_softmax(scale * einsum("bhk,bmk->bhm", q, K))
    o = einsum("bhm,bmv->bhv", weights, V)
    return einsum("bhv,hdv->bd", o, P_o), K, V


def grouped_query_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None, scale: float = 1
) -> Tensor:
    """Compute grouped-query attention, in which query heads g*i .. g*i + g-1 share key/value head i (2305.13245, 2.2).

    P_k [G, d, k], P_v [G, d, v]. If G = h, this is multi-head attention. If G = 1, it is multi-query attention.
    """
    K = einsum("bmd,Gdk->bGmk", M, P_k)
    V = einsum("bmd,Gdv->bGmv", M, P_v)
    Q = _split_groups(einsum("bnd,hdk->bhnk", X, P_q), K.shape[1])  # [b, G, g, n, k]
    logits = scale * einsum("bGgnk,bGmk->bGgnm", Q, K).flatten(1, 2)  # [b, h, n, m]
    weights = _split_groups(masked_softmax(logits, mask), K.shape[1])
    o = einsum("bGgnm,bGmv->bGgnv", weights, V).flatten(1, 2)  # [b, h, n, v]
    return einsum("bhnv,hdv->bnd", o, P_o)


def grouped_query_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one decoding step of grouped-query self-attention with caches of G heads (2305.13245, 2.2)."""
    K = cat([prev_K, einsum("bd,Gdk->bGk", x, P_k).unsqueeze(2)], dim=2)
    V = cat([prev_V, einsum("bd,Gdv->bGv", x, P_v).unsqueeze(2)], dim=2)
    q = _split_groups(einsum("bd,hdk->bhk", x, P_q), K.shape[1])  # [b, G, g, k]
    weights = masked_softmax(scale * einsum("bGgk,bGmk->bGgm", q, K))
    o = einsum("bGgm,bGmv->bGgv", weights, V).flatten(1, 2)  # [b, h, v]
    return einsum("bhv,hdv->bd", o, P_o), K, V


def latent_attention(
    X: Tensor, M: Tensor, A: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None
) -> Tensor:
    """Compute latent attention as multi-query attention to the latents C = M A (2405.04434, 2.1.2).

    A [d, r], P_k [h, r, k], P_v [h, r, v]. If A is the identity, this is slim attention (2503.05840).
    """
    C = einsum("bmd,dr->bmr", M, A)
    Q = einsum("bnd,hdk,hrk->bhnr", X, P_q, P_k)
    weights = masked_softmax(einsum("bhnr,bmr->bhnm", Q, C), mask)
    return einsum("bhnr,hrv,hdv->bnd", einsum("bhnm,bmr->bhnr", weights, C), P_v, P_o)


def repeat_kv_heads(P: Tensor, h: int) -> Tensor:
    """Return the multi-head weights [h, d, k] that are equivalent to the grouped weights P_k or P_v [G, d, k].

    Each key/value head is repeated h / G times.
    """
    return P[get_kv_head_indices(h, P.shape[0])]


def get_kv_head_indices(heads: int, groups: int) -> list[int]:
    """Return the index of the key/value head that each query head uses.

    Args:
        heads: The number of query heads h.
        groups: The number of key/value heads G.

    Raises:
        ValueError: If h is not a multiple of G.

    Example:
        >>> get_kv_head_indices(4, 2)
        [0, 0, 1, 1]
    """
    if heads % groups:
        raise ValueError(
            f"`heads` must be a multiple of the number of key/value heads ({groups}), got {heads}. Change one of them."
        )
    return [head * groups // heads for head in range(heads)]


def _split_groups(T: Tensor, G: int) -> Tensor:
    return T.unflatten(1, (G, -1))  # [b, h, ...] -> [b, G, g, ...]
