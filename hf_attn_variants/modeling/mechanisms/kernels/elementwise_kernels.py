"""Kernels without parameters, whose features are elementwise functions: elu(x) + 1 and relu(x)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .feature_kernel import TokenwiseKernel

__all__ = ["EluKernel", "ReluKernel"]


@dataclass(frozen=True)
class EluKernel(TokenwiseKernel):
    """The ELU kernel, phi(x) = elu(x) + 1, with F = d features."""

    name = "elu"
    paper = ("Transformers are RNNs: linear attention", "2006.16236")

    def compute_features(self, module: Any, states: Tensor, role: str) -> Tensor:
        """Return phi(x). See `TokenwiseKernel.compute_features` for the arguments."""
        return nn.functional.elu(states) + 1

    def get_num_features(self, head_dim: int) -> int:
        """Return F, which is d."""
        return head_dim

    def count_feature_map_flops(self, head_dim: int) -> int:
        """Return 0, because there is no matrix product."""
        return 0


@dataclass(frozen=True)
class ReluKernel(TokenwiseKernel):
    """The ReLU kernel, phi(x) = max(x, 0), with F = d features.

    The output is zero if a query and the keys have no positive features in common.
    """

    name = "relu"
    paper = ("cosFormer: rethinking softmax in attention", "2202.08791")

    def compute_features(self, module: Any, states: Tensor, role: str) -> Tensor:
        """Return phi(x). See `TokenwiseKernel.compute_features` for the arguments."""
        return states.relu()

    def get_num_features(self, head_dim: int) -> int:
        """Return F, which is d."""
        return head_dim

    def count_feature_map_flops(self, head_dim: int) -> int:
        """Return 0, because there is no matrix product."""
        return 0
