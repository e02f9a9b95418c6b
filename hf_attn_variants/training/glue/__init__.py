"""Settings for fine-tuning on a GLUE task."""

from dataclasses import dataclass
from typing import ClassVar

from ...glue_tasks import TASKS, get_task
from ..engine.settings import FineTuningSettings, dev_option, option


@dataclass(frozen=True, kw_only=True)
class GlueSettings(FineTuningSettings):
    """Settings for fine-tuning on a GLUE task, such as the name of the task and its files.

    Example:
        ```python
        settings = GlueSettings(model_name_or_path="bert-gqa4", task_name="sst2", output_dir="out")
        results = fine_tune(GlueFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "task"

    task_name: str = option(f"One of {', '.join(name for name, task in TASKS.items() if task.eval_splits)}.")
    data_dir: str | None = option(
        "Folder with the TSV files of the task (train.tsv, dev.tsv, test.tsv). If not set, the task is loaded from "
        "the Hub.",
        None,
    )
    train_file: str | None = option("TSV file with training rows, which overrides the file in --data_dir.", None)
    validation_file: str | None = dev_option("TSV file with dev rows, which overrides the file in --data_dir.", None)
    test_file: str | None = option("TSV file with test rows, which overrides the file in --data_dir.", None)
    skip_predict: bool = option("Skip the predictions for the test split (and for AX, after MNLI).", False)

    def check(self) -> None:
        """Check the settings, including the name of the task."""
        super().check()
        get_task(self.task_name)
