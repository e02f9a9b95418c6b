"""Output gates, which multiply the outputs of the heads by a sigmoid of the inputs (arXiv 2505.06708, equation 5).

The gate is 2 sigmoid(x W^T), where x is the input of the query projection. It is 1 if W = 0, so that a model can
continue from a checkpoint without gates. The paper omits the factor 2, which arXiv 2306.12929 uses in a fine-tuning
experiment (appendix B.6). The symbols are defined in `softmax_attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.variant_attention import AttentionHeads
from ..transformers_internals import guarded_imports
from .attention_extension import OUTPUT_STAGE, AttentionExtension

with guarded_imports():
    from transformers import initialization as init

__all__ = ["OutputGate"]


class OutputGate(AttentionExtension):
    """The gate of an attention module, with one value per head ("head") or per element of a head ("element")."""

    field = "output_gate"
    paper = ("Gated attention for large language models", "2505.06708")
    stage = OUTPUT_STAGE

    def __init__(self, value: Any, heads: AttentionHeads, query_dim: int, like: Tensor) -> None:
        super().__init__(value, heads, query_dim, like)
        self.heads = heads.output
        size = 1 if value == "head" else heads.value_dim
        weight = torch.empty(self.heads * size, query_dim, dtype=like.dtype, device=like.device)
        self.weight = nn.Parameter(weight)  # W, [h_v, D] or [h_v d_v, D]

    def init_variant_parameters(self) -> None:
        """Initialize W with zeros."""
        init.zeros_(self.weight)

    def forward(self, output: Tensor, states: Tensor) -> Tensor:
        """Return the gated outputs of the heads, [b, n, h_v, d_v].

        Args:
            output: the outputs of the heads.
            states: x, the inputs of the query projection [b, n, D].
        """
        gate = 2 * nn.functional.linear(states, self.weight).sigmoid()
        return output * gate.unflatten(-1, (self.heads, -1))

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token."""
        return 0, 2 * self.weight.numel()
