"""What the training commands share: settings from the command line, the training, and the push to the Hub."""

import importlib
import inspect
import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

from ..training.engine.settings import TrainingSettings
from .arguments import parse_settings, settings_parser

__all__ = ["train_and_push", "training_command"]


def training_command(
    settings: type[TrainingSettings], trains: str, script: str, description: str, epilog: str
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Make the `make_parser()`, the `parse_args(argv)` and the `main(settings)` of a training command.

    Args:
        settings: what its flags are made from.
        trains: "module:name" below `training`, imported when the training starts: a `FineTuningTask`, or a function of
            the settings.
        script, description, epilog: see `parse_settings`.
    """

    def make_parser() -> ArgumentParser:
        """Return the parser of the command line, for those who ask which flags there are."""
        return settings_parser(settings, script, description, epilog)

    def parse_args(argv: Sequence[str] | None = None) -> TrainingSettings:
        """Read the command line (`sys.argv` without an argument); errors as of `arguments.parse_settings`."""
        return parse_settings(settings, argv, script, description, epilog)

    def main(settings: TrainingSettings) -> dict[str, Any]:
        """Train, score, save and, where asked for, push; return and raise what the training does."""
        module, name = trains.split(":")
        found = getattr(importlib.import_module(f"..training.{module}", __package__), name)
        if not inspect.isclass(found):
            return train_and_push(settings, lambda: found(settings))
        from ..training.engine.finetune import fine_tune

        task: Any = found
        return train_and_push(settings, lambda: fine_tune(task, settings))

    return make_parser, parse_args, main


def train_and_push(settings: TrainingSettings, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train, and push the result where `push_to_hub` asks for it.

    The main process pushes, at the very end, so that a push that fails loses nothing; the others need not wait for it,
    and NCCL would not let them wait long.

    Returns:
        What `train` returns.

    Raises:
        ValueError, OSError: as `train` does, or if the Hub would not take the model, or did not.
    """
    if not settings.push_to_hub:
        return train()
    from ..hub import trained

    place = settings.output_dir, settings.hub_model_id, settings.hub_private_repo, settings.hub_token
    trained.check_hub_access(*place)
    results = train()
    if os.environ.get("RANK", "0") == "0":
        print(f"pushed to {trained.push_trained(*place)}")
    return results
