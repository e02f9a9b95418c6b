"""The base class of attention patterns.

Each pattern is a class that names its paper, defines its fields and checks, and selects the keys of each query.
`pattern_table` lists the patterns. The symbols are defined in `softmax_attention`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..mechanism import Mechanism

__all__ = ["AttentionPattern"]


class AttentionPattern(Mechanism, ABC):
    """An attention pattern. This class is not instantiated, and its methods read a configuration.

    Class attributes:
        needed, optional: the required and the optional fields, without a prefix.
        learned: True if the pattern has parameters, which are not created by conversion.
        depends_on_positions: True if the pattern depends on token positions, and not only on distances.
    """

    field = "attention_pattern"
    needed: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    learned: ClassVar[bool] = False
    depends_on_positions: ClassVar[bool] = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check that a configuration meets the requirements of this pattern, except those for individual fields.

        Args:
            config: a variant configuration.
            prefix: the prefix of the fields for the encoder or decoder with the pattern.

        Raises:
            ValueError: if the architecture or the place does not support the pattern, or if sizes are incompatible.
        """

    @classmethod
    @abstractmethod
    def get_key_range(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> Any:
        """Return the key range of one attention module: a `KeyRange`, a similar object, or None for all keys.

        Args:
            config: a variant configuration.
            prefix: the prefix of the fields for the encoder or decoder with this attention module.
            heads: the number of softmax heads.
            layer: the index of the layer in the encoder or decoder.
            is_causal: True if queries do not attend to later keys.
        """
