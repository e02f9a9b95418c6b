"""New, randomly initialised key/value heads (the comparison of arXiv 2305.13245, section 3.3)."""

import torch

from ..grouping import HeadCounts
from ..projections import AttentionTensors, pool_key_value
from .base import LayerContext

__all__ = ["RandomHeads"]


class RandomHeads:
    """Keys and values are drawn as the architecture initialises them, biases are zero: a baseline for uptraining."""

    name = "random"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        def draw(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
            rows = projection.shape[0] // source * target
            if projection.ndim == 1:
                return projection.new_zeros(rows)
            drawn = torch.empty(rows, projection.shape[1])
            return drawn.normal_(0.0, layer.initializer_std, generator=layer.generator).to(projection)

        return pool_key_value(tensors, heads, draw)
