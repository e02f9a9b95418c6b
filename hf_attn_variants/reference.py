"""The papers' attention formulas, one function each: the executable specification of the fast kernels.

Sources: arXiv 1911.02150 (multi-head, multi-query), 2305.13245 (grouped-query), 2003.02436 (talking heads, bilinear).
Plain torch, in the dtype of the inputs (compare in float64); nothing here depends on the rest of the package.

The papers' letters, in names and einsum strings alike:

    b  batch           h  (softmax) heads              k  size of a query and key vector   X    input of the queries
    n  query length    i  query and key heads, h_k     v  size of a value vector           M    input of keys, values
    m  memory length   j  value heads, h_v             G  key/value heads ("groups")       P_*  parameters
    d  model width     (i = j = h but in talking heads)   g  query heads in a group, h / G

Weights are laid out as in 1911.02150: P_q and P_k [h, d, k], P_v and P_o [h, d, v].
`scale` multiplies the logits: 1 by default, because the papers fold 1 / sqrt(k) into P_q.
`mask` is added to the logits and broadcasts to [b, h, n, m]; a position bias may be part of it. Booleans are an error.
`attention_core` alone starts from projected inputs and has the package's letters: kernels are compared with it.
"""

import torch
from torch import Tensor, cat, einsum

__all__ = [
    "attention_core",
    "bilinear_attention",
    "bilinear_forms_of_multihead",
    "bilinear_forms_of_talking_heads",
    "dot_product_attention",
    "grouped_query_attention",
    "grouped_query_attention_incremental",
    "latent_attention",
    "masked_softmax",
    "multihead_attention",
    "multihead_attention_concat",
    "multihead_attention_incremental",
    "multihead_attention_one_query",
    "multihead_attention_sum",
    "multiquery_attention",
    "multiquery_attention_incremental",
    "repeat_kv_heads",
    "talking_heads_attention",
]

Maybe = Tensor | None  # None: the formula is without it


def masked_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis, defined for rows in which nothing may be attended to.

    A row that is -inf throughout gives zeros (and zero gradients), as `scaled_dot_product_attention` does, where
    `torch.softmax` gives NaN. A row to which `torch.finfo(dtype).min` was added throughout is uniform, 1 / m: the sum
    rounds every logit to that one number.
    """
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)  # -inf - -inf would be NaN
    E = (logits - top).exp()
    total = E.sum(-1, keepdim=True)
    return E / total.masked_fill(total == 0, 1)


def dot_product_attention(q: Tensor, K: Tensor, V: Tensor, *, scale: float = 1) -> Tensor:
    """Attention of one query over one memory (1911.02150, 2.1): q [k], K [m, k], V [m, v] -> [v]."""
    weights = masked_softmax(scale * einsum("k,mk->m", q, K))
    return einsum("m,mv->v", weights, V)


def multihead_attention_one_query(
    x: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> Tensor:
    """Multi-head attention of one query (1911.02150, 2.2).

    x [d], M [m, d], P_q and P_k [h, d, k], P_v and P_o [h, d, v] -> y [d].
    """
    q = einsum("d,hdk->hk", x, P_q)
    K = einsum("md,hdk->hmk", M, P_k)
    V = einsum("md,hdv->hmv", M, P_v)
    weights = masked_softmax(scale * einsum("hk,hmk->hm", q, K))
    o = einsum("hm,hmv->hv", weights, V)
    return einsum("hv,hdv->d", o, P_o)


def multihead_attention_sum(
    x: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> Tensor:
    """Multi-head attention of one query as a sum over heads, each projected by its own P_o[h] (2003.02436, 3).

    Shapes as in `multihead_attention_one_query`, and the same result.
    """
    y = torch.zeros_like(x)
    for p_q, p_k, p_v, p_o in zip(P_q, P_k, P_v, P_o, strict=True):
        y = y + p_o @ dot_product_attention(x @ p_q, M @ p_k, M @ p_v, scale=scale)
    return y


def multihead_attention_concat(
    x: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> Tensor:
    """Multi-head attention of one query with the heads concatenated, then projected once (1706.03762, 3.2.2).

    Shapes as in `multihead_attention_one_query`, and the same result: the projection [h * v, d] stacks the P_o[h].
    """
    heads = zip(P_q, P_k, P_v, strict=True)
    o = cat([dot_product_attention(x @ p_q, M @ p_k, M @ p_v, scale=scale) for p_q, p_k, p_v in heads])  # [h * v]
    return o @ P_o.transpose(1, 2).flatten(0, 1)  # [h, d, v] -> [h * v, d]


def multihead_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None, scale: float = 1
) -> Tensor:
    """Multi-head attention of all queries at once (1911.02150, 2.3).

    X [b, n, d], M [b, m, d], P_q and P_k [h, d, k], P_v and P_o [h, d, v], mask [b, h, n, m] -> Y [b, n, d].
    """
    Q = einsum("bnd,hdk->bhnk", X, P_q)
    K = einsum("bmd,hdk->bhmk", M, P_k)
    V = einsum("bmd,hdv->bhmv", M, P_v)
    weights = masked_softmax(_add(scale * einsum("bhnk,bhmk->bhnm", Q, K), mask))
    o = einsum("bhnm,bhmv->bhnv", weights, V)
    return einsum("bhnv,hdv->bnd", o, P_o)


def multihead_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoding step of multi-head self-attention (1911.02150, 2.4).

    x [b, d], prev_K [b, h, m, k], prev_V [b, h, m, v], weights as in `multihead_attention`
    -> y [b, d], new_K [b, h, m + 1, k], new_V [b, h, m + 1, v]. For the first step m = 0.
    """
    q = einsum("bd,hdk->bhk", x, P_q)
    K = cat([prev_K, einsum("bd,hdk->bhk", x, P_k).unsqueeze(2)], dim=2)
    V = cat([prev_V, einsum("bd,hdv->bhv", x, P_v).unsqueeze(2)], dim=2)
    weights = masked_softmax(scale * einsum("bhk,bhmk->bhm", q, K))
    o = einsum("bhm,bhmv->bhv", weights, V)
    return einsum("bhv,hdv->bd", o, P_o), K, V


def multiquery_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None, scale: float = 1
) -> Tensor:
    """Multi-query attention: all heads share one set of keys and values (1911.02150, 3).

    X [b, n, d], M [b, m, d], P_q [h, d, k], P_k [d, k], P_v [d, v], P_o [h, d, v], mask [b, h, n, m] -> Y [b, n, d].
    """
    Q = einsum("bnd,hdk->bhnk", X, P_q)
    K = einsum("bmd,dk->bmk", M, P_k)
    V = einsum("bmd,dv->bmv", M, P_v)
    weights = masked_softmax(_add(scale * einsum("bhnk,bmk->bhnm", Q, K), mask))
    o = einsum("bhnm,bmv->bhnv", weights, V)
    return einsum("bhnv,hdv->bnd", o, P_o)


def multiquery_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoding step of multi-query self-attention (1911.02150, 3).

    x [b, d], prev_K [b, m, k], prev_V [b, m, v], weights as in `multiquery_attention`
    -> y [b, d], new_K [b, m + 1, k], new_V [b, m + 1, v]. For the first step m = 0.
    """
    q = einsum("bd,hdk->bhk", x, P_q)
    K = cat([prev_K, einsum("bd,dk->bk", x, P_k).unsqueeze(1)], dim=1)  # the memory axis: there is no heads axis here
    V = cat([prev_V, einsum("bd,dv->bv", x, P_v).unsqueeze(1)], dim=1)
    weights = masked_softmax(scale * einsum("bhk,bmk->bhm", q, K))
    o = einsum("bhm,bmv->bhv", weights, V)
    return einsum("bhv,hdv->bd", o, P_o), K, V


def grouped_query_attention(
    X: Tensor, M: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None, scale: float = 1
) -> Tensor:
    """Grouped-query attention: query heads g*i .. g*i + g-1 share key/value head i (2305.13245, 2.2).

    X [b, n, d], M [b, m, d], P_q [h, d, k], P_k [G, d, k], P_v [G, d, v], P_o [h, d, v], mask [b, h, n, m]
    -> Y [b, n, d]. G = h is multi-head attention, G = 1 multi-query attention.
    """
    K = einsum("bmd,Gdk->bGmk", M, P_k)
    V = einsum("bmd,Gdv->bGmv", M, P_v)
    Q = _split_groups(einsum("bnd,hdk->bhnk", X, P_q), K.shape[1])  # [b, G, g, n, k]
    logits = scale * einsum("bGgnk,bGmk->bGgnm", Q, K).flatten(1, 2)  # [b, h, n, m]
    weights = _split_groups(masked_softmax(_add(logits, mask)), K.shape[1])
    o = einsum("bGgnm,bGmv->bGgnv", weights, V).flatten(1, 2)  # [b, h, n, v]
    return einsum("bhnv,hdv->bnd", o, P_o)


def grouped_query_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoding step of grouped-query self-attention (2305.13245, 2.2).

    x [b, d], prev_K [b, G, m, k], prev_V [b, G, m, v], weights as in `grouped_query_attention`
    -> y [b, d], new_K [b, G, m + 1, k], new_V [b, G, m + 1, v]. For the first step m = 0.
    """
    K = cat([prev_K, einsum("bd,Gdk->bGk", x, P_k).unsqueeze(2)], dim=2)
    V = cat([prev_V, einsum("bd,Gdv->bGv", x, P_v).unsqueeze(2)], dim=2)
    q = _split_groups(einsum("bd,hdk->bhk", x, P_q), K.shape[1])  # [b, G, g, k]
    weights = masked_softmax(scale * einsum("bGgk,bGmk->bGgm", q, K))
    o = einsum("bGgm,bGmv->bGgv", weights, V).flatten(1, 2)  # [b, h, v]
    return einsum("bhv,hdv->bd", o, P_o), K, V


def repeat_kv_heads(P: Tensor, h: int) -> Tensor:
    """The multi-head weights [h, d, k] that equal shared P_k or P_v [G, d, k]: each head h / G times, side by side."""
    return P[_group_of_heads(h, P.shape[0])]


def talking_heads_attention(
    X: Tensor,
    M: Tensor,
    P_q: Tensor,
    P_k: Tensor,
    P_v: Tensor,
    P_o: Tensor,
    *,
    P_l: Maybe = None,
    P_w: Maybe = None,
    P_x2l: Maybe = None,
    P_m2l: Maybe = None,
    P_x2w: Maybe = None,
    P_m2w: Maybe = None,
    bias: Maybe = None,
    mask: Maybe = None,
    scale: float = 1,
) -> Tensor:
    """Talking-heads attention: P_l mixes heads before the softmax, P_w after it (2003.02436).

    X [b, n, d], M [b, m, d], P_q and P_k [h_k, d, k], P_v and P_o [h_v, d, v] -> Y [b, n, d].
    P_l [h_k, h]: absent, the logits are not mixed and h = h_k. P_w [h, h_v]: absent, the weights are not and h_v = h.
    bias and mask [b, h, n, m] are added after P_l, on the softmax heads.
    Dynamic projections (2003.02436, appendix) are added to P_l or P_w at each position, each linear in X or in M:
    P_x2l and P_m2l [d, h_k, h], P_x2w and P_m2w [d, h, h_v].
    """
    Q = einsum("bnd,idk->bink", X, P_q)
    K = einsum("bmd,idk->bimk", M, P_k)
    V = einsum("bmd,jdv->bjmv", M, P_v)
    logits = _talk(scale * einsum("bink,bimk->binm", Q, K), X, M, P_l, P_x2l, P_m2l)  # [b, h, n, m]
    weights = _talk(masked_softmax(_add(logits, bias, mask)), X, M, P_w, P_x2w, P_m2w)  # [b, j, n, m]
    o = einsum("bjnm,bjmv->bjnv", weights, V)
    return einsum("bjnv,jdv->bnd", o, P_o)


def bilinear_attention(X: Tensor, M: Tensor, B_l: Tensor, B_v: Tensor, *, mask: Maybe = None) -> Tensor:
    """General bilinear multihead attention: a full d x d form per head for logits, another for values (2003.02436).

    X [b, n, d], M [b, m, d], B_l [h, d, d] (logit = x B_l[h] m), B_v [h, d, d] (output = m B_v[h]),
    mask [b, h, n, m] -> Y [b, n, d]. Keys and values are the memory itself.
    """
    logits = einsum("bhne,bme->bhnm", einsum("bnd,hde->bhne", X, B_l), M)
    weights = masked_softmax(_add(logits, mask))
    return einsum("bhne,hed->bnd", einsum("bhnm,bme->bhne", weights, M), B_v)


def bilinear_forms_of_multihead(
    P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, scale: float = 1
) -> tuple[Tensor, Tensor]:
    """The forms B_l and B_v [h, d, d] with which `bilinear_attention` is multi-head attention: ranks at most k and v.

    P_q and P_k [h, d, k], P_v and P_o [h, d, v]. For grouped heads, pass P_k and P_v through `repeat_kv_heads` first.
    """
    return scale * einsum("hdk,hek->hde", P_q, P_k), einsum("hev,hdv->hed", P_v, P_o)


def bilinear_forms_of_talking_heads(
    P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, P_l: Maybe = None, P_w: Maybe = None, scale: float = 1
) -> tuple[Tensor, Tensor]:
    """The forms B_l and B_v [h, d, d] with which `bilinear_attention` is static talking-heads attention.

    P_q and P_k [h_k, d, k], P_v and P_o [h_v, d, v], P_l [h_k, h], P_w [h, h_v]. Each B_l[h] is a combination of
    h_k forms of rank k, each B_v[h] of h_v forms of rank v. Dynamic projections have no such fixed form.
    """
    B_l, B_v = bilinear_forms_of_multihead(P_q, P_k, P_v, P_o, scale=scale)
    if P_l is not None:
        B_l = einsum("ide,ih->hde", B_l, P_l)
    if P_w is not None:
        B_v = einsum("jed,hj->hed", B_v, P_w)
    return B_l, B_v


def latent_attention(
    X: Tensor, M: Tensor, A: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor, *, mask: Maybe = None
) -> Tensor:
    """Latent attention, keys and values made from C = M A (2405.04434, 2.1.2), as the multi-query one on C that it is.

    X [b, n, d], M [b, m, d], A [d, r], P_q [h, d, k], P_k [h, r, k], P_v [h, r, v], P_o [h, d, v], mask [b, h, n, m]
    -> Y [b, n, d]. With A the identity slim attention (2503.05840).
    """
    C = einsum("bmd,dr->bmr", M, A)
    Q = einsum("bnd,hdk,hrk->bhnr", X, P_q, P_k)
    weights = masked_softmax(_add(einsum("bhnr,bmr->bhnm", Q, C), mask))
    return einsum("bhnr,hrv,hdv->bnd", einsum("bhnm,bmr->bhnr", weights, C), P_v, P_o)


def attention_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    P_l: Maybe = None,
    P_w: Maybe = None,
    x2l: Maybe = None,
    m2l: Maybe = None,
    x2w: Maybe = None,
    m2w: Maybe = None,
    bias: Maybe = None,
    mask: Maybe = None,
) -> tuple[Tensor, Tensor]:
    """Attention on projected inputs, any variant, one head at a time: what the package's kernels must equal.

    Here the letters are the package's: k key/value heads, d size of a head.

    Args:
        query: [b, h_k, n, d].
        key: [b, k, m, d], k divides h_k; query heads g*i .. g*i + g-1 share head i, g = h_k / k.
        value: [b, k, m, d_v], k (its own count, if it differs from the key's) divides h_v.
        scale: multiplies the logits, before P_l.
        P_l: [h_k, h], mixes the logits. Absent: h = h_k.
        P_w: [h, h_v], mixes the weights. Absent: h_v = h.
        x2l, m2l: [b, n, h_k, h] and [b, m, h_k, h], added to P_l at each query or memory position.
        x2w, m2w: [b, n, h, h_v] and [b, m, h, h_v], added to P_w likewise.
        bias, mask: additive, broadcast to [b, h, n, m]; added after P_l.

    Returns:
        The output [b, h_v, n, d_v] and the weights that multiply the values (after P_w) [b, h_v, n, m].
        Rows masked throughout follow `masked_softmax`: -inf gives zeros, `torch.finfo(dtype).min` equal weights.

    Raises:
        ValueError: head counts do not divide, a dynamic matrix without its static one, or a boolean bias or mask.
    """
    heads = [
        scale * query[:, head] @ key[:, group].transpose(1, 2)  # [b, n, m]
        for head, group in enumerate(_group_of_heads(query.shape[1], key.shape[1]))
    ]
    logits = torch.stack(_mix_heads(heads, P_l, x2l, m2l), dim=1)  # [b, h, n, m]
    weights = list(masked_softmax(_add(logits, bias, mask)).unbind(1))
    weights = _mix_heads(weights, P_w, x2w, m2w)
    groups = _group_of_heads(len(weights), value.shape[1])
    output = [w @ value[:, group] for w, group in zip(weights, groups, strict=True)]  # each [b, n, d_v]
    return torch.stack(output, dim=1), torch.stack(weights, dim=1)


def _add(logits: Tensor, *terms: Tensor | None) -> Tensor:
    for term in terms:
        if term is not None:
            if term.dtype == torch.bool:
                raise ValueError("bias and mask are added to the logits: give 0 and -inf, not a boolean mask")
            logits = logits + term.expand(logits.shape)  # expand: a bias may not enlarge the logits
    return logits


def _split_groups(T: Tensor, G: int) -> Tensor:
    """[b, h, ...] -> [b, G, g, ...]."""
    return T.unflatten(1, (G, -1))


def _group_of_heads(heads: int, groups: int) -> list[int]:
    if heads % groups:
        raise ValueError(f"the number of heads ({heads}) must be a multiple of the key/value heads ({groups})")
    return [head * groups // heads for head in range(heads)]


def _talk(A: Tensor, X: Tensor, M: Tensor, P: Tensor | None, P_x: Tensor | None, P_m: Tensor | None) -> Tensor:
    """A [b, r, n, m], P [r, s], P_x and P_m [d, r, s] -> [b, s, n, m]."""
    if P is None:
        if P_x is not None or P_m is not None:
            raise ValueError("dynamic projections are added to a static one: P_l or P_w is missing")
        return A
    mixed = einsum("brnm,rs->bsnm", A, P)
    if P_x is not None:
        mixed = mixed + einsum("brnm,bnrs->bsnm", A, einsum("bnd,drs->bnrs", X, P_x))
    if P_m is not None:
        mixed = mixed + einsum("brnm,bmrs->bsnm", A, einsum("bmd,drs->bmrs", M, P_m))
    return mixed


def _mix_heads(A: list[Tensor], P: Tensor | None, at_n: Tensor | None, at_m: Tensor | None) -> list[Tensor]:
    """A: r heads [b, n, m], P [r, s], at_n [b, n, r, s], at_m [b, m, r, s] -> s heads [b, n, m]."""
    if P is None:
        if at_n is not None or at_m is not None:
            raise ValueError("dynamic matrices are added to a static one: P_l or P_w is missing")
        return A
    if P.shape[0] != len(A):
        raise ValueError(f"a projection of {P.shape[0]} heads was given {len(A)} heads")
    mixed = []
    for s in range(P.shape[1]):
        total = torch.zeros_like(A[0])
        for r, head in enumerate(A):
            coefficient = P[r, s]
            if at_n is not None:
                coefficient = coefficient + at_n[:, :, r, s].unsqueeze(2)  # [b, n, 1]
            if at_m is not None:
                coefficient = coefficient + at_m[:, :, r, s].unsqueeze(1)  # [b, 1, m]
            total = total + coefficient * head
        mixed.append(total)
    return mixed
