"""The key range of sliding-window attention, with or without summaries; `block_patterns` defines other key ranges."""

from typing import Any, NamedTuple

__all__ = ["MAX_SIZE", "KeyRange", "TransientGlobal"]

# A distance that is longer than any text. It represents a layer without a window. Larger sizes in a configuration are
# errors.
MAX_SIZE = 2**31


class KeyRange(NamedTuple):
    """The key range of an attention module, defined by positions.

    Query i attends to key j if i - before <= j <= i + after. Of these keys, it attends to every `step`-th, counted
    from the query. In addition, it attends to key j if i or j is one of the first `global_tokens` positions.
    """

    before: int
    after: int
    step: int = 1
    global_tokens: int = 0

    @classmethod
    def of(cls, window: int | None, dilation: int, global_tokens: int, is_causal: bool) -> "KeyRange":
        """Return the key range of a window.

        The window extends to both sides of the query by half its width. A causal window ends at the query.

        Args:
            window: w, or None for attention to all keys.
            dilation: the step from one key to the next.
            global_tokens: the number of global tokens at the beginning of the text.
            is_causal: if True, a query does not attend to later keys.
        """
        if window is None:
            return cls(MAX_SIZE, 0 if is_causal else MAX_SIZE)
        if is_causal:
            return cls((window - 1) * dilation, 0, dilation)
        return cls(window // 2 * dilation, window // 2 * dilation, dilation, global_tokens)

    @property
    def counts_tokens(self) -> bool:
        """Return True if the key range depends on positions in the text and not only on distances."""
        return self.global_tokens > 0

    @property
    def is_causal(self) -> bool:
        """Return True if a query does not attend to later keys."""
        return self.after == 0

    def keys_read(self, memory: int) -> int:
        """Return the number of keys out of `memory` that a query in the middle of the text attends to.

        Global tokens attend to all keys and are not considered.
        """
        return min(memory, (self.before + self.after) // self.step + 1 + self.global_tokens)

    def allowed(self, queries: Any, keys: Any) -> Any:
        """Return a boolean mask [n, m] of the keys at positions [m] that the queries at positions [n] attend to."""
        distance = keys - queries[:, None]
        near = (distance >= -self.before) & (distance <= self.after) & (distance % self.step == 0)
        return near | (keys < self.global_tokens) | (queries < self.global_tokens)[:, None]

    def covers(self, length: int, memory: int) -> bool:
        """Return True if the queries at the last `length` of `memory` positions attend to all keys.

        A causal query must attend to all keys up to its position.
        """
        return self.step == 1 and memory - 1 <= self.before and (self.is_causal or memory - 1 <= self.after)


class TransientGlobal(NamedTuple):
    """The key range of transient-global attention: tokens within `radius` and a summary per `block` tokens.

    The module `transient_global` computes this attention.
    """

    radius: int
    block: int

    @property
    def counts_tokens(self) -> bool:
        """Return True, because blocks are counted from the first token of the text."""
        return True

    @property
    def is_causal(self) -> bool:
        """Return False, because only encoders have this key range."""
        return False

    @property
    def before(self) -> int:
        """Return the maximum size, because an encoder does not have a cache."""
        return MAX_SIZE

    def keys_read(self, memory: int) -> int:
        """Return the number of keys and summaries that a query in the middle of `memory` tokens attends to."""
        return min(memory, 2 * self.radius + 1) + memory // self.block
