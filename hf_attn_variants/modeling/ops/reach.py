"""Which keys a query reads, by positions: of windows, with summaries or without (`block_patterns` has the others)."""

from typing import Any, NamedTuple

__all__ = ["MAX_SIZE", "Reach", "TransientGlobal"]

# Farther than any text: a layer without a window. Sizes beyond are mistakes.
MAX_SIZE = 2**31


class Reach(NamedTuple):
    """The keys that one attention's queries read, by positions: key j for query i where i - before <= j <= i + after.

    Of these every `step`-th, counted from the query; and, either of them among the first `global_tokens`, any two.
    """

    before: int
    after: int
    step: int = 1
    global_tokens: int = 0

    @classmethod
    def of(cls, window: int | None, dilation: int, global_tokens: int, is_causal: bool) -> "Reach":
        """Return the reach of a window: half of it on each side, or where causal the query and those before it.

        Args:
            window: w; None = there is none, everything is read.
            dilation: the step from one key to the next.
            global_tokens: the number of the first tokens that are global.
            is_causal: whether a query reads no later key.
        """
        if window is None:
            return cls(MAX_SIZE, 0 if is_causal else MAX_SIZE)
        if is_causal:
            return cls((window - 1) * dilation, 0, dilation)
        return cls(window // 2 * dilation, window // 2 * dilation, dilation, global_tokens)

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's place in the text counts, and not distances alone."""
        return self.global_tokens > 0

    @property
    def is_causal(self) -> bool:
        """Whether a query reads no later key."""
        return self.after == 0

    def keys_read(self, memory: int) -> int:
        """Return how many of `memory` keys a query in their midst reads, but for global tokens, which read all."""
        return min(memory, (self.before + self.after) // self.step + 1 + self.global_tokens)

    def allowed(self, queries: Any, keys: Any) -> Any:
        """Return which of the keys at positions [m] the queries at positions [n] read, [n, m]."""
        distance = keys - queries[:, None]
        near = (distance >= -self.before) & (distance <= self.after) & (distance % self.step == 0)
        return near | (keys < self.global_tokens) | (queries < self.global_tokens)[:, None]

    def covers(self, length: int, memory: int) -> bool:
        """Say whether the last `length` of `memory` positions read all of these (causal: all before them)."""
        return self.step == 1 and memory - 1 <= self.before and (self.is_causal or memory - 1 <= self.after)


class TransientGlobal(NamedTuple):
    """The tokens within `radius` of a query, and a summary of each `block` tokens (`transient_global`)."""

    radius: int
    block: int

    @property
    def counts_tokens(self) -> bool:
        """Always: blocks count from the text's first token."""
        return True

    @property
    def is_causal(self) -> bool:
        """Never: it is of an encoder."""
        return False

    @property
    def before(self) -> int:
        """All keys: an encoder has no cache."""
        return MAX_SIZE

    def keys_read(self, memory: int) -> int:
        """Return how many of `memory` keys and their summaries a query in their midst reads."""
        return min(memory, 2 * self.radius + 1) + memory // self.block
