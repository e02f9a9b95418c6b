"""Hedgehog, a kernel with learned features that approximate softmax weights (arXiv 2402.04347, section 4.1)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.variant_attention import AttentionHeads
from .attention_kernel import KernelTensorSpec, draw_orthogonal_vectors
from .feature_kernel import TokenwiseKernel

__all__ = ["HedgehogKernel"]

# The initial feature maps are the identity times this factor, which is close to the result of fitting a softmax.
INITIAL_MAP_SCALE = 2.0


@dataclass(frozen=True)
class HedgehogKernel(TokenwiseKernel):
    """The Hedgehog kernel, phi(x) = softmax([x M, -x M]), with F = 2 r features.

    Each query head and each key head has its own matrix M [d, r].
    """

    name = "hedgehog"
    paper = ("The Hedgehog & the Porcupine: softmax mimicry", "2402.04347")
    features_per_dimension = 1
    learned_parameters: ClassVar[tuple[str, ...]] = ("query_kernel_proj", "key_kernel_proj")
    tensors_per_key_head = ("key_kernel_proj",)

    @classmethod
    def uses_random_numbers(cls, features: int | None, head_dim: int) -> bool:
        """Return True if the feature maps are wider than a head, because the additional columns are random."""
        return (features or 0) > head_dim

    def get_tensor_specs(self, heads: AttentionHeads) -> dict[str, KernelTensorSpec]:
        """Return M for the query heads [h, d, r] and for the key heads [k, d, r]."""
        counts = {"query_kernel_proj": heads.query, "key_kernel_proj": heads.key}
        shapes = {name: (count, heads.head_dim, self.features) for name, count in counts.items()}
        return {
            name: KernelTensorSpec(shape, partial(self._create_initial_maps, shape)) for name, shape in shapes.items()
        }

    def _create_initial_maps(self, shape: tuple[int, int, int]) -> Tensor:
        """Return the initial M: twice the identity, followed by random orthogonal columns if r is larger than d."""
        _, size, width = shape
        rows = draw_orthogonal_vectors(max(0, width - size), size, torch.Generator().manual_seed(self.seed))
        return (INITIAL_MAP_SCALE * torch.cat([torch.eye(size), rows.T], dim=1)[:, :width]).expand(shape)

    def compute_features(self, module: Any, states: Tensor, role: str) -> Tensor:
        """Return phi(x). See `TokenwiseKernel.compute_features` for the arguments."""
        mapped = states @ getattr(module, f"{role}_kernel_proj").to(states.dtype)
        return torch.cat([mapped, -mapped], -1).softmax(-1)

    def get_num_features(self, head_dim: int) -> int:
        """Return F, which is 2 r."""
        return 2 * self.features
