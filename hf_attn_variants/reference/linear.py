"""Attention without a softmax over all keys, such as linear attention, LoLCATs and Linformer.

These functions compute the weights of all queries [b, h, n, m] or of one query at a time, whereas the models compute
sums over keys. r is the number of random vectors (or of rows in Linformer), and F is the number of features.
"""

import torch
from torch import Tensor, cat, einsum

from .heads import Maybe


def elu_features(x: Tensor) -> Tensor:
    """Return phi(x) = elu(x) + 1 (2006.16236, equation 7): x [..., k] -> [..., k]."""
    return torch.where(x > 0, x + 1, x.exp())


def relu_features(x: Tensor) -> Tensor:
    """Return phi(x) = max(x, 0) (cosFormer without its distance weights, 2202.08791, 3.2): x [..., k] -> [..., k]."""
    return torch.where(x > 0, x, 0)


def hedgehog_features(x: Tensor, W: Tensor) -> Tensor:
    """Return phi(x) = softmax([W x; -W x]) with a learned W per head (the normalized form in 2402.04347, 4.2).

    x [b, h, n, k], W [h, k, r] -> [b, h, n, 2 r].
    """
    y = einsum("bhnk,hkr->bhnr", x, W)
    E = cat([y, -y], -1).exp()
    return E / E.sum(-1, keepdim=True)


def favor_features(x: Tensor, W: Tensor, *, stabilizer: Tensor | float = 0.0) -> Tensor:
    """Return phi(x) = exp(W x - |x|^2 / 2 - c) / sqrt(r), positive random features (2009.14794, equation 5).

    x [..., k], W [r, k] with orthogonal blocks -> [..., r]. If c = 0, the mean of phi(x) phi(y) over W is exp(x y)
    (lemma 1). The attention weights do not depend on the stabilizer c, which has one value per query or one value for
    all keys of a head.
    """
    return (x @ W.T - (x * x).sum(-1, keepdim=True) / 2 - stabilizer).exp() / W.shape[0] ** 0.5


def rfa_features(x: Tensor, W: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return phi(x) = [sin W (s x / |x|); cos W (s x / |x|)] / sqrt(r) (2103.02143, equation 4).

    x [..., k], W [r, k] standard normal, scale s [k] -> [..., 2 r]. Section 3.3 of the paper describes the norms, and
    section 3.1 the scale. The mean of phi(x) phi(y) over W is exp(-|s (x/|x| - y/|y|)|^2 / 2), which is
    exp(cos(x, y) - 1) if s = 1.
    """
    y = (scale * x / (x * x).sum(-1, keepdim=True).sqrt()) @ W.T
    return cat([y.sin(), y.cos()], -1) / W.shape[0] ** 0.5


def kernel_attention(
    phi_q: Tensor, phi_k: Tensor, V: Tensor, *, causal: bool = False, padding: Maybe = None, min_sum: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute attention with weights phi(q) phi(k), divided by their sum (2006.16236, equation 3).

    phi_q [b, h, n, F], phi_k [b, G, m, F], V [b, G, m, v] (query heads g*i .. g*i + g-1 share head i) -> the outputs
    [b, h, n, v] and the weights [b, h, n, m]. If `causal` is true, query i attends to the keys up to m - n + i
    (equation 8). The sums are clamped to at least `min_sum`, as in the authors' code for 2103.02143.
    """
    A = einsum("bhnf,bhmf->bhnm", phi_q, _repeat_heads(phi_k, phi_q))
    return _normalize(A.masked_fill(~_build_key_mask(A, causal, padding), 0), V, min_sum)


def kernel_attention_recurrent(
    phi_q: Tensor, phi_k: Tensor, V: Tensor, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal linear attention token by token, with a state of constant size (2006.16236, equations 18 to 20).

    phi_q and phi_k [b, h, n, F], V [b, h, n, v], S [b, h, F, v], z [b, h, F] -> [b, h, n, v] and the new S and z.
    """
    rows = []
    for q, k, v in zip(phi_q.unbind(2), phi_k.unbind(2), V.unbind(2), strict=True):
        S = S + einsum("bhf,bhv->bhfv", k, v)
        z = z + k
        rows.append(einsum("bhf,bhfv->bhv", q, S) / einsum("bhf,bhf->bh", q, z)[..., None])
    return torch.stack(rows, dim=2), S, z


def hybrid_attention(
    phi_q: Tensor, phi_k: Tensor, Q: Tensor, K: Tensor, V: Tensor, w: int, gamma: Tensor, *, scale: float,
    causal: bool = False, padding: Maybe = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention with a softmax inside a window and features outside it (LoLCATs, 2410.10254, equation 6).

    The weights of query i are gamma exp(s_ij - c_i) inside its window and phi(q_i) phi(k_j) outside it, divided by the
    sum of all weights. Here, s_ij = scale q_i k_j, and c_i is the largest s_ij in the window. The window contains
    w / 2 tokens on each side of the query's token. If `causal` is true, it contains the last w tokens, including that
    token itself. In the authors' code, gamma is the sigmoid of a learned number. The paper describes only the causal
    form.

    phi_q [b, h, n, F], Q [b, h, n, k], phi_k [b, G, m, F], K [b, G, m, k], V [b, G, m, v], gamma [h]
    -> the outputs [b, h, n, v] and the weights [b, h, n, m].
    """
    s = scale * einsum("bhnk,bhmk->bhnm", Q, _repeat_heads(K, Q))
    n, m = s.shape[2:]
    distance = torch.arange(m) - torch.arange(m - n, m)[:, None]
    window = (distance > -w) & (distance <= 0) if causal else distance.abs() <= w // 2
    allowed = _build_key_mask(s, causal, padding)
    c = s.masked_fill(~(window & allowed), -torch.finfo(s.dtype).max).amax(-1, keepdim=True)
    near = gamma[:, None, None] * (s - c).masked_fill(~(window & allowed), -torch.inf).exp()
    far = einsum("bhnf,bhmf->bhnm", phi_q, _repeat_heads(phi_k, phi_q)).masked_fill(window | ~allowed, 0)
    return _normalize(near + far, V)


def linformer_attention(
    Q: Tensor, K: Tensor, V: Tensor, E: Tensor, *, scale: float, padding: Maybe = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q (E K)^T) (E V), with keys and values projected along the sequence (2006.04768, equation 7).

    Q [b, h, n, k], K [b, G, m, k], V [b, G, m, v], E [r, m] -> the outputs [b, h, n, v] and the effective weight of
    each value [b, h, n, m], which is the softmax weights times E. E is also used for the projection F in the paper.
    Padding is treated as zeros.
    """
    E = E.expand(Q.shape[0], -1, -1)
    E = E if padding is None else E.masked_fill(~padding[:, None], 0)
    P = (scale * einsum("bhnk,bhrk->bhnr", Q, einsum("brm,bhmk->bhrk", E, _repeat_heads(K, Q)))).softmax(-1)
    projected_V = einsum("brm,bhmv->bhrv", E, _repeat_heads(V, Q))
    return einsum("bhnr,bhrv->bhnv", P, projected_V), einsum("bhnr,brm->bhnm", P, E)


def _repeat_heads(T: Tensor, Q: Tensor) -> Tensor:
    return T.repeat_interleave(Q.shape[1] // T.shape[1], dim=1)  # [b, G, ...] -> [b, h, ...]


def _build_key_mask(A: Tensor, causal: bool, padding: Maybe) -> Tensor:
    """Return a boolean mask for A [b, h, n, m], which is True if query i may attend to key j."""
    n, m = A.shape[2:]
    allowed = torch.ones(n, m, dtype=torch.bool).tril(m - n if causal else m)
    return allowed if padding is None else allowed & padding[:, None, None]


def _normalize(A: Tensor, V: Tensor, min_sum: float = -torch.inf) -> tuple[Tensor, Tensor]:
    """Normalize the weights A [b, h, n, m] and return the outputs and the normalized weights."""
    total = A.sum(-1, keepdim=True).clamp_min(min_sum)
    weights = A / total.masked_fill(total == 0, 1)
    return einsum("bhnm,bhmv->bhnv", weights, _repeat_heads(V, A)), weights
