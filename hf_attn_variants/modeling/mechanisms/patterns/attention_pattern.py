"""What every pattern is: one class in one file, with its paper, its fields, its checks and which keys a query reads.

`pattern_table` has those there are. Letters as in `softmax_attention`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..mechanism import Mechanism

__all__ = ["AttentionPattern"]


class AttentionPattern(Mechanism, ABC):
    """A pattern; nothing is made of its class, whose methods read a configuration.

    Class attributes:
        needed, optional: the fields without their prefix that it must have, and that it may have.
        learned: whether it has parameters, which no conversion makes.
        counts_tokens: whether a token's place in the text counts, and not distances alone.
    """

    field = "attention_pattern"
    needed: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    learned: ClassVar[bool] = False
    counts_tokens: ClassVar[bool] = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check what this pattern alone asks of a configuration, beside its fields.

        Args:
            config: a variant configuration.
            prefix: of the fields of the stack that has it.

        Raises:
            ValueError: for a stack or a host that it is not for, or sizes that do not fit.
        """

    @classmethod
    @abstractmethod
    def reach(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> Any:
        """Return which keys the queries of one attention read: a `Reach`, or what answers as one; None: all.

        Args:
            config: a variant configuration.
            prefix: of the fields of the attention's stack.
            heads: of its softmax.
            layer: its layer in the stack.
            is_causal: whether a query reads no later key.
        """
