"""Random feature attention, a kernel with sines and cosines of random projections (arXiv 2103.02143, section 3.1)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.variant_attention import AttentionHeads
from .attention_kernel import KernelTensorSpec, draw_vectors
from .feature_kernel import TokenwiseKernel

__all__ = ["RfaKernel"]

# The minimum of the sum of a query's weights, as in the authors' code. The estimated sum can be near zero or negative.
MIN_FEATURE_SUM = 1e-2


@dataclass(frozen=True)
class RfaKernel(TokenwiseKernel):
    """The RFA kernel, phi(x) = [sin(w s x / |x|), cos(w s x / |x|)] / sqrt(D).

    It has D random vectors w and learned scales s.
    """

    name = "rfa"
    paper = ("Random feature attention", "2103.02143")
    features_per_dimension = 2
    learned_parameters = ("kernel_scale",)
    random_buffers = ("kernel_vectors",)
    tensors_per_key_head = ("kernel_scale",)

    def get_tensor_specs(self, heads: AttentionHeads) -> dict[str, KernelTensorSpec]:
        """Return the scale s [k, d] of each key head, which is shared by its query heads, and the vectors w [D, d]."""
        scale, vectors = (heads.key, heads.head_dim), (self.features, heads.head_dim)
        return {
            "kernel_scale": KernelTensorSpec(scale, partial(torch.ones, scale)),
            "kernel_vectors": KernelTensorSpec(
                vectors, partial(draw_vectors, *vectors, self.seed, are_orthogonal=False)
            ),
        }

    def compute_features(self, module: Any, states: Tensor, role: str) -> Tensor:
        """Return phi(x). See `TokenwiseKernel.compute_features` for the arguments."""
        heads, scale = states.shape[1], module.kernel_scale.to(states.dtype)
        scale = scale.repeat_interleave(heads // scale.shape[0], 0)[:, None]
        angles = nn.functional.normalize(states, dim=-1) * scale @ module.kernel_vectors.to(states.dtype).T
        return torch.cat([angles.sin(), angles.cos()], -1) * module.kernel_vectors.shape[0] ** -0.5

    def get_num_features(self, head_dim: int) -> int:
        """Return F, which is 2 D."""
        return 2 * self.features

    def compute_divisors(self, sums: Tensor) -> Tensor:
        """Return the sums, clamped to a positive minimum."""
        return sums.clamp_min(MIN_FEATURE_SUM)
