"""The settings of fine-tuning on a GLUE task."""

from dataclasses import dataclass
from typing import ClassVar

from ...glue_tasks import TASKS, GlueTask, get_task
from ..engine.options import WITH_BEST_WEIGHTS, option
from ..engine.settings import FineTuningSettings

__all__ = ["GlueSettings", "check_glue_metric"]


@dataclass(frozen=True, kw_only=True)
class GlueSettings(FineTuningSettings):
    """Which task, and where its files are."""

    title: ClassVar[str] = "task"

    task_name: str = option(f"One of {', '.join(name for name, task in TASKS.items() if task.eval_splits)}.")
    data_dir: str | None = option(
        "Folder with the task's TSVs (train.tsv, dev.tsv, test.tsv); default: the Hub.", None
    )
    train_file: str | None = option("The train TSV, instead of the folder's.", None)
    validation_file: str | None = option(
        "The validation TSV, instead of the folder's.", None, resume=WITH_BEST_WEIGHTS
    )
    test_file: str | None = option("The test TSV, instead of the folder's.", None)
    skip_predict: bool = option("Do not predict the test split (and AX, after MNLI).", False)

    def check(self) -> None:
        super().check()
        task = get_task(self.task_name)
        check_glue_metric(self.metric_for_best_model, task, len(task.eval_splits))


def check_glue_metric(name: str | None, task: GlueTask, dev_sets: int) -> None:
    """Raise ValueError unless `--metric_for_best_model` is not given or a metric of the task on that many dev sets."""
    known = {"loss", *task.metrics, *(["combined_score"] if len(task.metrics) > 1 else [])}
    if dev_sets > 1:
        known |= {f"{metric}_mm" for metric in known}
    if name is not None and name.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {name!r}: {task.name} has {', '.join(sorted(known))}")
