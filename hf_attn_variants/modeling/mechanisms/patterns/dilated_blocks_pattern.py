"""Attention to every r-th token of the same block (LongNet, arXiv 2307.02486, section 3.1).

In LongNet, each head has the queries of one phase. Here each query has its own phase, so that all queries have
outputs.
"""

from typing import Any

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["DilatedBlocks"]


class DilatedBlocks(ScatteredPattern):
    """A pattern with dilated blocks. Its size is r, the step between two attended tokens."""

    name = "dilated_blocks"
    paper = ("LongNet: dilated blocks", "2307.02486")
    needed = ("attention_block_size", "attention_dilation")
    optional = ("num_global_tokens",)

    @classmethod
    def sizes(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return r."""
        return (getattr(config, f"{prefix}attention_dilation"),)

    @staticmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the keys of the same block at multiples of r; see `ScatteredPattern.near_and_far`."""
        (step,) = pattern.sizes
        return (queries // pattern.block == keys // pattern.block) & (distance % step == 0), None

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return the number of attended tokens in a block."""
        return -(-pattern.block // pattern.sizes[0]), 0

    @staticmethod
    def covers(pattern: BlockPattern, memory: int) -> bool:
        """Check if each position attends to all positions, which is true only for one position."""
        return memory <= 1
