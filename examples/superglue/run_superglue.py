"""Fine-tune and evaluate a model on a SuperGLUE task."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_variants import run  # the package is imported later, so that `--help` does not wait for torch

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "multiple_choice")
)  # used for COPA and for encoder-decoder models


def parse_args(argv: Sequence[str] | None = None) -> Any:
    """Parse `argv`, or the process arguments if it is None, into `SuperGlueSettings`."""
    return _make_command().parse_args(argv)


def main(settings: Any) -> dict[str, Any]:
    """Train, evaluate and predict, and return the results."""
    return _make_command().main(settings)


def _make_command() -> Any:
    from superglue_tasks import SuperGlueSettings

    from hf_attn_variants.commands.training import TrainingCommand

    script, epilog = "examples/superglue/run_superglue.py", "See README.md in the folder of this script for examples."
    return TrainingCommand(SuperGlueSettings, _train, script, str(__doc__), epilog)


def _train(settings: Any) -> dict[str, Any]:
    from superglue_task import get_task_class

    from hf_attn_variants.training import fine_tune

    return fine_tune(get_task_class(settings), settings)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run(sys.modules[__name__]))
