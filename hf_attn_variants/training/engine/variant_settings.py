"""The flags of a new model's attention: one for each field in the table of the fields."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ...modeling.fields.field_table import FIELDS, Field
from .options import ALWAYS, Settings, option, parse_json

__all__ = ["FROM_SCRATCH", "EncoderDecoderVariantSettings", "VariantSettings", "given_variant"]

FROM_SCRATCH = "from scratch (without --model_name_or_path)"
# The type of a setting for the kind of its field. A setting that is not given is None.
TYPES: dict[type, Any] = {list: tuple[str, ...] | None, dict: dict[str, Any] | None}
Class = TypeVar("Class", bound=Settings)


def _with_fields(prefixes: tuple[str, ...]) -> Callable[[type[Class]], type[Class]]:
    """Give a settings class an option for each field of the table that has one of the prefixes."""

    def add_fields(settings: type[Class]) -> type[Class]:
        found = [(prefix, row) for row in FIELDS for prefix in prefixes if prefix in row.prefixes]
        types = {prefix + row.name: TYPES.get(row.kind, row.kind | None) for prefix, row in found}
        settings.__annotations__ = {**settings.__annotations__, **types}
        for prefix, row in found:
            setattr(settings, prefix + row.name, _flag(prefix, row))
        return dataclass(frozen=True, kw_only=True)(settings)

    return add_fields


def _flag(prefix: str, row: Field) -> Any:
    """Return the option of a field. Its default is None, because the configuration has the field's own default."""
    text = row.described(prefix)
    if "_" not in text.split(":")[0]:  # the name of a pattern stays unchanged
        text = f"{text[0].upper()}{text[1:]}"
    default = row.default_of(prefix)
    shown = "" if default in (None, (), False) else f" (default: {default})"
    flag: dict[str, Any] = {"choices": row.choices_of(prefix)} if row.choices_of(prefix) else {}
    if row.kind is dict:
        flag |= {"metavar": "JSON", "type": parse_json}
    if row.kind is list and prefix and row.inherits:
        flag |= {"nargs": "*"}
    return option(f"{text}{shown}.", None, resume=ALWAYS, **flag)


def given_variant(settings: Any) -> dict[str, Any]:
    """Return the fields of the table that the settings give, as a dictionary."""
    values = {name: getattr(settings, name, None) for row in FIELDS for name in row.names}
    return {name: value for name, value in values.items() if value is not None}


@_with_fields(("",))
class VariantSettings(Settings):
    """The fields of every new model."""

    title: ClassVar[str] = FROM_SCRATCH


@_with_fields(("encoder_", "cross_"))
class EncoderDecoderVariantSettings(Settings):
    """The fields of an encoder-decoder's encoder and cross-attention."""

    title: ClassVar[str] = FROM_SCRATCH
