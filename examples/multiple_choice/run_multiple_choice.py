"""Fine-tune and evaluate a model on multiple-choice questions (RACE, SWAG, or your own tables)."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from attn_variants import run  # the package is imported later, so that `--help` does not wait for torch


def parse_args(argv: Sequence[str] | None = None) -> Any:
    """Parse `argv`, or the process arguments if it is None, into `MultipleChoiceSettings`."""
    return _make_command().parse_args(argv)


def main(settings: Any) -> dict[str, Any]:
    """Train, evaluate and predict, and return the results."""
    return _make_command().main(settings)


def _make_command() -> Any:
    from choice_settings import MultipleChoiceSettings

    from hf_attn_variants.commands.training import TrainingCommand

    script, epilog = (
        "examples/multiple_choice/run_multiple_choice.py",
        "See README.md in the folder of this script for examples.",
    )
    return TrainingCommand(MultipleChoiceSettings, _train, script, str(__doc__), epilog)


def _train(settings: Any) -> dict[str, Any]:
    from choice_task import MultipleChoiceFineTuning

    from hf_attn_variants.training import fine_tune

    return fine_tune(MultipleChoiceFineTuning, settings)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run(sys.modules[__name__]))
