"""The fields of a configuration that say which keys a query reads, and their checks.

`attention_pattern="sliding_window"`: each token reads those near it (Longformer, arXiv 2004.05150, section 3.1), and
the first `num_global_tokens` read everything and are read by everything (section 3.1, "Global Attention"). The other
patterns are those of `pattern_table`. Of an encoder-decoder the fields without a prefix are the decoder's
self-attention, those with `encoder_` the encoder's; cross-attention reads the whole source.
"""

from dataclasses import dataclass
from typing import Any

from ..mechanisms.patterns.pattern_table import pattern_class, pattern_prefixes
from ..ops.reach import MAX_SIZE
from .field_table import FIELDS, variant_field

__all__ = ["BlockPatternFields", "check_patterns", "checked_pattern_size"]

# The sizes of patterns without their prefix, with their defaults.
PATTERN_SIZES = {row.name: row.default for row in FIELDS if "pattern" in row.facts and row.name != "attention_pattern"}


@dataclass(kw_only=True, repr=False)
class BlockPatternFields:
    """The fields of patterns that consist of blocks.

    Args:
        attention_block_size: l, the number of tokens of a block. For "strided", the stride. For "memory_compressed",
            the number of tokens that become one key.
        num_random_blocks: for "random_blocks", the number of random blocks that a block reads in addition to itself
            and its neighbors.
        attention_seed: for "random_blocks", the seed of the random blocks of each layer.
        num_summary_tokens: for "fixed", the number of tokens at the end of each block that all tokens read.
        split_attention_heads: for "strided" and "fixed", whether half of the heads read near tokens and the others far
            tokens. Otherwise every head reads both.
    """

    attention_block_size: int | None = variant_field("attention_block_size")
    num_random_blocks: int = variant_field("num_random_blocks")
    attention_seed: int = variant_field("attention_seed")
    num_summary_tokens: int = variant_field("num_summary_tokens")
    split_attention_heads: bool = variant_field("split_attention_heads")


def check_patterns(config: Any) -> None:
    """Check the pattern fields of a configuration, each stack's.

    Raises:
        ValueError: if a size breaks its rule, a pattern has no size that it needs, or a pattern cannot be part of this
            model (`AttentionPattern.check`).
    """
    for prefix in pattern_prefixes(config):
        for name in PATTERN_SIZES:
            checked_pattern_size(prefix + name, getattr(config, prefix + name))
        if (pattern := getattr(config, f"{prefix}attention_pattern")) is None:
            continue
        for name in pattern_class(pattern).needed:
            if (value := getattr(config, prefix + name)) == PATTERN_SIZES[name]:
                raise ValueError(f'`{prefix}attention_pattern="{pattern}"` needs `{prefix}{name}`; got {value}.')
        block, summary = (getattr(config, prefix + name) for name in ("attention_block_size", "num_summary_tokens"))
        if summary > (block or summary):
            raise ValueError(
                f"`{prefix}num_summary_tokens` must be at most `{prefix}attention_block_size`; got {summary} and "
                f"{block}."
            )
        pattern_class(pattern).check(config, prefix)


def checked_pattern_size(field: str, value: Any) -> Any:
    """Return the value of a pattern's field.

    Raises:
        ValueError: unless a window is an even whole number from 2 (or None), a block's size (or None) and a dilation
            whole numbers from 1, `split_attention_heads` a boolean, and the others whole numbers from 0.
    """
    if field.endswith("split_attention_heads"):
        if not isinstance(value, bool):
            raise ValueError(f"`{field}` must be True or False; got {value!r}.")
        return value
    if value is None and field.endswith(("attention_window", "attention_block_size")):
        return None
    least, rule, wrong = 0, "a whole number", False
    if field.endswith("attention_window"):
        least, rule, wrong = 2, "an even whole number, half of it on each side of a token", value and value % 2
    elif field.endswith(("dilation", "block_size")):
        least = 1
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or wrong or not least <= value <= MAX_SIZE:
        raise ValueError(f"`{field}` must be {rule}, at least {least}; got {value!r}.")
    return value
