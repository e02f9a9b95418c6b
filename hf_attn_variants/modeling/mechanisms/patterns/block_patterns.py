"""Patterns whose keys are too scattered for one slice: which keys a query reads, by positions.

Each is a `ScatteredPattern` in a file of its own. Letters as in `softmax_attention`.
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
    """The keys that one attention's queries read, as `Reach` says it for windows; queries are the last of the keys."""

    kind: "type[ScatteredPattern]"
    block: int  # tokens of a block, or a stride
    sizes: tuple[int, ...] = ()  # what else its kind has (`ScatteredPattern.sizes`)
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
        return self.kind.is_drawn and not self.is_causal

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's place in the text counts, and not distances alone."""
        return self.kind.counts_tokens or self.global_tokens > 0

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
        near, far = self.kind.counted(self, memory)
        read = -(-(near + far) // 2) if self.heads else near + far  # on the mean of the heads
        return min(memory, read + self.global_tokens)

    def covers(self, length: int, memory: int) -> bool:
        """Say whether the last `length` of `memory` positions read all of these (causal: all before them)."""
        return self.kind.covers(self, memory) and not self.heads

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which of the keys 0 .. m - 1 the queries at positions [n] read, [n, m] or, by head, [h, n, m].

        Of rows that differ (`of_rows`) [b, 1 or h, n, m]; of padding anything may be said.
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
    """A pattern that has one or two parts: near keys and far ones.

    Class attributes:
        is_drawn: whether anything of it is drawn for each text.
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
        """Return what the pattern has beside its block; arguments as for `reach`."""
        return ()

    @staticmethod
    @abstractmethod
    def near_and_far(
        pattern: BlockPattern, distance: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return which keys are read, [.., n, m]: near ones, and far ones if there is such a part.

        Args:
            pattern: of the attention.
            distance: from a key to a query, [.., n, m].
            queries, keys: their places in the text, [.., n, 1] and [.., 1, m].
        """

    @staticmethod
    @abstractmethod
    def counted(pattern: BlockPattern, memory: int) -> tuple[int, int]:
        """Return about how many of `memory` keys a query reads, near and far."""

    @staticmethod
    def covers(pattern: BlockPattern, memory: int) -> bool:
        """Say whether each of so many positions reads all of them (causal: all before it)."""
        return memory <= pattern.block
