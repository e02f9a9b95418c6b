"""The features elu(x) + 1, without parameters (arXiv 2006.16236, equation 7)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .feature_kernel import FeatureKernel

__all__ = ["Elu"]


@dataclass(frozen=True)
class Elu(FeatureKernel):
    """phi(x) = elu(x) + 1, F = d."""

    name = "elu"
    paper = ("Transformers are RNNs: linear attention", "2006.16236")

    def query_features(self, module: Any, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return phi(q)."""
        return nn.functional.elu(query) + 1

    def key_features(
        self, module: Any, key: torch.Tensor, read: torch.Tensor | None, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return phi(k)."""
        features = nn.functional.elu(key) + 1
        return (features if read is None else features * read), None

    def width(self, head_dim: int) -> int:
        """Return d."""
        return head_dim

    def map_flops(self, head_dim: int) -> int:
        """Return 0: there is no map."""
        return 0
