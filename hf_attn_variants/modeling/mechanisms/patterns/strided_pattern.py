"""Attention to the last l tokens and to every l-th token before them (arXiv 1904.10509, section 4.3)."""

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["Strided"]


class Strided(ScatteredPattern):
    """A pattern with near and strided keys. Its block is the stride l.

    With `split_attention_heads`, each of the two parts belongs to half of the heads.
    """

    name = "strided"
    paper = ("Sparse Transformers: strided and fixed patterns", "1904.10509")
    needed = ("attention_block_size",)
    optional = ("split_attention_heads", "num_global_tokens")
    counts_tokens = False

    @staticmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the keys within a stride, and those at a multiple of it; see `ScatteredPattern.near_and_far`."""
        return distance.abs() <= pattern.block, distance % pattern.block == 0

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return the number of keys within a stride, and one key per stride."""
        return pattern.block * (1 if pattern.is_causal else 2) + 1, -(-memory // pattern.block)
