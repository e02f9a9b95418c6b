"""The features relu(x), without parameters: cosFormer's without its weights by distance (arXiv 2202.08791, 3.2)."""

from dataclasses import dataclass
from typing import Any

import torch

from .feature_kernel import MapKernel

__all__ = ["Relu"]


@dataclass(frozen=True)
class Relu(MapKernel):
    """phi(x) = max(x, 0), F = d. A query that shares no positive number with any key reads nothing: zeros."""

    name = "relu"
    paper = ("cosFormer: rethinking softmax in attention", "2202.08791")

    def features_of(self, module: Any, states: torch.Tensor, role: str) -> torch.Tensor:
        """Return phi(x)."""
        return states.relu()

    def width(self, head_dim: int) -> int:
        """Return d."""
        return head_dim

    def map_flops(self, head_dim: int) -> int:
        """Return 0: there is no map."""
        return 0
