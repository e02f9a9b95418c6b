"""Sliding-window attention (Longformer, arXiv 2004.05150, section 3.1).

The first `num_global_tokens` attend to all tokens, and all tokens attend to them (section 3.1, "Global Attention").
"""

from typing import Any

from ...ops.reach import KeyRange
from .attention_pattern import AttentionPattern

__all__ = ["SlidingWindow"]


class SlidingWindow(AttentionPattern):
    """A window with one half on each side of a token; a causal window contains the token and those before it."""

    name = "sliding_window"
    paper = ("Longformer: sliding windows and global tokens", "2004.05150")
    needed = ("attention_window",)
    optional = ("attention_dilation", "num_global_tokens")
    counts_tokens = False

    @classmethod
    def reach(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> KeyRange:
        """Return the window; see `AttentionPattern.reach`."""
        window = config.layer_value(f"{prefix}attention_window", layer)
        dilation = getattr(config, f"{prefix}attention_dilation")
        global_tokens = getattr(config, f"{prefix}num_global_tokens")
        return KeyRange.of(window, dilation, global_tokens, is_causal)
