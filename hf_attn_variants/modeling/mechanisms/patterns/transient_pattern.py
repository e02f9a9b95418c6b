"""Fields and checks of the transient-global attention of T5 (arXiv 2112.07916); `transient_global` computes it."""

from typing import Any

from ...ops.reach import MAX_SIZE, TransientGlobal
from .attention_pattern import AttentionPattern

__all__ = ["TransientPattern"]


class TransientPattern(AttentionPattern):
    """A pattern with near tokens and a summary of each block."""

    name = "transient_global"
    paper = ("LongT5: transient global tokens", "2112.07916")
    needed = ("attention_window", "attention_block_size")
    learned = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check that the pattern belongs to the encoder of T5.

        Raises:
            ValueError: if it does not.
        """
        if not (prefix and config.makes_summaries):
            raise ValueError(
                f'`{prefix}attention_pattern="transient_global"` is of the encoder of T5; got model_type '
                f"{config.model_type!r}."
            )

    @classmethod
    def reach(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> TransientGlobal:
        """Return the radius and the block size; see `AttentionPattern.reach`."""
        window = config.layer_value(f"{prefix}attention_window", layer)
        block = getattr(config, f"{prefix}attention_block_size")
        return TransientGlobal(MAX_SIZE if window is None else window // 2, block)
