"""Talking-heads and bilinear attention (arXiv 2003.02436), and core attention with shared heads."""

from typing import Any

import torch
from torch import Tensor, einsum

from .heads import Maybe, get_kv_head_indices, masked_softmax


def talking_heads_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, P_l: Maybe = None,
    P_w: Maybe = None, P_x2l: Maybe = None, P_m2l: Maybe = None, P_x2w: Maybe = None, P_m2w: Maybe = None,
    bias: Maybe = None, mask: Maybe = None, scale: float = 1,
) -> Tensor:  # fmt: skip
    """Compute talking-heads attention, in which P_l and P_w mix the heads before and after the softmax (2003.02436).

    X [b, n, d], M [b, m, d], P_q and P_k [h_k, d, k], P_v and P_o [h_v, d, v] -> Y [b, n, d]. P_l [h_k, h] mixes the
    logits (h = h_k without it), and P_w [h, h_v] mixes the weights (h_v = h without it). The bias and the mask [b, h,
    n, m] are added to the softmax heads after P_l. Dynamic projections (see the appendix of the paper) are added to
    P_l or P_w at each position and are linear in X or M: P_x2l and P_m2l [d, h_k, h], P_x2w and P_m2w [d, h, h_v].
    """
    Q = einsum("bnd,idk->bink", X, P_q)
    K = einsum("bmd,idk->bimk", M, P_k)
    V = einsum("bmd,jdv->bjmv", M, P_v)
    dynamic = {"x2l": (X, P_x2l), "m2l": (M, P_m2l), "x2w": (X, P_x2w), "m2w": (M, P_m2w)}
    terms = {name: _dynamic_projection(*inputs) for name, inputs in dynamic.items()}
    o, _ = attention_core(Q, K, V, scale=scale, P_l=P_l, P_w=P_w, bias=bias, mask=mask, **terms)  # [b, j, n, v]
    return einsum("bjnv,jdv->bnd", o, P_o)


def bilinear_attention(X: Tensor, M: Tensor, B_l: Tensor, B_v: Tensor, *, mask: Maybe = None) -> Tensor:
    """Compute general bilinear multi-head attention, with two d x d forms per head (2003.02436).

    X [b, n, d], M [b, m, d], B_l [h, d, d] (logit = x B_l[h] m), B_v [h, d, d] (output = m B_v[h]), mask [b, h, n, m]
    -> Y [b, n, d]. M itself serves as the keys and values.
    """
    logits = einsum("bhne,bme->bhnm", einsum("bnd,hde->bhne", X, B_l), M)
    weights = masked_softmax(logits, mask)
    return einsum("bhne,hed->bnd", einsum("bhnm,bme->bhne", weights, M), B_v)


def bilinear_forms(
    P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, P_l: Maybe = None, P_w: Maybe = None, scale: float = 1
) -> tuple[Tensor, Tensor]:
    """Return the forms B_l and B_v [h, d, d] of multi-head or static talking-heads attention (2003.02436).

    P_q and P_k [h_k, d, k], P_v and P_o [h_v, d, v], P_l [h_k, h], P_w [h, h_v]. Repeat grouped heads with
    `repeat_kv_heads` first. In multi-head attention, the forms have rank k and v. With P_l, each B_l[h] combines h_k
    forms of rank k. With P_w, each B_v[h] combines h_v forms of rank v. Dynamic projections depend on the input and
    have no such form.
    """
    B_l, B_v = scale * einsum("hdk,hek->hde", P_q, P_k), einsum("hev,hdv->hed", P_v, P_o)
    B_l = B_l if P_l is None else einsum("ide,ih->hde", B_l, P_l)
    return B_l, B_v if P_w is None else einsum("jed,hj->hed", B_v, P_w)


def attention_core(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, P_l: Maybe = None, P_w: Maybe = None,
    x2l: Maybe = None, m2l: Maybe = None, x2w: Maybe = None, m2w: Maybe = None, bias: Maybe = None,
    mask: Maybe = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention for projected inputs, one head at a time.

    The attention functions of the models must reproduce its results. As in these functions, but unlike elsewhere in
    this package, k is the number of key/value heads, and d is the head size.

    Args:
        query: The queries [b, h_k, n, d].
        key, value: The keys [b, k, m, d] and values [b, k', m, d_v], where k divides h_k, and k' divides h_v.
            Consecutive query heads share a key/value head.
        scale: The factor of the logits, which is applied before P_l.
        P_l, P_w: The projections [h_k, h] and [h, h_v], which mix the logits and the weights. Without P_l, h is h_k.
            Without P_w, h_v is h.
        x2l, m2l: The terms [b, n, h_k, h] and [b, m, h_k, h], which are added to P_l at each query or key position.
        x2w, m2w: The terms [b, n, h, h_v] and [b, m, h, h_v], which are added to P_w at each query or key position.
        bias, mask: Additive terms that are broadcast to [b, h, n, m] and added after P_l.

    Returns:
        The output [b, h_v, n, d_v] and the weights of the values (after P_w) [b, h_v, n, m].

    Raises:
        ValueError: If head counts are incompatible, a dynamic projection is passed without its static one, or the bias
            or mask is boolean.
    """
    groups = get_kv_head_indices(query.shape[1], key.shape[1])
    heads = [scale * query[:, i] @ key[:, group].transpose(1, 2) for i, group in enumerate(groups)]  # each [b, n, m]
    logits = torch.stack(_mix_heads(heads, P_l, x2l, m2l), dim=1)  # [b, h, n, m]
    weights = _mix_heads(list(masked_softmax(logits, bias, mask).unbind(1)), P_w, x2w, m2w)
    groups = get_kv_head_indices(len(weights), value.shape[1])
    output = [w @ value[:, group] for w, group in zip(weights, groups, strict=True)]  # each [b, n, d_v]
    return torch.stack(output, dim=1), torch.stack(weights, dim=1)


def _dynamic_projection(X: Tensor, P: Maybe) -> Maybe:
    """Return the projection [b, n, r, s], computed at each position in X [b, n, d] with P [d, r, s]."""
    return None if P is None else einsum("bnd,drs->bnrs", X, P)


def _mix_heads(A: list[Tensor], P: Maybe, at_n: Maybe, at_m: Maybe) -> list[Tensor]:
    """Mix r heads A [b, n, m] into s heads [b, n, m] with the coefficients P [r, s].

    The terms at_n [b, n, r, s] and at_m [b, m, r, s] are added to P at each query and key position.
    """
    if P is None:
        if at_n is not None or at_m is not None:
            raise ValueError("A dynamic projection requires a static one. Also pass P_l or P_w.")
        return A
    if P.shape[0] != len(A):
        raise ValueError(f"A talking-heads projection must have one row per head ({len(A)} rows), got {len(P)} rows.")
    mixed = []
    for s in range(P.shape[1]):
        coefficients: Any = P[:, s]
        if at_n is not None:
            coefficients = coefficients + at_n[:, :, None, :, s]  # [b, n, 1, r]
        if at_m is not None:
            coefficients = coefficients + at_m[:, None, :, :, s]  # [b, 1, m, r]
        mixed.append(sum(coefficients[..., r] * head for r, head in enumerate(A)))
    return mixed
