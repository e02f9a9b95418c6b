"""The settings of fine-tuning on a SuperGLUE task."""

from dataclasses import dataclass
from typing import ClassVar

from ...superglue_tasks import SUPERGLUE_TASKS, get_superglue_task
from ..engine.options import ALWAYS, WITH_BEST_WEIGHTS, check_metric, option
from ..engine.settings import FineTuningSettings

__all__ = ["SuperGlueSettings"]


@dataclass(frozen=True, kw_only=True)
class SuperGlueSettings(FineTuningSettings):
    """Which task, and where its files are.

    `max_train_samples` and `max_eval_samples` count rows of the official files, or of MultiRC and ReCoRD questions.
    """

    title: ClassVar[str] = "task"

    task_name: str = option(f"One of {', '.join(SUPERGLUE_TASKS)}.")
    data_dir: str | None = option(
        "Folder with the task's official files (train.jsonl, val.jsonl, test.jsonl); default: the Hub.", None
    )
    train_file: str | None = option("The train JSONL, instead of the folder's.", None)
    validation_file: str | None = option(
        "The validation JSONL, instead of the folder's.", None, resume=WITH_BEST_WEIGHTS
    )
    test_file: str | None = option("The test JSONL, instead of the folder's.", None)
    skip_predict: bool = option("Do not predict the test split.", False)
    classifier: bool = option(
        "Give an encoder-decoder a classifier's head, as `glue` does, instead of wording the task as text.",
        False,
        resume=ALWAYS,
    )

    def check(self) -> None:
        super().check()
        task = get_superglue_task(self.task_name)
        if self.classifier and task.name == "copa":
            raise ValueError("--classifier: COPA is multiple choice, which no encoder-decoder has a head for")
        combined = ("combined_score",) if len(task.metrics) > 1 else ()
        check_metric(self.metric_for_best_model, ("loss", *task.metrics, *combined))
