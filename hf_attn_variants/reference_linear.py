"""Attention without a softmax, by its formulas: the executable specification of the kernels.

Sources: linear attention 2006.16236 (its features elu + 1, and the recurrence), hedgehog 2402.04347, FAVOR+ 2009.14794
(Performer), random feature attention 2103.02143, cosFormer 2202.08791 (its relu), LoLCATs 2410.10254, Linformer
2006.04768. Letters as in `reference`: b batch, h heads, n query length, m memory length, k size of a head; r random
vectors (of Linformer, rows), F features.
Here weights are made, one query's at a time or all of them, so that nothing is shared with the package's sums.
"""

import torch
from torch import Tensor, cat, einsum

__all__ = [
    "elu_features",
    "favor_features",
    "hedgehog_features",
    "hybrid_attention",
    "kernel_attention",
    "kernel_attention_recurrent",
    "linformer_attention",
    "relu_features",
    "rfa_features",
]


def elu_features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (2006.16236, equation 7): x [..., k] -> [..., k]."""
    return torch.where(x > 0, x + 1, x.exp())


def relu_features(x: Tensor) -> Tensor:
    """phi(x) = max(x, 0) (2202.08791, section 3.2, without its weights by distance): x [..., k] -> [..., k]."""
    return torch.where(x > 0, x, 0)


def hedgehog_features(x: Tensor, W: Tensor) -> Tensor:
    """phi(x) = softmax([W x; -W x]), W learned, one for each head (2402.04347, 4.2 and its normalised form).

    x [b, h, n, k], W [h, k, r] -> [b, h, n, 2 r].
    """
    y = einsum("bhnk,hkr->bhnr", x, W)
    E = cat([y, -y], -1).exp()
    return E / E.sum(-1, keepdim=True)


def favor_features(x: Tensor, W: Tensor, *, stabiliser: Tensor | float = 0.0) -> Tensor:
    """phi(x) = exp(W x - |x|^2 / 2 - c) / sqrt(r), positive random features (2009.14794, lemma 1 and equation 5).

    x [..., k], W [r, k] of orthogonal blocks -> [..., r]. With c = 0 the mean of phi(x) phi(y) over the W is exp(x y).
    A stabiliser c, one for each query or one for all keys of a head, leaves the weights as they are.
    """
    return (x @ W.T - (x * x).sum(-1, keepdim=True) / 2 - stabiliser).exp() / W.shape[0] ** 0.5


def rfa_features(x: Tensor, W: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """phi(x) = [sin W (s x / |x|); cos W (s x / |x|)] / sqrt(r) (2103.02143, equation 4; 3.3 for norms; 3.1 for s).

    x [..., k], W [r, k] standard normal, scale s [k] -> [..., 2 r]. The mean of phi(x) phi(y) over the W is
    exp(-|s (x/|x| - y/|y|)|^2 / 2): with s = 1 exp(cos(x, y) - 1).
    """
    y = (scale * x / (x * x).sum(-1, keepdim=True).sqrt()) @ W.T
    return cat([y.sin(), y.cos()], -1) / W.shape[0] ** 0.5


def kernel_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    V: Tensor,
    *,
    causal: bool = False,
    padding: Tensor | None = None,
    least_sum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention whose weights are phi(q) phi(k) over their sum (2006.16236, equation 3).

    Args:
        phi_q: [b, h, n, F].
        phi_k: [b, G, m, F], V: [b, G, m, v]; G divides h: query heads g*i .. g*i + g-1 share head i, g = h / G.
        causal: query i reads the keys up to m - n + i (equation 8).
        padding: [b, m], True where there is a token. A query that reads nothing gets zeros.
        least_sum: sums are this at least (the code of 2103.02143).

    Returns:
        The outputs [b, h, n, v] and the weights [b, h, n, m].
    """
    phi_k, V = (T.repeat_interleave(phi_q.shape[1] // T.shape[1], dim=1) for T in (phi_k, V))
    n, m = phi_q.shape[2], phi_k.shape[2]
    A = einsum("bhnf,bhmf->bhnm", phi_q, phi_k)
    read = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else torch.ones(n, m, dtype=torch.bool)
    read = read if padding is None else read & padding[:, None, None]
    A = A.masked_fill(~read, 0)
    total = A.sum(-1, keepdim=True).clamp_min(least_sum)
    weights = A / total.masked_fill(total == 0, 1)
    return einsum("bhnm,bhmv->bhnv", weights, V), weights


def hybrid_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    w: int,
    gamma: Tensor,
    *,
    scale: float,
    causal: bool = False,
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A softmax in a window, features outside, one normaliser (2410.10254, equation 6; here both ways as well).

    Weights are gamma exp(s_ij - c_i) in the window of query i, s_ij = scale q_i k_j and c_i the largest there, and
    phi(q_i) phi(k_j) elsewhere, each row divided by its sum. The window of w: w / 2 on each side and the token itself;
    causal, the last w, itself among them. (The paper's code has gamma = sigmoid of what is learned.)

    Args:
        phi_q, Q: [b, h, n, F] and [b, h, n, k].
        phi_k, K, V: [b, G, m, F], [b, G, m, k] and [b, G, m, v], as for `kernel_attention`.
        gamma: [h].
        padding: [b, m], True where there is a token. A query that reads nothing gets zeros.

    Returns:
        The outputs [b, h, n, v] and the weights [b, h, n, m].
    """
    phi_k, K, V = (T.repeat_interleave(Q.shape[1] // T.shape[1], dim=1) for T in (phi_k, K, V))
    n, m = Q.shape[2], K.shape[2]
    distance = torch.arange(m) - torch.arange(m - n, m)[:, None]
    window = (distance > -w) & (distance <= 0) if causal else distance.abs() <= w // 2
    read = distance <= 0 if causal else torch.ones_like(window)
    read = read if padding is None else read & padding[:, None, None]
    s = scale * einsum("bhnk,bhmk->bhnm", Q, K)
    c = s.masked_fill(~(window & read), -torch.finfo(s.dtype).max).amax(-1, keepdim=True)
    near = gamma[:, None, None] * (s - c).masked_fill(~(window & read), -torch.inf).exp()
    far = einsum("bhnf,bhmf->bhnm", phi_q, phi_k).masked_fill(window | ~read, 0)
    A = near + far
    total = A.sum(-1, keepdim=True)
    weights = A / total.masked_fill(total == 0, 1)
    return einsum("bhnm,bhmv->bhnv", weights, V), weights


def linformer_attention(
    Q: Tensor, K: Tensor, V: Tensor, E: Tensor, *, scale: float, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(Q (E K)^T) (E V), keys and values projected along the length (2006.04768, equation 7, with F = E).

    Args:
        Q: [b, h, n, k]; K [b, G, m, k] and V [b, G, m, v] as for `kernel_attention`.
        E: [r, m].
        padding: [b, m], True where there is a token; the others count as zeros.

    Returns:
        The outputs [b, h, n, v], and what of each value is in them, the softmax's weights times E [b, h, n, m].
    """
    K, V = (T.repeat_interleave(Q.shape[1] // T.shape[1], dim=1) for T in (K, V))
    E = E.expand(Q.shape[0], -1, -1)
    E = E if padding is None else E.masked_fill(~padding[:, None], 0)
    P = (scale * einsum("bhnk,bhrk->bhnr", Q, einsum("brm,bhmk->bhrk", E, K))).softmax(-1)
    return einsum("bhnr,bhrv->bhnv", P, einsum("brm,bhmv->bhrv", E, V)), einsum("bhnr,brm->bhnm", P, E)


def kernel_attention_recurrent(
    phi_q: Tensor, phi_k: Tensor, V: Tensor, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention token by token, with a state of constant size (2006.16236, equations 18 to 20).

    phi_q and phi_k [b, h, n, F], V [b, h, n, v], S [b, h, F, v], z [b, h, F] -> [b, h, n, v] and the new S and z.
    """
    rows = []
    for q, k, v in zip(phi_q.unbind(2), phi_k.unbind(2), V.unbind(2), strict=True):
        S = S + einsum("bhf,bhv->bhfv", k, v)
        z = z + k
        rows.append(einsum("bhf,bhfv->bhv", q, S) / einsum("bhf,bhf->bh", q, z)[..., None])
    return torch.stack(rows, dim=2), S, z
