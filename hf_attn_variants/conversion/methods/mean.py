"""Mean-pooling of the heads that will share a key/value head (arXiv 2305.13245, section 2.1)."""

import torch

from ..grouping import HeadCounts, group_heads, join_heads
from ..projections import AttentionTensors, pool_key_value
from .base import LayerContext

__all__ = ["MeanPooling", "mean_heads"]


def mean_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Average each group of consecutive heads: weight [source*d, D] -> [target*d, D], bias likewise, in one dtype."""
    pooled = [
        # float64 so that equal heads give themselves back; a group at a time so that no wide copy of the layer exists.
        group.double().sum(dim=0).div_(group.shape[0]).to(projection.dtype)
        for group in group_heads(projection, source, target)
    ]
    return join_heads(torch.stack(pooled))


class MeanPooling:
    """Key/value head i is the mean of its group's heads, weights and biases alike."""

    name = "mean"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        return pool_key_value(tensors, heads, mean_heads)
