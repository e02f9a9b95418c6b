"""The parts that the training commands share: flags made from settings, the training, and the push to the Hub."""

import dataclasses
import importlib
import inspect
import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..training.engine.options import get_field_types, group_fields
from ..training.engine.settings import NewModelSettings, TrainingSettings

__all__ = ["parse_settings", "settings_parser", "train_and_push", "training_command"]

Parsed = TypeVar("Parsed", bound=TrainingSettings)


def settings_parser(settings: type[TrainingSettings], script: str, description: str, epilog: str) -> ArgumentParser:
    """Return the parser of a settings class: a flag for each field, a group of flags for each class.

    Args:
        settings: the class whose fields become flags.
        script: the file in scripts/ that does the same, for `--help`.
        description, epilog: the texts of `--help` above and below the flags.
    """
    parser = CommandParser(prog=program_name(script), description=description, epilog=epilog)
    types = get_type_hints(settings)
    for title, fields in group_fields(settings):
        group = parser.add_argument_group(title)
        for each in fields:
            if each.name == "model_name_or_path":
                add_checkpoint_argument(group, each.metadata["help"])
            else:
                group.add_argument(f"--{each.name}", **_flag(each, types[each.name]))
    return parser


def parse_settings(
    settings: type[Parsed], argv: Sequence[str] | None, script: str, description: str, epilog: str
) -> Parsed:
    """Read a command line (None = that of the process) as settings; other arguments as for `settings_parser`.

    A flag that is unknown, or has no value or a value of another type, ends the process with a line and status 2.

    Raises:
        ValueError: if a value is outside its range, or the settings do not go together.
    """
    parser = settings_parser(settings, script, description, epilog)
    needs_checkpoint = not issubclass(settings, NewModelSettings)
    return settings(**vars(parse_with_checkpoint(parser, argv, required=needs_checkpoint)))


def training_command(
    settings: type[TrainingSettings], trains: str, script: str, description: str, epilog: str
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Make the `make_parser()`, the `parse_args(argv)` and the `main(settings)` of a training command.

    Args:
        trains: "module:name" below `training`, imported when the training starts: a `FineTuningTask`, or a function of
            the settings.
        settings, script, description, epilog: those of `settings_parser`.
    """

    def make_parser() -> ArgumentParser:
        """Return the parser of the command line."""
        return settings_parser(settings, script, description, epilog)

    def parse_args(argv: Sequence[str] | None = None) -> TrainingSettings:
        """Read the command line (`sys.argv` without an argument) as `parse_settings` does."""
        return parse_settings(settings, argv, script, description, epilog)

    def main(settings: Any) -> dict[str, Any]:
        """Train, score, save and, with `push_to_hub`, push; return and raise what the training does."""
        from ..training.engine.finetune import fine_tune

        module, name = trains.split(":")
        found: Any = getattr(importlib.import_module(f"..training.{module}", __package__), name)
        is_task = inspect.isclass(found)
        return train_and_push(settings, lambda: fine_tune(found, settings) if is_task else found(settings))

    return make_parser, parse_args, main


def train_and_push(settings: TrainingSettings, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train and, with `push_to_hub`, push the result; return what `train` returns.

    The main process pushes at the very end, so that a push that fails loses nothing. The other processes do not wait
    for it, because NCCL would not let them wait long.

    Raises:
        ValueError, OSError: as `train` does, or if the Hub refuses the model.
    """
    if not settings.push_to_hub:
        return train()
    from ..hub import push

    place = settings.output_dir, settings.hub_model_id, settings.hub_private_repo, settings.hub_token
    push.check_hub_access(*place)
    results = train()
    if os.environ.get("RANK", "0") == "0":
        print(f"pushed to {push.push_trained(*place)}")
    return results


def _flag(each: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field."""
    flag = {name: value for name, value in each.metadata.items() if name not in ("range", "resume")}
    if each.default_factory is not dataclasses.MISSING:
        flag["default"] = each.default_factory()
    elif each.default is not dataclasses.MISSING:
        flag["default"] = each.default
    else:
        flag["required"] = True
    kind = get_field_types(annotation)[0]
    if kind is bool:
        return {"action": "store_true", **flag}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "type": get_args(kind)[0], **flag}
    return {"type": kind, **flag}
