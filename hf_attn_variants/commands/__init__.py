"""The `attn-variants` subcommands. Each has its own module, except for the training commands, which share a module."""

import importlib
from typing import Any

__all__ = ["TRAINING_COMMANDS", "load_command"]

TRAINING_COMMANDS = ("uptrain", "pretrain", "pretrain-t5", "classify", "glue", "squad", "seq2seq", "ner")


def load_command(name: str) -> Any:
    """Import a command, and return its module or `TrainingCommand`, which has `parse_args(argv)` and `main(args)`."""
    attribute = name.replace("-", "_")
    if name in TRAINING_COMMANDS:
        return getattr(importlib.import_module(".training", __name__), attribute)
    return importlib.import_module(f".{attribute}", __name__)
