"""Fields of the settings classes and the checks that all settings share.

`commands.training` turns each field into a command-line flag. This module does not import torch or Transformers,
because `--help` uses it and should be fast.
"""

import argparse
import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from ...text_files import parse_rows, repeated_name

__all__ = [
    "ABOVE_0",
    "ALWAYS",
    "AT_LEAST_0",
    "AT_LEAST_1",
    "A_NUMBER",
    "BETWEEN_0_AND_1",
    "FROM_0_BELOW_1",
    "WITH_BEST_WEIGHTS",
    "Settings",
    "check_metric",
    "get_field_types",
    "group_fields",
    "option",
    "parse_json_flag",
    "redefault",
]

# The rule for a number: the words that follow "must be" in the error message, and the test.
Range = tuple[str, Callable[[float], bool]]
AT_LEAST_1: Range = ("at least 1", lambda value: value >= 1)
AT_LEAST_0: Range = ("at least 0", lambda value: 0 <= value < math.inf)
ABOVE_0: Range = ("more than 0", lambda value: 0 < value < math.inf)
FROM_0_BELOW_1: Range = ("in [0, 1)", lambda value: 0 <= value < 1)
BETWEEN_0_AND_1: Range = ("in (0, 1)", lambda value: 0 < value < 1)
A_NUMBER: Range = ("a number", math.isfinite)

# The names of the types in messages.
TYPE_NAMES = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    tuple: "several",
    dict: "a dictionary",
}

# When a resumed run must have the same value as before: always, or only if the run keeps its best weights.
ALWAYS, WITH_BEST_WEIGHTS = "always", "with best weights"


def option(
    help: str, default: Any = MISSING, *, range: Range | None = None, resume: str | None = None, **flag: Any
) -> Any:
    """Define a field of a settings class.

    Args:
        help: The text for `--help`.
        default: The value that is used if the setting is not given. A setting without a default is required.
        range: The rule for a number.
        resume: `ALWAYS` or `WITH_BEST_WEIGHTS` if a resumed run must have the same value.
        **flag: Further arguments of argparse's `add_argument`, such as `choices`, `metavar`, `type` and `nargs`. If
            `type`, `nargs` and `action` are not given, they follow from the type of the field.

    Example:
        ```python
        @dataclass(frozen=True, kw_only=True)
        class BatchSettings(Settings):
            batch_size: int = option("Examples per batch.", 32, range=AT_LEAST_1)
        ```
    """
    metadata = {"help": help, "range": range, "resume": resume, **flag}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_json_flag(text: str) -> Any:
    """Parse the JSON value of a flag.

    Raises:
        ArgumentTypeError: If the text is not JSON, or if an object contains a name twice.
    """
    try:
        value = parse_rows(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"The value must be JSON: {error}") from None
    if (duplicate := repeated_name(value)) is not None:
        raise argparse.ArgumentTypeError(f"The name {duplicate!r} must occur only once, got {text}.")
    return value


class _OptionChange(NamedTuple):
    default: Any
    owner: "type[Settings] | None"
    metadata: dict[str, Any]


def redefault(default: Any = MISSING, *, owner: "type[Settings] | None" = None, **changed: Any) -> Any:
    """Change a field of a settings class in a class that inherits from it.

    Args:
        default: The new default. If it is not given, the default does not change.
        owner: The class from which the field is copied, if the settings class does not inherit it.
        **changed: Other arguments of `option` to replace.
    """
    return _OptionChange(default, owner, changed)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base class of all groups of settings. Its fields are checked when an object is created."""

    title: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        for name, change in vars(cls).copy().items():
            if isinstance(change, _OptionChange):
                bases: Any = [change.owner] if change.owner else cls.__mro__[1:]
                owner = next(base for base in bases if name in inspect.get_annotations(base))
                old = owner.__dataclass_fields__[name]
                default = old.default if change.default is MISSING else change.default
                setattr(cls, name, field(default=default, metadata={**old.metadata, **change.metadata}))

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = _convert_type(item.name, getattr(self, item.name), types[item.name])
            object.__setattr__(self, item.name, value)  # the type that a command line would have given
            if value is not None:
                _check_value(item.name, value, **item.metadata)
        self.check()

    def check(self) -> None:
        """Check the settings against each other. Each group of settings adds its own rules.

        Raises:
            ValueError: If a rule is broken. The message contains the flag, the rule and the value.
        """

    def values(self) -> dict[str, Any]:
        """Return all settings as a dictionary."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    def resume_values(self, with_best_weights: bool) -> dict[str, Any]:
        """Return the settings that must not change when a run resumes, as JSON values.

        Args:
            with_best_weights: Whether the run keeps its best weights.
        """
        kinds = {ALWAYS, WITH_BEST_WEIGHTS} if with_best_weights else {ALWAYS}
        shared = [item.name for item in dataclasses.fields(self) if item.metadata.get("resume") in kinds]
        return {name: json.loads(json.dumps(getattr(self, name))) for name in shared}


def get_field_types(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, except None."""
    types = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)
    return [kind for kind in types if kind is not NoneType]


def _check_value(
    name: str, value: Any, range: Range | None = None, choices: Sequence[str] | None = None, **others: Any
) -> None:
    """Check a value against the range and the choices of its field."""
    if range is not None and not range[1](value):
        raise ValueError(f"--{name} must be {range[0]}, got {value}.")
    for item in value if isinstance(value, tuple) else (value,):
        if choices is not None and item not in choices:
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {item!r}.")


def _convert_type(name: str, value: Any, annotation: Any) -> Any:
    """Convert a value to the type of its field: paths to text, lists to tuples, and NumPy numbers to Python numbers.

    Raises:
        ValueError: If the value has another type.
    """
    kinds = [get_origin(kind) or kind for kind in get_field_types(annotation)]
    if type(value) in kinds or (value is None and NoneType in get_args(annotation)):
        return value
    if tuple in kinds and isinstance(value, list | str):
        return (value,) if isinstance(value, str) else tuple(value)
    if str in kinds and isinstance(value, str | PathLike):
        return str(fspath(value))
    if int in kinds and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if float in kinds and isinstance(value, Real) and not isinstance(value, bool):
        return value if isinstance(value, int) else float(value)
    raise ValueError(f"--{name} must be {' or '.join(TYPE_NAMES[kind] for kind in kinds)}, got {value!r}.")


def group_fields(settings: type[Settings]) -> Iterator[tuple[str, list[dataclasses.Field]]]:
    """Yield the title and the fields of each group. The group of the settings class itself comes first.

    A field belongs to the most general class that declares it, which is the last one in the order of inheritance.
    """
    fields = {item.name: item for item in dataclasses.fields(settings)}
    classes = [base for base in settings.__mro__ if issubclass(base, Settings)]
    owners = {name: base for base in classes for name in inspect.get_annotations(base)}
    groups: dict[str, list[dataclasses.Field]] = {}
    for base in classes:
        for name in inspect.get_annotations(base):
            if owners[name] is base and name in fields:
                groups.setdefault(base.title, []).append(fields[name])
    yield from groups.items()


def check_metric(name: str | None, known: Sequence[str]) -> None:
    """Check that `--metric_for_best_model`, if it is given, is one of the dev metrics.

    Args:
        name: The metric, with or without the prefix "eval_".
        known: The dev metrics, without the prefix.

    Raises:
        ValueError: If the metric is not one of them.
    """
    if name is not None and name.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model must be one of {', '.join(known)}, got {name!r}.")
