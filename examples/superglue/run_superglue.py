"""Fine-tune and evaluate a model on a SuperGLUE task; `--help` lists the flags."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attn_variants import run
from hf_attn_variants.commands.arguments import parse_settings
from hf_attn_variants.commands.training import train_and_push
from hf_attn_variants.training.engine.options import check_metric, option
from hf_attn_variants.training.engine.settings import FineTuningSettings

sys.path.append(str(Path(__file__).resolve().parents[1] / "multiple_choice"))  # for COPA, and for T5
from superglue_tasks import TASKS, get_task

DESCRIPTION = "Fine-tune and evaluate a model on a SuperGLUE task."
EPILOG = "README.md beside this script has examples."


@dataclass(frozen=True, kw_only=True)
class SuperGlueSettings(FineTuningSettings):
    """The task and its files; limits of samples count the questions of MultiRC and ReCoRD."""

    title: ClassVar[str] = "task"

    task_name: str = option(f"One of {', '.join(TASKS)}.")
    data_dir: str | None = option("Folder with the task's official JSONL files (default: the Hub).", None)
    skip_predict: bool = option("Do not predict the test split.", False)

    def check(self) -> None:
        super().check()
        task = get_task(self.task_name)
        check_metric(self.metric_for_best_model, ("loss", *dict.fromkeys((*task.metrics, task.main_metric))))


def parse_args(argv: Sequence[str] | None = None) -> SuperGlueSettings:
    """Read the command line, or `argv`."""
    return parse_settings(SuperGlueSettings, argv, "examples/superglue/run_superglue.py", DESCRIPTION, EPILOG)


def main(settings: SuperGlueSettings) -> dict[str, Any]:
    """Train, evaluate and predict; return the results."""
    from superglue_task import task_class

    from hf_attn_variants.training import fine_tune

    return train_and_push(settings, lambda: fine_tune(task_class(settings), settings))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("hf_attn_variants").setLevel(logging.INFO)
    sys.exit(run(sys.modules[__name__]))
