"""The last tokens, and every l-th before them (Sparse Transformer, arXiv 1904.10509, section 4.3)."""

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["Strided"]


class Strided(ScatteredPattern):
    """Its block is the stride l. The two parts may be of half of the heads each."""

    name = "strided"
    paper = ("Sparse Transformers: strided and fixed patterns", "1904.10509")
    needed = ("attention_block_size",)
    optional = ("split_attention_heads", "num_global_tokens")
    counts_tokens = False

    @staticmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return those within a stride, and those a multiple of it away; see `ScatteredPattern.near_and_far`."""
        return distance.abs() <= pattern.block, distance % pattern.block == 0

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return the tokens within a stride, and one of each."""
        return pattern.block * (1 if pattern.is_causal else 2) + 1, -(-memory // pattern.block)
