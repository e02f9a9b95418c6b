"""The patterns there are: a row each, with the fields that it needs and those that it may have."""

from collections.abc import Mapping
from typing import Any

__all__ = ["LEARNED_PATTERNS", "PATTERNS", "PATTERN_FIELDS", "has_pattern", "pattern_prefixes", "takes_global_mask"]

# The fields of a pattern without their prefix, with what they are where nothing is given.
PATTERN_FIELDS: Mapping[str, Any] = {
    "attention_pattern": None,
    "attention_window": None,
    "attention_dilation": 1,
    "num_global_tokens": 0,
    "attention_block_size": None,
    "num_random_blocks": 0,
    "attention_seed": 0,
    "num_summary_tokens": 0,
    "split_attention_heads": False,
}
# Of each pattern the fields that it needs, and those that it may have.
PATTERNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sliding_window": (("attention_window",), ("attention_dilation", "num_global_tokens")),
    "random_blocks": (("attention_block_size", "num_random_blocks"), ("attention_seed", "num_global_tokens")),
    "strided": (("attention_block_size",), ("split_attention_heads", "num_global_tokens")),
    "fixed": (("attention_block_size", "num_summary_tokens"), ("split_attention_heads", "num_global_tokens")),
    "local_blocks": (("attention_block_size",), ("num_global_tokens",)),
    "memory_compressed": (("attention_block_size",), ()),
    "transient_global": (("attention_window", "attention_block_size"), ()),
}
# Those with parameters, which no conversion makes.
LEARNED_PATTERNS = ("memory_compressed", "transient_global")


def has_pattern(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration has a pattern.

    Args:
        is_causal: of a decoder's self-attention alone; None = any.
    """
    names = [f"{prefix}attention_pattern" for prefix in pattern_prefixes(config)]
    return any(getattr(config, name, None) is not None for name in (names[:1] if is_causal else names))


def takes_global_mask(config: Any) -> bool:
    """Say whether a model of this configuration is an encoder that takes a `global_attention_mask`."""
    pattern = getattr(config, "attention_pattern", None)
    has_bias = hasattr(config, "relative_attention_num_buckets")
    _, optional = PATTERNS.get(pattern or "", ((), ()))
    return not (config.is_encoder_decoder or has_bias) and "num_global_tokens" in optional


def pattern_prefixes(config: Any) -> tuple[str, ...]:
    """Return what the fields of each stack's pattern begin with."""
    return ("", "encoder_") if hasattr(config, "encoder_attention_pattern") else ("",)
