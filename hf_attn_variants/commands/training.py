"""Functions that the training commands share: making flags from settings, training, and pushing to the Hub."""

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
    """Return the parser for a settings class, with one flag per field and one argument group per class.

    Args:
        settings: the class whose fields become flags.
        script: the name of the equivalent file in scripts/, which `--help` shows.
        description: the text above the flags in `--help`.
        epilog: the text below the flags in `--help`.
    """
    parser = CommandParser(prog=program_name(script), description=description, epilog=epilog)
    types = get_type_hints(settings)
    for title, fields in group_fields(settings):
        group = parser.add_argument_group(title)
        for setting in fields:
            if setting.name == "model_name_or_path":
                add_checkpoint_argument(group, setting.metadata["help"])
            else:
                group.add_argument(f"--{setting.name}", **_make_flag_options(setting, types[setting.name]))
    return parser


def parse_settings(
    settings: type[Parsed], argv: Sequence[str] | None, script: str, description: str, epilog: str
) -> Parsed:
    """Parse a command line and return the settings.

    The process exits with status 2 if a flag is unknown, or has no value or a value of a wrong type.

    Args:
        settings: the class of the settings.
        argv: the command line. None means the command line of the process.
        script: the name of the equivalent file in scripts/, which `--help` shows.
        description: the text above the flags in `--help`.
        epilog: the text below the flags in `--help`.

    Raises:
        ValueError: if a value is outside of its range, or settings cannot be combined.
    """
    parser = settings_parser(settings, script, description, epilog)
    needs_checkpoint = not issubclass(settings, NewModelSettings)
    return settings(**vars(parse_with_checkpoint(parser, argv, required=needs_checkpoint)))


def training_command(
    settings: type[TrainingSettings], trains: str, script: str, description: str, epilog: str
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the functions `make_parser()`, `parse_args(argv)` and `main(settings)` of a training command.

    Args:
        settings: the class of the settings.
        trains: "module:name" below the package `training`. The name is a `FineTuningTask` or a function of the
            settings. It is imported when the training starts.
        script: the name of the equivalent file in scripts/, which `--help` shows.
        description: the text above the flags in `--help`.
        epilog: the text below the flags in `--help`.
    """

    def make_parser() -> ArgumentParser:
        """Return the parser of the command."""
        return settings_parser(settings, script, description, epilog)

    def parse_args(argv: Sequence[str] | None = None) -> TrainingSettings:
        """Parse the arguments of the command as `parse_settings` does. None means `sys.argv`."""
        return parse_settings(settings, argv, script, description, epilog)

    def main(settings: Any) -> dict[str, Any]:
        """Train, evaluate and save the model, push it with `push_to_hub`, and return the results."""
        from ..training.engine.finetune import fine_tune

        module, name = trains.split(":")
        trainer: Any = getattr(importlib.import_module(f"..training.{module}", __package__), name)
        is_task = inspect.isclass(trainer)
        return train_and_push(settings, lambda: fine_tune(trainer, settings) if is_task else trainer(settings))

    return make_parser, parse_args, main


def train_and_push(settings: TrainingSettings, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train and return the results. With `push_to_hub`, also push the model.

    The main process pushes after everything else, so that nothing is lost if the push fails. The other processes do
    not wait for it, because NCCL limits the time of waiting.

    Args:
        settings: the settings of the training.
        train: a function that trains and returns the results.

    Raises:
        ValueError: if `train` raises it, or the repository is not valid.
        OSError: if `train` raises it, or the push fails.
    """
    if not settings.push_to_hub:
        return train()
    from ..hub import push

    destination = settings.output_dir, settings.hub_model_id, settings.hub_private_repo, settings.hub_token
    push.check_hub_access(*destination)
    results = train()
    if os.environ.get("RANK", "0") == "0":
        print(f"Pushed to {push.push_trained(*destination)}")
    return results


def _make_flag_options(setting: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a field."""
    flag = {name: value for name, value in setting.metadata.items() if name not in ("range", "resume")}
    if setting.default_factory is not dataclasses.MISSING:
        flag["default"] = setting.default_factory()
    elif setting.default is not dataclasses.MISSING:
        flag["default"] = setting.default
    else:
        flag["required"] = True
    kind = get_field_types(annotation)[0]
    if kind is bool:
        return {"action": "store_true", **flag}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "type": get_args(kind)[0], **flag}
    return {"type": kind, **flag}
