"""Patterns whose keys are too scattered for one slice: which keys a query reads, by positions.

`random_blocks` (BigBird, arXiv 2007.14062, section 2): a block reads itself, its two neighbours and a few others that
are drawn once a layer. `strided` and `fixed` (Sparse Transformer, 1904.10509, section 4.3): the last tokens and every
l-th before them; or the own block and the last tokens of each block. `local_blocks` (1801.10198, section 4.2.4): the
own block. Letters as in `softmax_attention`.
"""

from typing import Any, NamedTuple

import torch

from ...ops.padded_rows import text_places
from ...ops.query_folding import is_traced
from ...ops.reach import MAX_SIZE

__all__ = ["BlockPattern"]

# Draws are numbers of 32 bits, made from positions alone: a text has the same ones on every device.
BITS = 0xFFFFFFFF
MAX_BLOCKS = 2**20
NEVER = 2**62


class BlockPattern(NamedTuple):
    """The keys that one attention's queries read, as `Reach` says it for windows; queries are the last of the keys."""

    kind: str
    block: int  # tokens of a block; strided: the stride
    random: int = 0  # blocks that are drawn
    seed: int = 0  # of this layer
    summary: int = 0  # the last tokens of each block, which all later ones read
    heads: int = 0  # where the heads share a pattern's two parts out; 0: each has both
    global_tokens: int = 0
    is_causal: bool = False
    first: torch.Tensor | None = None  # the place of each row's first token, [b]; None: 0
    blocks: torch.Tensor | None = None  # the blocks of each row's text, [b]; None: all

    @property
    def before(self) -> int:
        """All keys: a cache keeps everything."""
        return MAX_SIZE

    @property
    def draws(self) -> bool:
        """Whether blocks are drawn among all of a text's, and not among those before alone."""
        return self.kind == "random_blocks" and not self.is_causal

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's place in the text counts, and not distances alone."""
        return self.kind != "strided" or self.global_tokens > 0

    @classmethod
    def of(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> "BlockPattern":
        """Return the pattern of one attention.

        Args:
            config: a configuration with an `attention_pattern` of blocks.
            prefix: of the fields of the attention's stack.
            heads: of its softmax.
            layer: its layer in the stack.
            is_causal: whether a query reads no later key.
        """
        return cls(
            getattr(config, f"{prefix}attention_pattern"),
            getattr(config, f"{prefix}attention_block_size"),
            getattr(config, f"{prefix}num_random_blocks"),
            _mixed(_mixed(getattr(config, f"{prefix}attention_seed")) + layer),
            getattr(config, f"{prefix}num_summary_tokens"),
            heads if getattr(config, f"{prefix}split_attention_heads") else 0,
            0 if is_causal else getattr(config, f"{prefix}num_global_tokens"),
            is_causal,
        )

    def of_rows(self, mask: torch.Tensor) -> "BlockPattern":
        """Return the pattern of rows that may be padded.

        Args:
            mask: of the keys alone, boolean [b, 1, 1 or n, m].
        """
        first, tokens = text_places(mask[:, 0, 0])
        if not (self.draws or is_traced() or first.any()):
            return self
        return self._replace(first=first, blocks=-(-tokens // self.block) if self.draws else None)

    def keys_read(self, memory: int) -> int:
        """Return about how many of `memory` keys a query reads, but for those of global tokens, which read all."""
        blocks = -(-memory // self.block)
        parts = {
            "random_blocks": (((2 if self.is_causal else 3) + self.random) * self.block, 0),
            "strided": (self.block * (1 if self.is_causal else 2) + 1, blocks),
            "fixed": (self.block, blocks * self.summary),
            "local_blocks": (self.block, 0),
        }[self.kind]
        read = -(-sum(parts) // 2) if self.heads else sum(parts)  # on the mean of the heads
        return min(memory, read + self.global_tokens)

    def covers(self, length: int, memory: int) -> bool:
        """Say whether the last `length` of `memory` positions read all of these (causal: all before them)."""
        return memory <= self.block and not self.heads

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which of the keys 0 .. m - 1 the queries at positions [n] read, [n, m] or, by head, [h, n, m].

        Of rows that differ (`of_rows`) [b, 1 or h, n, m]; of padding anything may be said.
        """
        if self.first is not None:
            queries, keys = (places - self.first[:, None, None] for places in (queries, keys))  # [b, 1, n], [b, 1, m]
        queries, keys = queries[..., None], keys[..., None, :]
        distance = queries - keys
        near, far = getattr(self, f"_{self.kind}")(distance, queries, keys)
        if self.heads:
            parts = [near] * (self.heads - self.heads // 2) + [far | (distance == 0)] * (self.heads // 2)
            allowed = torch.stack(parts) if self.first is None else torch.cat(parts, 1)
        else:
            allowed = near if far is None else near | far
        allowed = allowed | (keys < self.global_tokens) | (queries < self.global_tokens)
        return allowed & (distance >= 0) if self.is_causal else allowed

    def _strided(self, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        return distance.abs() <= self.block, distance % self.block == 0

    def _fixed(self, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        is_summary = (keys % self.block >= self.block - self.summary).expand_as(distance)
        return queries // self.block == keys // self.block, is_summary

    def _local_blocks(self, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        return queries // self.block == keys // self.block, None

    def _random_blocks(self, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        block, blocks = queries // self.block, torch.arange(-(-keys.shape[-1] // self.block), device=keys.device)
        apart = block - blocks  # [n, blocks]
        others = apart > 1 if self.is_causal else apart.abs() > 1
        if self.blocks is not None:
            others = others & (blocks < self.blocks[:, None, None, None])
        # A draw for each pair of blocks; the smallest are read. So texts of any length have those of a longer one
        # among as many blocks, and where causal the same.
        draws = _mixed((_mixed((self.seed + block) & BITS) + blocks) & BITS) * MAX_BLOCKS + blocks
        draws = torch.where(others, draws, NEVER)
        last = draws.sort(-1).values[..., : self.random].amax(-1, keepdim=True)
        drawn = others & (draws <= last)
        of_keys = keys // self.block
        index = of_keys.clamp(0, blocks.shape[0] - 1).expand_as(distance)
        return (block - of_keys).abs() <= 1, drawn.gather(-1, index)


def _mixed(number: Any) -> Any:
    """Return a number below 2^32, or a tensor of such, as one that looks drawn."""
    for _ in range(2):
        number = (((number >> 16) ^ number) * 0x45D9F3B) & BITS
    return (number >> 16) ^ number
