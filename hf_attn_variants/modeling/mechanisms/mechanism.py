"""The base class of attention mechanisms, which have a name, a paper and a configuration field."""

from typing import Any, ClassVar, TypeVar

__all__ = ["NONE", "PREFIXES", "Mechanism", "get_registered_class", "register_mechanism"]

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


MechanismClass = TypeVar("MechanismClass", bound=type[Mechanism])
# The mechanisms that plugins have registered: {(field, name): class}.
_REGISTERED: dict[tuple[str, str], Any] = {}


def register_mechanism(mechanism: MechanismClass, names: list[str]) -> MechanismClass:
    """Register a mechanism that is defined outside of this package, and return it.

    Args:
        mechanism: a class whose name is a new value of its field.
        names: the values of the field, to which the name is added.

    Raises:
        ValueError: if the field already has this value, or if the class is not in a file of its own, because this file
            ships with saved models.
    """
    field, name = mechanism.field, mechanism.name
    if mechanism.__module__ == "__main__":
        raise ValueError(
            f"`{mechanism.__name__}` must be defined in a module, because the file of the module ships with saved "
            "models. Move the class to a Python file of its own and import this file."
        )
    earlier = _REGISTERED.get((field, name))
    is_reloaded = earlier is not None and earlier.__module__ == mechanism.__module__
    if name in names and not is_reloaded:
        raise ValueError(
            f"The `name` of {mechanism.__name__} must differ from the existing values of `{field}` "
            f"({', '.join(names)}), got {name!r}. Choose another name."
        )
    names += [] if is_reloaded else [name]
    _REGISTERED[field, name] = mechanism
    return mechanism


def get_registered_class(field: str, name: Any) -> Any:
    """Return the class that a plugin has registered for a value of a field, or None."""
    return _REGISTERED.get((field, name))
