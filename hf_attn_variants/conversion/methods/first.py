"""The first head of each group serves the whole group (the comparison of arXiv 2305.13245, section 3.3)."""

import torch

from ..grouping import HeadCounts, group_heads, join_heads
from ..projections import AttentionTensors, pool_key_value
from .base import LayerContext

__all__ = ["FirstHead", "first_heads"]


def first_heads(projection: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Keep the first of each group of consecutive heads: weight [source*d, D] -> [target*d, D], bias likewise."""
    return join_heads(group_heads(projection, source, target)[:, 0])


class FirstHead:
    """Key/value head i is head g*i of the source, g heads to a group."""

    name = "first"

    def pool(self, tensors: AttentionTensors, heads: HeadCounts, layer: LayerContext) -> AttentionTensors:
        return pool_key_value(tensors, heads, first_heads)
