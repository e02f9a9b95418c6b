"""Attention within the block of the query (arXiv 1801.10198, section 4.2.4, "Local attention")."""

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["LocalBlocks"]


class LocalBlocks(ScatteredPattern):
    """A pattern with which a token attends to the tokens of its own block."""

    name = "local_blocks"
    paper = ("Generating Wikipedia by summarizing long sequences: local blocks", "1801.10198")
    needed = ("attention_block_size",)
    optional = ("num_global_tokens",)

    @staticmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the keys in the block of the query; see `ScatteredPattern.near_and_far`."""
        return queries // pattern.block == keys // pattern.block, None

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return the number of tokens in a block."""
        return pattern.block, 0
