"""One module per subcommand of `attn-variants`, and one for all trainings."""

import importlib
from typing import Any

__all__ = ["TRAINING_COMMANDS", "load_command"]

TRAINING_COMMANDS = ("uptrain", "pretrain", "pretrain-t5", "classify", "glue", "squad", "seq2seq", "ner")


def load_command(name: str) -> Any:
    """Return the module of a command, or the `TrainingCommand`. Both have `parse_args(argv)` and `main(args)`."""
    attribute = name.replace("-", "_")
    if name in TRAINING_COMMANDS:
        return getattr(importlib.import_module(".training", __name__), attribute)
    return importlib.import_module(f".{attribute}", __name__)
