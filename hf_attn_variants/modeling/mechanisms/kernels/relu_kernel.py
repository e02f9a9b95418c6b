"""The features relu(x), without parameters: cosFormer's without its weights by distance (arXiv 2202.08791, 3.2)."""

from dataclasses import dataclass
from typing import Any

import torch

from .feature_kernel import FeatureKernel

__all__ = ["Relu"]


@dataclass(frozen=True)
class Relu(FeatureKernel):
    """phi(x) = max(x, 0), F = d. A query that shares no positive number with any key reads nothing: zeros."""

    name = "relu"
    paper = ("cosFormer: rethinking softmax in attention", "2202.08791")

    def query_features(self, module: Any, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return phi(q)."""
        return query.relu()

    def key_features(
        self, module: Any, key: torch.Tensor, read: torch.Tensor | None, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return phi(k)."""
        return (key.relu() if read is None else key.relu() * read), None

    def width(self, head_dim: int) -> int:
        """Return d."""
        return head_dim

    def map_flops(self, head_dim: int) -> int:
        """Return 0: there is no map."""
        return 0
