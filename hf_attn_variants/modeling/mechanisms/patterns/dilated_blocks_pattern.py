"""The own block, of which every r-th token is read (LongNet, arXiv 2307.02486, section 3.1).

LongNet gives each head the queries of one phase. Here each query has its own phase, so that all are answered.
"""

from typing import Any

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["DilatedBlocks"]


class DilatedBlocks(ScatteredPattern):
    """Size: r, the step from one token that is read to the next."""

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
        """Return those of the own block a multiple of r away; see `ScatteredPattern.near_and_far`."""
        (step,) = pattern.sizes
        return (queries // pattern.block == keys // pattern.block) & (distance % step == 0), None

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return every r-th token of a block."""
        return -(-pattern.block // pattern.sizes[0]), 0

    @staticmethod
    def covers(pattern: BlockPattern, memory: int) -> bool:
        """Say whether each position reads all: one does."""
        return memory <= 1
