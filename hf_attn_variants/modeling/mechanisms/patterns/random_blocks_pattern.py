"""Attention to neighboring and random blocks, drawn once per layer (BigBird, arXiv 2007.14062, section 2)."""

from typing import Any

import torch

from .block_patterns import BlockPattern, ScatteredPattern

__all__ = ["RandomBlocks"]

# Draws are 32-bit numbers that depend only on positions, so that a text has the same draws on every device.
BITS = 0xFFFFFFFF
MAX_BLOCKS = 2**20
NEVER = 2**62


class RandomBlocks(ScatteredPattern):
    """A pattern with random blocks. Its sizes are the number of drawn blocks and the seed of the layer."""

    name = "random_blocks"
    paper = ("BigBird: random blocks", "2007.14062")
    needed = ("attention_block_size", "num_random_blocks")
    optional = ("attention_seed", "num_global_tokens")
    is_drawn = True

    @classmethod
    def sizes(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return the number of drawn blocks and the seed."""
        seed = _mixed(_mixed(getattr(config, f"{prefix}attention_seed")) + layer)
        return getattr(config, f"{prefix}num_random_blocks"), seed

    @staticmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the keys of a block and its neighbors, and those of the drawn blocks.

        See `ScatteredPattern.near_and_far`.
        """
        random, seed = pattern.sizes
        block = queries // pattern.block
        blocks = torch.arange(-(-keys.shape[-1] // pattern.block), device=keys.device)
        apart = block - blocks  # [n, blocks]
        others = apart > 1 if pattern.is_causal else apart.abs() > 1
        if pattern.blocks is not None:
            others = others & (blocks < pattern.blocks[:, None, None, None])
        # The draw of a pair of blocks depends on nothing else, and a block attends to those with the smallest draws. A
        # causal block therefore attends to the same blocks in a text of any length.
        draws = _mixed((_mixed((seed + block) & BITS) + blocks) & BITS) * MAX_BLOCKS + blocks
        draws = torch.where(others, draws, NEVER)
        last = draws.sort(-1).values[..., :random].amax(-1, keepdim=True)
        drawn = others & (draws <= last)
        of_keys = keys // pattern.block
        index = of_keys.clamp(0, blocks.shape[0] - 1).expand_as(distance)
        return (block - of_keys).abs() <= 1, drawn.gather(-1, index)

    @staticmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return the number of tokens in a block, its neighbors and the drawn blocks."""
        return ((2 if pattern.is_causal else 3) + pattern.sizes[0]) * pattern.block, 0


def _mixed(number: Any) -> Any:
    """Return a pseudo-random hash of a number below 2^32, or of a tensor of such numbers."""
    for _ in range(2):
        number = (((number >> 16) ^ number) * 0x45D9F3B) & BITS
    return (number >> 16) ^ number
