"""FAVOR+, with positive random features whose products estimate softmax weights (arXiv 2009.14794, section 2.3)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.variant_attention import AttentionHeads
from .attention_kernel import KernelTensorSpec, draw_vectors
from .feature_kernel import FeatureKernel

__all__ = ["FavorKernel"]


@dataclass(frozen=True)
class FavorKernel(FeatureKernel):
    """The FAVOR+ kernel, phi(x) = exp(w x - |x|^2 / 2), with orthogonal random vectors w.

    The input x is first multiplied by the square root of `scaling`.
    """

    name = "favor"
    paper = ("Rethinking attention with Performers", "2009.14794")
    features_per_dimension = 4
    random_buffers = ("kernel_vectors",)

    def get_tensor_specs(self, heads: AttentionHeads) -> dict[str, KernelTensorSpec]:
        """Return the vectors w [F, d]."""
        shape = (self.features, heads.head_dim)
        return {
            "kernel_vectors": KernelTensorSpec(shape, partial(draw_vectors, *shape, self.seed, are_orthogonal=True))
        }

    def compute_query_features(self, module: Any, query: Tensor, scaling: float) -> Tensor:
        """Return phi(q), with each row divided by its largest value."""
        logits = _compute_feature_logits(module, query, scaling)
        return (logits - logits.amax(-1, keepdim=True).detach()).exp()

    def compute_key_features(
        self, module: Any, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return phi(k), divided by its largest value over all keys, and the logarithm of this divisor."""
        logits = _compute_feature_logits(module, key, scaling)
        logits = logits if key_mask is None else logits.masked_fill(~key_mask, -torch.inf)
        max_logit = logits.detach().amax((-2, -1), keepdim=True)
        max_logit = max_logit.clamp_min(torch.finfo(max_logit.dtype).min)  # without keys, -inf - -inf would be NaN
        return (logits - max_logit).exp(), max_logit

    def get_num_features(self, head_dim: int) -> int:
        """Return F, which is the number of random vectors."""
        return self.features


def _compute_feature_logits(module: Any, states: Tensor, scaling: float) -> Tensor:
    states = states * scaling**0.5
    return states @ module.kernel_vectors.to(states.dtype).T - states.square().sum(-1, keepdim=True) / 2
