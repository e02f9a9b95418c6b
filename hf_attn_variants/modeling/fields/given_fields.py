"""Names that are nearly those of fields, and how the fields of a configuration are stored and replaced."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..mechanisms.talking_heads import DYNAMIC, supports_cache
from .field_checks import nearest, without_prefix
from .field_table import OPTIONAL_FIELDS
from .kernel_fields import KernelFields
from .layer_values import without_layer_values

__all__ = ["stored_values", "without_replaced", "without_same_size", "wrong_name"]


def wrong_name(config_class: Any, name: str) -> str | None:
    """Return what is wrong with a name that is nearly that of a variant field.

    Transformers accepts every name, so that a misspelt field would change nothing without an error.

    Args:
        config_class: the configuration's.
        name: a keyword.

    Returns:
        A sentence with the name that is probably meant; None for a field, and for a name that is like none.
    """
    known = config_class.variant_fields()
    if hasattr(config_class, name) or {name, without_prefix(name)} & _upstream_names():
        return None
    # A field with the prefix of a place that this architecture does not have is nearly a field too.
    prefixed = {prefix + field: field for prefix in ("encoder_", "decoder_", "cross_") for field in known}
    meant = nearest(name, known) or prefixed.get(nearest(name, prefixed) or "")
    return None if meant is None else f"`{name}` is not a field of {config_class.__name__}. Did you mean `{meant}`?"


def _upstream_names() -> set[str]:
    """Return the names of all fields of the Transformers configurations of all architectures."""
    classes, names = [KernelFields], set()
    while classes:
        config_class = classes.pop()
        classes += config_class.__subclasses__()
        names |= {field.name for field in fields(config_class) if "variant" not in field.metadata}
        names |= {*getattr(config_class, "attribute_map", ())}
    return names


def stored_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without the optional fields that are not set."""
    return {name: value for name, value in values.items() if name not in OPTIONAL_FIELDS or value is not None}


def without_replaced(values: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without those that newly given fields replace."""
    values = without_layer_values(values, fields)
    # `use_cache=False` was stored because the old dynamic projections allow no cache. With other ones it is upstream's
    # default again.
    named = {*fields, *(fields.get("per_layer_values") or ())}
    if DYNAMIC not in named or supports_cache(values.get(DYNAMIC)):
        return values
    return {name: value for name, value in values.items() if name != "use_cache"}


def without_same_size(config_class: Any, values: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are given, without a `value_head_dim` that is the size of the heads anyway.

    Args:
        config_class: of the values.
        values: what a configuration says, upstream's or ours.
        given: fields on top of it.

    Raises:
        ValueError: for a size that no head can have.
    """
    if "value_head_dim" not in given:
        return given
    config = config_class.from_upstream(dict(values), value_head_dim=given["value_head_dim"])
    is_same = config.value_head_dim is None
    return {name: value for name, value in given.items() if not (is_same and name == "value_head_dim")}
