"""Output gates, attention sinks, clipped softmax, knocking heads and DEX.

The papers are arXiv 2505.06708, 2508.10925, 2306.12929, 2510.23052 and 2505.16333. S are the logits and A the
attention weights [b, h, n, m], and Y are the outputs of the heads [b, h, n, v].
"""

import torch
from torch import Tensor, einsum


def gate_outputs(Y: Tensor, X: Tensor, W: Tensor) -> Tensor:
    """Return Y multiplied by sigmoid(X W) (2505.06708, equation 5), times 2, so that W = 0 changes nothing.

    Y [b, h, n, v], X [b, n, d], and W [h, d] (a gate per head) or W [h, v, d] (a gate per element) -> [b, h, n, v].
    """
    equation = "bnd,hd->bhn" if W.dim() == 2 else "bnd,hvd->bhnv"
    gate = 2 * torch.sigmoid(einsum(equation, X, W))
    return Y * (gate.unsqueeze(-1) if W.dim() == 2 else gate)


def softmax_with_sinks(S: Tensor, a: Tensor) -> Tensor:
    """Return exp(S_j) / (a + sum_i exp(S_i)), a softmax with one more term in the denominator (2508.10925, 2.2).

    S [b, h, n, m] with minus infinity for masked keys, a [h] -> [b, h, n, m]. The paper writes the term as exp(log a).
    The weights of a query without keys are 0.
    """
    terms = torch.exp(S)
    total = a[:, None, None] + terms.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, terms / total)


def clip_softmax(A: Tensor, gamma: float, zeta: float) -> Tensor:
    """Return clip((zeta - gamma) A + gamma, 0, 1) for the weights A of a softmax (2306.12929, equation 4)."""
    return torch.clip((zeta - gamma) * A + gamma, 0, 1)


def knock_heads(H: Tensor, T: Tensor) -> Tensor:
    """Multiply all query, key or value heads by one matrix (2510.23052, equations 5 to 7).

    H [b, h, n, k], T [k, k] -> [b, h, n, k].
    """
    return einsum("bhnk,kl->bhnl", H, T)


def subtract_projections(Y: Tensor, factors: Tensor, W: Tensor) -> Tensor:
    """Return Y - lambda Y W for each head (DEX, 2505.16333, figure 9), with one lambda per head.

    Y [b, h, n, v], factors [h], W [v, v] -> [b, h, n, v]. The paper has one lambda for the selected heads of a layer.
    """
    return Y - factors[:, None, None] * einsum("bhnv,vw->bhnw", Y, W)
