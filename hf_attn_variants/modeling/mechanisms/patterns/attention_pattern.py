"""Base class of the attention patterns.

Each pattern is a class in its own file, with its paper, its fields, its checks and the keys that a query attends to.
`pattern_table` lists the patterns. The letters are those of `softmax_attention`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..mechanism import Mechanism

__all__ = ["AttentionPattern"]


class AttentionPattern(Mechanism, ABC):
    """An attention pattern. The class is not instantiated; its methods read a configuration.

    Class attributes:
        needed, optional: the required and the optional fields, without their prefix.
        learned: `True` if the pattern has parameters. A conversion does not create them.
        depends_on_positions: `True` if the position of a token in the text matters, and not only distances.
    """

    field = "attention_pattern"
    needed: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    learned: ClassVar[bool] = False
    depends_on_positions: ClassVar[bool] = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check the requirements of this pattern in a configuration, other than its fields.

        Args:
            config: a variant configuration.
            prefix: the prefix of the fields of the encoder or decoder with the pattern.

        Raises:
            ValueError: if the architecture or the place does not support the pattern, or if sizes do not fit.
        """

    @classmethod
    @abstractmethod
    def get_key_range(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> Any:
        """Return the key range of the queries of one attention: a `KeyRange`, a similar object, or None for all keys.

        Args:
            config: a variant configuration.
            prefix: the prefix of the fields of the attention's encoder or decoder.
            heads: the number of softmax heads.
            layer: the index of the layer in the encoder or decoder.
            is_causal: `True` if a query does not attend to later keys.
        """
