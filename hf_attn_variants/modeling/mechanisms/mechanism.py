"""What every mechanism is: a class with its name and its paper, which says where a configuration asks for it."""

from typing import Any, ClassVar

__all__ = ["NONE", "PREFIXES", "Mechanism"]

# What a field's name has before it: of self-attention (an encoder-decoder's decoder), its encoder, cross-attention.
PREFIXES = ("", "encoder_", "cross_")
# What a field says of a place that does not inherit it.
NONE = "none"


class Mechanism:
    """What a variant puts in the place of a part of attention.

    Class attributes:
        field: the configuration's field that asks for it, without a prefix.
        name: its value of the field; a base class, which stands for any value, has none.
        paper: title and arXiv id.
        inherits: whether a place without a value of its own has that of the field without a prefix.
    """

    field: ClassVar[str]
    name: ClassVar[str]
    paper: ClassVar[tuple[str, str]]
    inherits: ClassVar[bool] = False

    @classmethod
    def asked_for(cls, config: Any, prefix: str) -> tuple[str, Any] | None:
        """Return the field that gives it to the attentions of a place, and the field's value; None: nothing does.

        Args:
            config: any configuration.
            prefix: of the place, one of `PREFIXES`.
        """
        field = prefix + cls.field
        if not hasattr(config, field):
            return None
        if cls.inherits and getattr(config, field) is None:
            field = cls.field
        value = getattr(config, field)
        if value is None or value == NONE or value != getattr(cls, "name", value):
            return None
        return field, value
