"""The features elu(x) + 1, without parameters (arXiv 2006.16236, equation 7)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .feature_kernel import MapKernel

__all__ = ["Elu"]


@dataclass(frozen=True)
class Elu(MapKernel):
    """phi(x) = elu(x) + 1, F = d."""

    name = "elu"
    paper = ("Transformers are RNNs: linear attention", "2006.16236")

    def features_of(self, module: Any, states: torch.Tensor, role: str) -> torch.Tensor:
        """Return phi(x)."""
        return nn.functional.elu(states) + 1

    def width(self, head_dim: int) -> int:
        """Return d."""
        return head_dim

    def map_flops(self, head_dim: int) -> int:
        """Return 0, because there is no matrix product."""
        return 0
