"""DEX, which subtracts a projection of each head's output from the output (arXiv 2505.16333, figure 9).

The output of head h becomes y - lambda_h y W with one d_v x d_v matrix W for all heads. W starts as the identity and
lambda_h as 0, so that a model can continue from a checkpoint without DEX. The paper has one lambda per layer for heads
that are selected in advance, and adds a schedule. Here every head learns its own lambda. The output projection can
express the result. The symbols are defined in `softmax_attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.variant_attention import AttentionHeads
from ..transformers_internals import guarded_imports
from .attention_extension import OUTPUT_STAGE, AttentionExtension, check_switch

with guarded_imports():
    from transformers import initialization as init

__all__ = ["DifferentialExtension"]


class DifferentialExtension(AttentionExtension):
    """The matrix and the factors of an attention module."""

    field = "dex"
    paper = ("Understanding Differential Transformer unchains pretrained self-attentions", "2505.16333")
    stage = OUTPUT_STAGE
    validate = staticmethod(check_switch)

    def __init__(self, value: Any, heads: AttentionHeads, query_dim: int, like: Tensor) -> None:
        super().__init__(value, heads, query_dim, like)
        size = heads.value_dim
        self.factors = nn.Parameter(torch.empty(heads.output, dtype=like.dtype, device=like.device))  # lambda, [h_v]
        self.weight = nn.Parameter(torch.empty(size, size, dtype=like.dtype, device=like.device))  # W, [d_v, d_v]

    def init_variant_parameters(self) -> None:
        """Initialize lambda with zeros and W as the identity."""
        init.zeros_(self.factors)
        init.copy_(self.weight, torch.eye(len(self.weight), dtype=self.weight.dtype, device=self.weight.device))

    def forward(self, output: Tensor, states: Tensor) -> Tensor:
        """Return the changed outputs of the heads, [b, n, h_v, d_v]. The inputs of the projection are not used."""
        return output - self.factors[:, None] * (output @ self.weight)

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token."""
        return 0, 2 * len(self.factors) * self.weight.numel()

    def fold(self, role: str, projection: Tensor) -> Tensor:
        """Return the weight [D, h_v d_v] of the output projection that computes the same, or others unchanged."""
        if role != "output" or projection.dim() == 1:
            return projection
        size = len(self.weight)
        maps = torch.eye(size, dtype=torch.float64) - self.factors.double()[:, None, None] * self.weight.double()
        heads = projection.double().unflatten(1, (-1, size))
        return torch.einsum("ohe,hde->ohd", heads, maps).flatten(1).to(projection)
