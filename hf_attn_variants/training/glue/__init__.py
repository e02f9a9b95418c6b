"""Settings of fine-tuning on a GLUE task."""

from dataclasses import dataclass
from typing import ClassVar

from ...glue_tasks import TASKS, GlueTask, get_task
from ..engine.settings import WITH_BEST_WEIGHTS, FineTuningSettings, option


@dataclass(frozen=True, kw_only=True)
class GlueSettings(FineTuningSettings):
    """The GLUE task and its files.

    Example:
        ```python
        settings = GlueSettings(model_name_or_path="bert-gqa4", task_name="sst2", output_dir="out")
        results = fine_tune(GlueFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "task"

    task_name: str = option(f"One of {', '.join(name for name, task in TASKS.items() if task.eval_splits)}.")
    data_dir: str | None = option(
        "Folder with the TSV files of the task (train.tsv, dev.tsv, test.tsv). Default: the Hub.", None
    )
    train_file: str | None = option("TSV file with training rows. It overrides the file in --data_dir.", None)
    validation_file: str | None = option(
        "TSV file with dev rows. It overrides the file in --data_dir.", None, resume=WITH_BEST_WEIGHTS
    )
    test_file: str | None = option("TSV file with test rows. It overrides the file in --data_dir.", None)
    skip_predict: bool = option("Do not predict the test split (and AX, after MNLI).", False)

    def check(self) -> None:
        """Check the settings, in addition to the checks of all tasks."""
        super().check()
        task = get_task(self.task_name)
        check_glue_metric(self.metric_for_best_model, task, len(task.eval_splits))


def check_glue_metric(name: str | None, task: GlueTask, dev_sets: int) -> None:
    """Check that --metric_for_best_model is a metric of the task.

    Args:
        name: The metric, or None if the flag is not set.
        task: The task.
        dev_sets: The number of dev sets. Names of metrics of the second one end in `_mm`.

    Raises:
        ValueError: If the task does not have the metric.
    """
    known = {"loss", *task.metrics, *(["combined_score"] if len(task.metrics) > 1 else [])}
    if dev_sets > 1:
        known |= {f"{metric}_mm" for metric in known}
    if name is not None and name.removeprefix("eval_") not in known:
        raise ValueError(
            f"--metric_for_best_model must be one of {', '.join(sorted(known))} for {task.name}, got {name!r}."
        )
