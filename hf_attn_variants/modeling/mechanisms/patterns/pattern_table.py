"""The table of attention patterns.

This module does not import torch, because the commands use these names in their flags.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_pattern import AttentionPattern

__all__ = ["PATTERNS", "get_pattern_class", "get_pattern_prefixes", "has_pattern", "supports_global_mask"]

PATTERNS = (
    "sliding_window",
    "random_blocks",
    "strided",
    "fixed",
    "local_blocks",
    "dilated_blocks",
    "memory_compressed",
    "transient_global",
)


@cache
def get_pattern_class(name: str) -> "type[AttentionPattern]":
    """Return the class of the pattern with this name."""
    from .block_patterns import (
        DilatedBlockPattern,
        FixedPattern,
        LocalBlockPattern,
        RandomBlockPattern,
        StridedPattern,
    )
    from .compressed_pattern import MemoryCompressedPattern
    from .transient_global import TransientGlobalPattern
    from .window_pattern import SlidingWindowPattern

    classes: tuple[type[AttentionPattern], ...] = (
        SlidingWindowPattern,
        RandomBlockPattern,
        StridedPattern,
        FixedPattern,
        LocalBlockPattern,
    )
    classes += (DilatedBlockPattern, MemoryCompressedPattern, TransientGlobalPattern)
    return {pattern.name: pattern for pattern in classes}[name]


def has_pattern(config: Any, is_causal: bool | None = None) -> bool:
    """Return True if any attention module with this configuration has a pattern.

    Args:
        config: a configuration from this package or from Transformers.
        is_causal: True to consider only decoder self-attention, or None to consider all attention modules.
    """
    names = [f"{prefix}attention_pattern" for prefix in get_pattern_prefixes(config)]
    return any(getattr(config, name, None) is not None for name in (names[:1] if is_causal else names))


def supports_global_mask(config: Any) -> bool:
    """Return True if models with this configuration are encoders that accept a `global_attention_mask`."""
    pattern = getattr(config, "attention_pattern", None)
    if pattern is None or config.is_encoder_decoder or hasattr(config, "relative_attention_num_buckets"):
        return False
    return "num_global_tokens" in get_pattern_class(pattern).optional


def get_pattern_prefixes(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the pattern fields for the encoder and the decoder."""
    return ("", "encoder_") if hasattr(config, "encoder_attention_pattern") else ("",)
