"""Fields of settings classes, and the checks that all settings share. `commands.training` makes a flag of each field.

This module imports neither torch nor transformers, because `--help` is printed from it.
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

# What a number must be: the words of the message after "must be", and the test.
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

# A resumed run must share a setting always, or if the run keeps the weights of its best evaluation.
ALWAYS, WITH_BEST_WEIGHTS = "always", "with best weights"


def option(
    help: str, default: Any = MISSING, *, range: Range | None = None, resume: str | None = None, **flag: Any
) -> Any:
    """Make a field of a settings class.

    Args:
        help: the text of `--help`.
        default: the value if the setting is not given. A setting without a default is required.
        range: the rule for a number.
        resume: `ALWAYS` or `WITH_BEST_WEIGHTS`, if a resumed run must share the value.
        **flag: further keywords of argparse's `add_argument`, such as `choices`, `metavar`, `type` and `nargs`. The
            field's type decides about `type`, `nargs` and `action` if they are not given.
    """
    metadata = {"help": help, "range": range, "resume": resume, **flag}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_json_flag(text: str) -> Any:
    """Return the value of a flag's JSON.

    Raises:
        ArgumentTypeError: if the text is not JSON, or an object has a name twice.
    """
    try:
        value = parse_rows(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if (twice := repeated_name(value)) is not None:
        raise argparse.ArgumentTypeError(f"{twice!r} stands twice in {text}")
    return value


class _OptionChange(NamedTuple):
    default: Any
    owner: "type[Settings] | None"
    metadata: dict[str, Any]


def redefault(default: Any = MISSING, *, owner: "type[Settings] | None" = None, **changed: Any) -> Any:
    """Change a field of a settings class in a class that inherits from it.

    Args:
        default: the new default, if it is another one.
        owner: a class to take the field from, if the settings class does not inherit it.
        **changed: other arguments of `option`.
    """
    return _OptionChange(default, owner, changed)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base class of all groups of settings."""

    title: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        for name, change in vars(cls).copy().items():
            if isinstance(change, _OptionChange):
                bases: Any = [change.owner] if change.owner else cls.__mro__[1:]
                owner = next(each for each in bases if name in inspect.get_annotations(each))
                old = owner.__dataclass_fields__[name]
                default = old.default if change.default is MISSING else change.default
                setattr(cls, name, field(default=default, metadata={**old.metadata, **change.metadata}))

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            value = _convert_type(each.name, getattr(self, each.name), types[each.name])
            object.__setattr__(self, each.name, value)  # as a command line would have given it
            if value is not None:
                _check_value(each.name, value, **each.metadata)
        self.check()

    def check(self) -> None:
        """Check the settings against each other; each group adds its own rules.

        Raises:
            ValueError: if a rule is broken; the message holds the flag, the rule and the value.
        """

    def values(self) -> dict[str, Any]:
        """Return a dictionary of all settings."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def resume_values(self, with_best_weights: bool) -> dict[str, Any]:
        """Return, as JSON holds them, the settings that a resumed run must share."""
        kinds = {ALWAYS, WITH_BEST_WEIGHTS} if with_best_weights else {ALWAYS}
        shared = [each.name for each in dataclasses.fields(self) if each.metadata.get("resume") in kinds]
        return {name: json.loads(json.dumps(getattr(self, name))) for name in shared}


def get_field_types(annotation: Any) -> list[Any]:
    """Return the types that a field may have, except None."""
    types = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)
    return [each for each in types if each is not NoneType]


def _check_value(
    name: str, value: Any, range: Range | None = None, choices: Sequence[str] | None = None, **others: Any
) -> None:
    if range is not None and not range[1](value):
        raise ValueError(f"--{name} must be {range[0]}, got {value}")
    for chosen in value if isinstance(value, tuple) else (value,):
        if choices is not None and chosen not in choices:
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {chosen!r}")


def _convert_type(name: str, value: Any, annotation: Any) -> Any:
    """Return a value in the type of its field: a path as text, a list as a tuple, numpy's numbers as Python's.

    Raises:
        ValueError: if the value has another type.
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
    raise ValueError(f"--{name} must be {' or '.join(TYPE_NAMES[kind] for kind in kinds)}, got {value!r}")


def group_fields(settings: type[Settings]) -> Iterator[tuple[str, list[dataclasses.Field]]]:
    """Yield each group's title and its fields, those of the settings class itself first.

    A field belongs to the last class in the order of inheritance that declares it, which is the most general one.
    """
    fields = {each.name: each for each in dataclasses.fields(settings)}
    classes = [each for each in settings.__mro__ if issubclass(each, Settings)]
    owners = {name: each for each in classes for name in inspect.get_annotations(each)}
    groups: dict[str, list[dataclasses.Field]] = {}
    for each in classes:
        for name in inspect.get_annotations(each):
            if owners[name] is each and name in fields:
                groups.setdefault(each.title, []).append(fields[name])
    yield from groups.items()


def check_metric(name: str | None, known: Sequence[str]) -> None:
    """Raise ValueError if `--metric_for_best_model` is given and is not one of the dev metrics."""
    if name is not None and name.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {name!r}: there are {', '.join(known)}")
