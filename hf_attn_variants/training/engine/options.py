"""What settings classes are made of: fields that say their help, their range, and what a resumed run must share.

`commands.arguments` makes flags of them. Like `settings`, this file imports neither torch nor transformers.
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
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from ...table_files import parse_rows, repeated_name

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
    "alternatives",
    "check_metric",
    "fields_by_group",
    "option",
    "parse_json",
    "redefault",
]


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be.

    Attributes:
        said: what a message says after "must be".
        holds: whether a number is one of them.
    """

    said: str
    holds: Callable[[float], bool]


AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
AT_LEAST_0 = Range("at least 0", lambda value: 0 <= value < math.inf)
ABOVE_0 = Range("more than 0", lambda value: 0 < value < math.inf)
FROM_0_BELOW_1 = Range("in [0, 1)", lambda value: 0 <= value < 1)
BETWEEN_0_AND_1 = Range("in (0, 1)", lambda value: 0 < value < 1)
A_NUMBER = Range("a number", math.isfinite)

# What a message calls the types.
WORDS = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    tuple: "several",
    dict: "a dictionary",
}

# What a resumed run must share with the interrupted one: always, or where the best of its evaluations are kept.
ALWAYS, WITH_BEST_WEIGHTS = "always", "with best weights"


def option(
    help: str,
    default: Any = MISSING,
    *,
    range: Range | None = None,
    resume: str | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    may_be_empty: bool = False,
    on_or_off: bool = False,
) -> Any:
    """Make a field of a settings class.

    Args:
        help: what `--help` says.
        default: its value where it is not given; left out: it must be.
        range: what its number, where it has one, must be.
        resume: `ALWAYS` or `WITH_BEST_WEIGHTS`, where a resumed run must share it.
        choices: the values that there are.
        metavar: what stands for the value in `--help`.
        parse: from a flag's text to the value, where the field's type does not say it.
        may_be_empty: whether a flag of several values may have none.
        on_or_off: whether there is a flag for False, too; for a setting that is True, False or None.
    """
    metadata = {
        "help": help,
        "range": range,
        "resume": resume,
        "choices": choices,
        "metavar": metavar,
        "parse": parse,
        "may_be_empty": may_be_empty,
        "on_or_off": on_or_off,
    }
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_json(text: str) -> Any:
    """Return what a flag's JSON says.

    Raises:
        ArgumentTypeError: for text that is none, with what JSON says of it, and for a name that stands twice.
    """
    try:
        value = parse_rows(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if (twice := repeated_name(value)) is not None:
        raise argparse.ArgumentTypeError(f"{twice!r} stands twice in {text}")
    return value


def redefault(owner: type, name: str, default: Any = MISSING, **changed: Any) -> Any:
    """Make a field like `owner`'s of that name, with another default, or other metadata."""
    own = next(each for each in dataclasses.fields(owner) if each.name == name)
    return field(default=own.default if default is MISSING else default, metadata={**own.metadata, **changed})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all groups of settings have: their checks."""

    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            value = _as_type(each.name, getattr(self, each.name), types[each.name])
            object.__setattr__(self, each.name, value)  # as a command line would have given it
            self._check_field(each)
        self.check()

    def check(self) -> None:
        """Check the settings against each other; each group adds its own rules.

        Raises:
            ValueError: if a rule is broken; the message holds the flag, the rule and the value.
        """

    def values(self) -> dict[str, Any]:
        """Return every setting by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def resume_values(self, with_best_weights: bool) -> dict[str, Any]:
        """Return, as JSON holds them, the settings that a resumed run must share."""
        kinds = {ALWAYS, WITH_BEST_WEIGHTS} if with_best_weights else {ALWAYS}
        shared = [each.name for each in dataclasses.fields(self) if each.metadata.get("resume") in kinds]
        return {name: json.loads(json.dumps(getattr(self, name))) for name in shared}

    def _check_field(self, each: dataclasses.Field) -> None:
        value, allowed, choices = getattr(self, each.name), each.metadata.get("range"), each.metadata.get("choices")
        if value is None:
            return
        if allowed is not None and not allowed.holds(value):
            raise ValueError(f"--{each.name} must be {allowed.said}, got {value}")
        for chosen in value if isinstance(value, tuple) else (value,):
            if choices is not None and chosen not in choices:
                raise ValueError(f"--{each.name} must be one of {', '.join(choices)}, got {chosen!r}")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a field may have."""
    return get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)


def _as_type(name: str, value: Any, annotation: Any) -> Any:
    """Return a value as its field's type has it: a path as text, a list as a tuple, numpy's numbers as Python's.

    Raises:
        ValueError: if it is of another type.
    """
    kinds = [get_origin(kind) or kind for kind in alternatives(annotation)]
    if type(value) in kinds or (value is None and NoneType in kinds):
        return value
    if tuple in kinds and isinstance(value, list | str):
        return (value,) if isinstance(value, str) else tuple(value)
    if str in kinds and isinstance(value, str | PathLike):
        return str(fspath(value))
    if int in kinds and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if float in kinds and isinstance(value, Real) and not isinstance(value, bool):
        return value if isinstance(value, int) else float(value)
    wanted = [WORDS[kind] for kind in kinds if kind is not NoneType]
    raise ValueError(f"--{name} must be {' or '.join(wanted)}, got {value!r}")


def fields_by_group(settings: type[Settings]) -> Iterator[tuple[str, list[dataclasses.Field]]]:
    """Yield the groups of a settings class, a script's own first: the title, and the fields that no base class has."""
    groups: dict[str, list[dataclasses.Field]] = {}
    by_name = {each.name: each for each in dataclasses.fields(settings)}
    classes = [each for each in settings.__mro__ if issubclass(each, Settings)]
    for i, each in enumerate(classes):
        inherited = {name for base in classes[i + 1 :] for name in inspect.get_annotations(base)}
        own = [name for name in inspect.get_annotations(each) if name not in inherited and name in by_name]
        if own:
            groups.setdefault(each.title, []).extend(by_name[name] for name in own)
    yield from groups.items()


def check_metric(name: str | None, known: Sequence[str]) -> None:
    """Raise ValueError unless `--metric_for_best_model` is not given or one of the dev metrics there are."""
    if name is not None and name.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {name!r}: there are {', '.join(known)}")
