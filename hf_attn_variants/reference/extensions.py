"""Output gates.

The paper is arXiv 2505.06708. S are the logits and A the attention weights
[b, h, n, m], and Y are the outputs of the heads [b, h, n, v].
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
