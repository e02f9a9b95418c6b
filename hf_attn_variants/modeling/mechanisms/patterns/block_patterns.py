"""Patterns with scattered keys, which are defined by positions instead of one slice of keys.

Each pattern is a subclass of `ScatteredPattern` in its own file. The letters are those of `softmax_attention`.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch

from ...ops.padded_rows import text_places
from ...ops.query_folding import is_traced
from ...ops.reach import MAX_SIZE
from .attention_pattern import AttentionPattern

__all__ = ["BlockPattern", "ScatteredPattern"]


class BlockPattern(NamedTuple):
    """The keys that the queries of one attention attend to, with the interface of `KeyRange`.

    The queries are at the positions of the last keys.
    """

    kind: "type[ScatteredPattern]"
    block: int  # number of tokens in a block, or a stride
    sizes: tuple[int, ...] = ()  # further sizes of its kind (`ScatteredPattern.sizes`)
    heads: int = 0  # number of heads that the two parts are divided among; 0: each head has both
    global_tokens: int = 0
    is_causal: bool = False
    first: torch.Tensor | None = None  # the position of the first token of each row, [b]; None: 0
    blocks: torch.Tensor | None = None  # the number of blocks in each row, [b]; None: all

    @property
    def before(self) -> int:
        """All keys, because the cache keeps every token."""
        return MAX_SIZE

    @property
    def draws(self) -> bool:
        """Whether blocks are drawn from the whole text, and not only from the blocks before the query."""
        return self.kind.is_drawn and not self.is_causal

    @property
    def counts_tokens(self) -> bool:
        """Whether the position of a token in the text matters, and not only distances."""
        return self.kind.counts_tokens or self.global_tokens > 0

    def of_rows(self, mask: torch.Tensor) -> "BlockPattern":
        """Return the pattern for rows that may be padded.

        Args:
            mask: the mask of the keys, boolean [b, 1, 1 or n, m].
        """
        first, tokens = text_places(mask[:, 0, 0])
        if not (self.draws or is_traced() or first.any()):
            return self
        return self._replace(first=first, blocks=-(-tokens // self.block) if self.draws else None)

    def keys_read(self, memory: int) -> int:
        """Return approximately how many of `memory` keys a query attends to.

        Queries of global tokens are not counted; they attend to all keys.
        """
        near, far = self.kind.counted(self, memory)
        read = -(-(near + far) // 2) if self.heads else near + far  # average over the heads
        return min(memory, read + self.global_tokens)

    def covers(self, length: int, memory: int) -> bool:
        """Check if the last `length` of `memory` positions attend to all positions (causal: to all before them)."""
        return self.kind.covers(self, memory) and not self.heads

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which of the keys 0 .. m - 1 the queries at positions [n] attend to, [n, m] or, per head, [h, n, m].

        If the rows differ (`of_rows`), the shape is [b, 1 or h, n, m]. The values at padding are undefined.
        """
        if self.first is not None:
            queries, keys = (places - self.first[:, None, None] for places in (queries, keys))  # [b, 1, n], [b, 1, m]
        queries, keys = queries[..., None], keys[..., None, :]
        distance = queries - keys
        near, far = self.kind.near_and_far(self, distance, queries, keys)
        if self.heads and far is not None:
            parts = [near] * (self.heads - self.heads // 2) + [far | (distance == 0)] * (self.heads // 2)
            allowed = torch.stack(parts) if self.first is None else torch.cat(parts, 1)
        else:
            allowed = near if far is None else near | far
        allowed = allowed | (keys < self.global_tokens) | (queries < self.global_tokens)
        return allowed & (distance >= 0) if self.is_causal else allowed


class ScatteredPattern(AttentionPattern):
    """A pattern with one or two parts: near keys and far keys.

    Class attributes:
        is_drawn: `True` if a part of the pattern is drawn at random for each text.
    """

    is_drawn: ClassVar[bool] = False

    @classmethod
    def reach(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> BlockPattern:
        """Return the pattern of one attention; see `AttentionPattern.reach`."""
        return BlockPattern(
            cls,
            getattr(config, f"{prefix}attention_block_size"),
            cls.sizes(config, prefix, layer),
            heads if getattr(config, f"{prefix}split_attention_heads") else 0,
            0 if is_causal else getattr(config, f"{prefix}num_global_tokens"),
            is_causal,
        )

    @classmethod
    def sizes(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return the sizes of the pattern other than its block; the arguments are those of `reach`."""
        return ()

    @staticmethod
    @abstractmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the near keys, boolean [.., n, m], and the far keys, or None if the pattern has only one part.

        Args:
            pattern: the pattern of the attention.
            distance: the distance from a key to a query, [.., n, m].
            queries, keys: their positions in the text, [.., n, 1] and [.., 1, m].
        """

    @staticmethod
    @abstractmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return approximately how many of `memory` keys a query attends to: near keys and far keys."""

    @staticmethod
    def covers(pattern: BlockPattern, memory: int) -> bool:
        """Check if each of `memory` positions attends to all of them (causal: to all before it)."""
        return memory <= pattern.block
