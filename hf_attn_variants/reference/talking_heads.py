"""Talking-heads and bilinear attention (arXiv 2003.02436), and the core that every variant must equal."""

from typing import Any

import torch
from torch import Tensor, einsum

from .heads import Maybe, groups_of_heads, masked_softmax


def talking_heads_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, P_l: Maybe = None,
    P_w: Maybe = None, P_x2l: Maybe = None, P_m2l: Maybe = None, P_x2w: Maybe = None, P_m2w: Maybe = None,
    bias: Maybe = None, mask: Maybe = None, scale: float = 1,
) -> Tensor:  # fmt: skip
    """Talking-heads attention: P_l mixes heads before the softmax, P_w after it (2003.02436).

    X [b, n, d], M [b, m, d], P_q and P_k [h_k, d, k], P_v and P_o [h_v, d, v] -> Y [b, n, d].
    P_l [h_k, h]: without it the logits are not mixed and h = h_k. P_w [h, h_v]: without it the weights are not mixed
    and h_v = h. bias and mask [b, h, n, m] are added after P_l, on the softmax heads.
    Dynamic projections (2003.02436, appendix) are added to P_l or P_w at each position, each linear in X or in M:
    P_x2l and P_m2l [d, h_k, h], P_x2w and P_m2w [d, h, h_v].
    """
    Q = einsum("bnd,idk->bink", X, P_q)
    K = einsum("bmd,idk->bimk", M, P_k)
    V = einsum("bmd,jdv->bjmv", M, P_v)
    dynamic = {"x2l": _at(X, P_x2l), "m2l": _at(M, P_m2l), "x2w": _at(X, P_x2w), "m2w": _at(M, P_m2w)}
    o, _ = attention_core(Q, K, V, scale=scale, P_l=P_l, P_w=P_w, bias=bias, mask=mask, **dynamic)  # [b, j, n, v]
    return einsum("bjnv,jdv->bnd", o, P_o)


def bilinear_attention(X: Tensor, M: Tensor, B_l: Tensor, B_v: Tensor, *, mask: Maybe = None) -> Tensor:
    """General bilinear multi-head attention: a full d x d form per head for logits, another for values (2003.02436).

    X [b, n, d], M [b, m, d], B_l [h, d, d] (logit = x B_l[h] m), B_v [h, d, d] (output = m B_v[h]),
    mask [b, h, n, m] -> Y [b, n, d]. M itself is the keys and the values.
    """
    logits = einsum("bhne,bme->bhnm", einsum("bnd,hde->bhne", X, B_l), M)
    weights = masked_softmax(logits, mask)
    return einsum("bhne,hed->bnd", einsum("bhnm,bme->bhne", weights, M), B_v)


def bilinear_forms(
    P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, P_l: Maybe = None, P_w: Maybe = None, scale: float = 1
) -> tuple[Tensor, Tensor]:
    """The forms B_l and B_v [h, d, d] of multi-head and static talking-heads attention (2003.02436).

    P_q and P_k [h_k, d, k], P_v and P_o [h_v, d, v], P_l [h_k, h], P_w [h, h_v]; grouped heads first go through
    `repeat_kv_heads`. Multi-head forms have rank k and v. With P_l each B_l[h] combines h_k forms of rank k, with P_w
    each B_v[h] h_v forms of rank v. Dynamic projections have no such fixed form.
    """
    B_l, B_v = scale * einsum("hdk,hek->hde", P_q, P_k), einsum("hev,hdv->hed", P_v, P_o)
    B_l = B_l if P_l is None else einsum("ide,ih->hde", B_l, P_l)
    return B_l, B_v if P_w is None else einsum("jed,hj->hed", B_v, P_w)


def attention_core(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, P_l: Maybe = None, P_w: Maybe = None,
    x2l: Maybe = None, m2l: Maybe = None, x2w: Maybe = None, m2w: Maybe = None, bias: Maybe = None,
    mask: Maybe = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention on projected inputs, any variant, one head at a time: the result that the kernels must equal.

    This function has the letters of the kernels: k key/value heads, d size of a head.

    Args:
        query: [b, h_k, n, d].
        key, value: [b, k, m, d] and [b, k', m, d_v]. k divides h_k, k' divides h_v; consecutive heads share a head.
        scale: multiplies the logits, before P_l.
        P_l, P_w: [h_k, h] mixes the logits, [h, h_v] the weights. Without P_l h = h_k, without P_w h_v = h.
        x2l, m2l: [b, n, h_k, h] and [b, m, h_k, h], added to P_l at each query or key position.
        x2w, m2w: [b, n, h, h_v] and [b, m, h, h_v], added to P_w likewise.
        bias, mask: additive, broadcast to [b, h, n, m]; added after P_l.

    Returns:
        The output [b, h_v, n, d_v] and the weights that multiply the values (after P_w) [b, h_v, n, m].

    Raises:
        ValueError: if head counts do not divide, if a dynamic matrix is given without its static one, or if bias or
            mask is boolean.
    """
    groups = groups_of_heads(query.shape[1], key.shape[1])
    heads = [scale * query[:, i] @ key[:, group].transpose(1, 2) for i, group in enumerate(groups)]  # each [b, n, m]
    logits = torch.stack(_mix_heads(heads, P_l, x2l, m2l), dim=1)  # [b, h, n, m]
    weights = _mix_heads(list(masked_softmax(logits, bias, mask).unbind(1)), P_w, x2w, m2w)
    groups = groups_of_heads(len(weights), value.shape[1])
    output = [w @ value[:, group] for w, group in zip(weights, groups, strict=True)]  # each [b, n, d_v]
    return torch.stack(output, dim=1), torch.stack(weights, dim=1)


def _at(X: Tensor, P: Maybe) -> Maybe:
    return None if P is None else einsum("bnd,drs->bnrs", X, P)


def _mix_heads(A: list[Tensor], P: Maybe, at_n: Maybe, at_m: Maybe) -> list[Tensor]:
    """A: r heads [b, n, m], P [r, s], at_n [b, n, r, s], at_m [b, m, r, s] -> s heads [b, n, m]."""
    if P is None:
        if at_n is not None or at_m is not None:
            raise ValueError("Dynamic projections are added to a static one. Give P_l or P_w too.")
        return A
    if P.shape[0] != len(A):
        raise ValueError(f"A talking-heads projection must have a row for each of the {len(A)} heads, got {len(P)}.")
    mixed = []
    for s in range(P.shape[1]):
        coefficients: Any = P[:, s]
        if at_n is not None:
            coefficients = coefficients + at_n[:, :, None, :, s]  # [b, n, 1, r]
        if at_m is not None:
            coefficients = coefficients + at_m[:, None, :, :, s]  # [b, 1, m, r]
        mixed.append(sum(coefficients[..., r] * head for r, head in enumerate(A)))
    return mixed
