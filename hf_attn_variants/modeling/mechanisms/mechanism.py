"""The base class of attention mechanisms, which have a name, a paper and a configuration field."""

from typing import Any, ClassVar

__all__ = ["NONE", "PREFIXES", "Mechanism"]

# The prefixes of field names, for self-attention (of the decoder in an encoder-decoder), encoder and cross-attention.
PREFIXES = ("", "encoder_", "cross_")
# The value of a per-place field that does not inherit the value of the field without a prefix.
NONE = "none"


class Mechanism:
    """The base class of mechanisms that replace a part of attention.

    Class attributes:
        field: the configuration field that requests the mechanism, without a prefix.
        name: the value of the field that selects the mechanism. Base classes accept any value and have no name.
        paper: the title and the arXiv identifier of the paper.
        inherits: True if a place without its own value uses the value of the field without a prefix.
    """

    field: ClassVar[str]
    name: ClassVar[str]
    paper: ClassVar[tuple[str, str]]
    inherits: ClassVar[bool] = False

    @classmethod
    def find_requesting_field(cls, config: Any, prefix: str) -> tuple[str, Any] | None:
        """Return the name and the value of the field that requests the mechanism at a place, or None if no field does.

        Args:
            config: any configuration.
            prefix: the prefix of the place, one of `PREFIXES`.
        """
        field = prefix + cls.field
        if not hasattr(config, field):
            return None
        if cls.inherits and getattr(config, field) is None:
            field = cls.field
        value = getattr(config, field)
        if value in (None, NONE, False) or value != getattr(cls, "name", value):
            return None
        return field, value
