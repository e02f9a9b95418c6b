"""Fine-tune and evaluate a model on questions with choices: RACE, SWAG, or your own tables."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from attn_variants import run  # the package is imported later, so that `--help` does not wait for torch


def parse_args(argv: Sequence[str] | None = None) -> Any:
    """Parse the command line, or `argv`, as `MultipleChoiceSettings`."""
    from choice_settings import MultipleChoiceSettings

    from hf_attn_variants.commands.training import parse_settings

    script = "examples/multiple_choice/run_multiple_choice.py"
    return parse_settings(
        MultipleChoiceSettings, argv, script, str(__doc__), "See README.md in the folder of this script for examples."
    )


def main(settings: Any) -> dict[str, Any]:
    """Train, evaluate and predict. Return the results."""
    from choice_task import MultipleChoiceFineTuning

    from hf_attn_variants.commands.training import train_and_push
    from hf_attn_variants.training import fine_tune

    return train_and_push(settings, lambda: fine_tune(MultipleChoiceFineTuning, settings))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run(sys.modules[__name__]))
