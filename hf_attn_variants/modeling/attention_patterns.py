"""Which keys a query reads: the fields of a configuration that say it, their checks, and one attention's reach.

`attention_pattern="sliding_window"`: each token reads those near it (Longformer, arXiv 2004.05150, section 3.1), and
the first `num_global_tokens` read everything and are read by everything (section 3.1, "Global Attention"). Of an
encoder-decoder the fields without a prefix are the decoder's self-attention, those with `encoder_` the encoder's;
cross-attention reads the whole source.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PATTERNS", "PATTERN_FIELDS", "Reach", "check_patterns", "checked_pattern_size", "has_pattern"]

PATTERNS = (None, "sliding_window")
# The fields of a pattern without their prefix, with what they are where nothing is given.
PATTERN_FIELDS: Mapping[str, Any] = {
    "attention_pattern": None,
    "attention_window": None,
    "attention_dilation": 1,
    "num_global_tokens": 0,
}
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
    def is_causal(self) -> bool:
        """Whether a query reads no later key."""
        return self.after == 0

    @property
    def most_keys(self) -> int:
        """The keys that a query reads in a long text, but for those of global tokens, which read all."""
        return (self.before + self.after) // self.step + 1 + self.global_tokens

    def covers(self, length: int, memory: int) -> bool:
        """Say whether the last `length` of `memory` positions read all of these (causal: all before them)."""
        return self.step == 1 and memory - 1 <= self.before and (self.is_causal or memory - 1 <= self.after)


def check_patterns(config: Any) -> None:
    """Check the pattern fields of a configuration, each stack's.

    Raises:
        ValueError: for an unknown pattern, a size that breaks its rule, a size without its pattern or a pattern
            without its window, and global tokens in a decoder or beside input-dependent talking heads.
    """
    for prefix in _prefixes(config):
        pattern = getattr(config, f"{prefix}attention_pattern")
        if pattern not in PATTERNS:
            raise ValueError(f'`{prefix}attention_pattern` must be None or "sliding_window"; got {pattern!r}.')
        for name, default in PATTERN_FIELDS.items():
            value = getattr(config, prefix + name)
            if name != "attention_pattern":
                checked_pattern_size(prefix + name, value)
            if pattern is None and value != default:
                raise ValueError(
                    f'`{prefix}{name}` is of a pattern: give `{prefix}attention_pattern="sliding_window"` as well; '
                    f"got {value!r} with {prefix}attention_pattern=None."
                )
        if pattern is None:
            continue
        if getattr(config, f"{prefix}attention_window") is None:
            raise ValueError(f'`{prefix}attention_pattern="{pattern}"` needs `{prefix}attention_window`; got None.')
        _check_decoder(config, prefix)
        if config.talking_heads_dynamic:
            raise ValueError(
                f"`{prefix}attention_pattern` and `talking_heads_dynamic` cannot stand together; got {pattern!r} and "
                f"{config.talking_heads_dynamic}."
            )


def checked_pattern_size(field: str, value: int | None) -> int | None:
    """Return a window, a dilation or a number of global tokens.

    Raises:
        ValueError: unless a window is an even whole number from 2 (or None), a dilation a whole number from 1 and a
            number of tokens one from 0.
    """
    if field.endswith("attention_window"):
        least, rule, wrong = 2, "an even whole number, half of it on each side of a token", value and value % 2
        if value is None:
            return None
    else:
        least, wrong = (1, False) if field.endswith("dilation") else (0, False)
        rule = "a whole number"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or wrong or not least <= value <= MAX_SIZE:
        raise ValueError(f"`{field}` must be {rule}, at least {least}; got {value!r}.")
    return value


def has_pattern(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration has a pattern.

    Args:
        is_causal: of a decoder's self-attention alone; None = any.
    """
    names = [f"{prefix}attention_pattern" for prefix in _prefixes(config)]
    return any(getattr(config, name, None) is not None for name in (names[:1] if is_causal else names))


def _prefixes(config: Any) -> tuple[str, ...]:
    return ("", "encoder_") if hasattr(config, "encoder_attention_pattern") else ("",)


def _check_decoder(config: Any, prefix: str) -> None:
    is_decoder = getattr(config, "is_decoder", False) or len(_prefixes(config)) > 1
    if not prefix and is_decoder and config.num_global_tokens:
        raise ValueError(
            "`num_global_tokens` is of encoders: a decoder's tokens read no later ones; got "
            f"{config.num_global_tokens}."
        )
