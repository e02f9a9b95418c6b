"""Hedgehog: features that are learned to be near a softmax's weights (arXiv 2402.04347, section 4.1)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ...ops.variant_attention import AttentionHeads
from .attention_kernel import KernelTensor
from .feature_kernel import MapKernel
from .random_vectors import orthogonal_rows

__all__ = ["Hedgehog"]

# What the maps begin as, times the identity: near what a fit to a softmax finds.
FIRST_MAP = 2.0


@dataclass(frozen=True)
class Hedgehog(MapKernel):
    """phi(x) = softmax([x M, -x M]), with a map M [d, r] for each head of the queries and of the keys; F = 2 r."""

    name = "hedgehog"
    paper = ("The Hedgehog & the Porcupine: softmax mimicry", "2402.04347")
    features_a_number = 1
    learned: ClassVar[tuple[str, ...]] = ("query_kernel_proj", "key_kernel_proj")
    of_key_heads = ("key_kernel_proj",)

    @classmethod
    def draws(cls, features: int | None, head_dim: int) -> bool:
        """Say whether the maps are wider than a head: what is beside the identity is drawn."""
        return (features or 0) > head_dim

    def tensors(self, heads: AttentionHeads) -> dict[str, KernelTensor]:
        """Return M of the query heads [h, d, r] and of the key heads [k, d, r]."""
        counts = {"query_kernel_proj": heads.query, "key_kernel_proj": heads.key}
        shapes = {name: (count, heads.head_dim, self.features) for name, count in counts.items()}
        return {name: KernelTensor(shape, partial(self._first_maps, shape)) for name, shape in shapes.items()}

    def _first_maps(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return what M begins as: twice the identity and, beside it, this turned at random."""
        _, size, width = shape
        rows = orthogonal_rows(max(0, width - size), size, torch.Generator().manual_seed(self.seed))
        return (FIRST_MAP * torch.cat([torch.eye(size), rows.T], dim=1)[:, :width]).expand(shape)

    def features_of(self, module: Any, states: torch.Tensor, role: str) -> torch.Tensor:
        """Return phi(x)."""
        mapped = states @ getattr(module, f"{role}_kernel_proj").to(states.dtype)
        return torch.cat([mapped, -mapped], -1).softmax(-1)

    def width(self, head_dim: int) -> int:
        """Return 2 r."""
        return 2 * self.features
