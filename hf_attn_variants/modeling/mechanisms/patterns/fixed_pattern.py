"""Attention to the same block and to the last tokens of each block (arXiv 1904.10509, section 4.3)."""

from typing import Any

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["Fixed"]


class Fixed(ScatteredPattern):
    """A pattern with summary tokens. Its size is the number of tokens at the end of a block that all tokens attend to.

    With `split_attention_heads`, each of the two parts belongs to half of the heads.
    """

    name = "fixed"
    paper = ("Sparse Transformers: strided and fixed patterns", "1904.10509")
    needed = ("attention_block_size", "num_summary_tokens")
    optional = ("split_attention_heads", "num_global_tokens")

    @classmethod
    def sizes(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return the number of summary tokens at the end of a block."""
        return (getattr(config, f"{prefix}num_summary_tokens"),)

    @staticmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the keys of the same block, and the ends of all blocks; see `ScatteredPattern.near_and_far`."""
        (summary,) = pattern.sizes
        is_summary = (keys % pattern.block >= pattern.block - summary).expand_as(distance)
        return queries // pattern.block == keys // pattern.block, is_summary

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return the number of tokens in a block, and in the ends of all blocks."""
        return pattern.block, -(-memory // pattern.block) * pattern.sizes[0]
