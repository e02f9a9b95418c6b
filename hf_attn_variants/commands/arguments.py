"""From a settings class of `training` to a command line, and back: a flag a field, a group of flags a class."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from ..command_line import CommandParser, OnOrOff, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..training.engine.options import Settings, alternatives, fields_by_group
from ..training.engine.settings import NewModelSettings
from .hf_names import check_names

__all__ = ["parse_settings", "settings_parser"]

Parsed = TypeVar("Parsed", bound=Settings)


def parse_settings(
    settings: type[Parsed], argv: Sequence[str] | None, script: str, description: str, epilog: str
) -> Parsed:
    """Read a command line as settings.

    Args:
        settings: their class.
        argv: the command line; None = that of the process.
        script: the file in scripts/ that does the same, for `--help`.
        description, epilog: what `--help` says above and below the flags.

    Returns:
        The settings. A flag that is unknown, lacks its value or has one of another type ends the process with a line
        and status 2, as argparse does; one of HF's scripts with what it is called here.

    Raises:
        ValueError: if a value is outside its range, or the settings do not go together.
    """
    parser = settings_parser(settings, script, description, epilog)
    check_names(parser, argv)
    given = parse_with_checkpoint(parser, argv, required=not issubclass(settings, NewModelSettings))
    return settings(**vars(given))


def settings_parser(settings: type[Settings], script: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of a settings class, which has a flag for each field; arguments as of `parse_settings`."""
    parser = CommandParser(prog=program_name(script), description=description, epilog=epilog)
    types_of = typing.get_type_hints(settings)
    for title, fields in fields_by_group(settings):
        group = parser.add_argument_group(title)
        for each in fields:
            if each.name == "model_name_or_path":
                add_checkpoint_argument(group, each.metadata["help"])
            else:
                group.add_argument(f"--{each.name}", **_argument(each, types_of[each.name]))
    return parser


def _argument(each: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    """Return what argparse is told of a field."""
    shown = {"help": each.metadata["help"]}
    if each.metadata["on_or_off"]:  # what it is without either, the settings say
        return {**shown, "action": OnOrOff, "default": None}
    if annotation is bool:
        return {**shown, "action": "store_true"}
    if each.default_factory is not dataclasses.MISSING:
        shown["default"] = each.default_factory()
    elif each.default is not dataclasses.MISSING:
        shown["default"] = each.default
    else:
        shown["required"] = True
    kinds = [kind for kind in alternatives(annotation) if kind is not types.NoneType]
    if kinds == [bool]:  # may be left to what is there
        return {**shown, "action": "store_true"}
    if typing.get_origin(kinds[0]) is tuple:
        shown["nargs"] = "*" if each.metadata["may_be_empty"] else "+"
        kinds = list(typing.get_args(kinds[0]))
    shown["type"] = each.metadata["parse"] or kinds[0]
    return shown | {name: each.metadata[name] for name in ("choices", "metavar") if each.metadata[name] is not None}
