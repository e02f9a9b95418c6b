"""The parts that the training commands share: flags made from settings, the training, and the push to the Hub."""

import dataclasses
import importlib
import inspect
import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint, program_name
from ..training.engine.options import alternatives, fields_by_group
from ..training.engine.settings import NewModelSettings, TrainingSettings

__all__ = ["training_command"]


def training_command(
    settings: type[TrainingSettings], trains: str, script: str, description: str, epilog: str
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Make the `make_parser()`, the `parse_args(argv)` and the `main(settings)` of a training command.

    Args:
        settings: the class whose fields become flags.
        trains: "module:name" below `training`, imported when the training starts: a `FineTuningTask`, or a function of
            the settings.
        script: the file in scripts/ that does the same, for `--help`.
        description, epilog: the texts of `--help` above and below the flags.
    """

    def make_parser() -> ArgumentParser:
        """Return the parser of the command line."""
        parser = CommandParser(prog=program_name(script), description=description, epilog=epilog)
        types = get_type_hints(settings)
        for title, fields in fields_by_group(settings):
            group = parser.add_argument_group(title)
            for each in fields:
                if each.name == "model_name_or_path":
                    add_checkpoint_argument(group, each.metadata["help"])
                else:
                    group.add_argument(f"--{each.name}", **_flag(each, types[each.name]))
        return parser

    def parse_args(argv: Sequence[str] | None = None) -> TrainingSettings:
        """Read the command line (`sys.argv` without an argument) as settings.

        A flag that is unknown, or has no value or a value of another type, ends the process with a line and status 2.

        Raises:
            ValueError: if a value is outside its range, or the settings do not go together.
        """
        needs_checkpoint = not issubclass(settings, NewModelSettings)
        return settings(**vars(parse_with_checkpoint(make_parser(), argv, required=needs_checkpoint)))

    def main(settings: Any) -> dict[str, Any]:
        """Train, score, save and, with `push_to_hub`, push; return and raise what the training does.

        The main process pushes at the very end, so that a push that fails loses nothing. The other processes do not
        wait for it, because NCCL would not let them wait long.
        """
        from ..training.engine.finetune import fine_tune

        module, name = trains.split(":")
        found: Any = getattr(importlib.import_module(f"..training.{module}", __package__), name)
        is_task = inspect.isclass(found)
        train = (lambda: fine_tune(found, settings)) if is_task else lambda: found(settings)
        if not settings.push_to_hub:
            return train()
        from ..hub import trained

        place = settings.output_dir, settings.hub_model_id, settings.hub_private_repo, settings.hub_token
        trained.check_hub_access(*place)
        results = train()
        if os.environ.get("RANK", "0") == "0":
            print(f"pushed to {trained.push_trained(*place)}")
        return results

    return make_parser, parse_args, main


def _flag(each: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field."""
    flag = {name: value for name, value in each.metadata.items() if name not in ("range", "resume")}
    if each.default_factory is not dataclasses.MISSING:
        flag["default"] = each.default_factory()
    elif each.default is not dataclasses.MISSING:
        flag["default"] = each.default
    else:
        flag["required"] = True
    kind = alternatives(annotation)[0]
    if kind is bool:
        return {"action": "store_true", **flag, **({"default": False} if annotation is bool else {})}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "type": get_args(kind)[0], **flag}
    return {"type": kind, **flag}
