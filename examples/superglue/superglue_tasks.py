"""The eight SuperGLUE tasks (arXiv 1905.00537), and the settings from which the flags are generated."""

from dataclasses import dataclass
from typing import ClassVar

from hf_attn_variants.training.engine.settings import FineTuningSettings, check_metric_for_best_model, option

DATASET = "aps/super_glue"  # on the Hub


@dataclass(frozen=True)
class SuperGlueTask:
    """A SuperGLUE task.

    Attributes:
        name: The name on the Hub.
        folder: The name in the official release.
        fields: The names of the texts in a row.
        labels: The class names in the order of the class ids on the Hub.
        submitted: The values that represent the classes in a submission.
        metrics: The names of the metrics.
    """

    name: str
    folder: str
    fields: tuple[str, ...]
    labels: tuple[str, ...] = ("False", "True")
    submitted: tuple[str | int, ...] = ("false", "true")
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def main_metric(self) -> str:
        """The leaderboard metric, which is the mean of all metrics."""
        return "combined_score" if len(self.metrics) > 1 else self.metrics[0]


CB_LABELS, RTE_LABELS = ("entailment", "contradiction", "neutral"), ("entailment", "not_entailment")
MULTIRC_FIELDS = ("paragraph", "question and answer")
ALL_TASKS = [
    SuperGlueTask("boolq", "BoolQ", ("passage", "question")),
    SuperGlueTask("cb", "CB", ("premise", "hypothesis"), CB_LABELS, CB_LABELS, ("accuracy", "f1_macro")),
    SuperGlueTask("copa", "COPA", ("premise", "choice"), ("choice1", "choice2"), (0, 1)),
    SuperGlueTask("multirc", "MultiRC", MULTIRC_FIELDS, submitted=(0, 1), metrics=("f1a", "exact_match")),
    SuperGlueTask("record", "ReCoRD", ("passage", "query"), metrics=("f1", "exact_match")),
    SuperGlueTask("rte", "RTE", ("premise", "hypothesis"), RTE_LABELS, RTE_LABELS),
    SuperGlueTask("wic", "WiC", ("sentence1", "sentence2")),
    SuperGlueTask("wsc", "WSC", ("text",), submitted=("False", "True")),
]
TASKS = {task.name: task for task in ALL_TASKS}


def get_superglue_task(name: str) -> SuperGlueTask:
    """Return the task with the given name, ignoring case.

    Raises:
        ValueError: If the task does not exist.
    """
    if name.lower() not in TASKS:
        raise ValueError(f"--task_name must be one of {', '.join(TASKS)}, got {name!r}.")
    return TASKS[name.lower()]


@dataclass(frozen=True, kw_only=True)
class SuperGlueSettings(FineTuningSettings):
    """Settings for the task and its files. For MultiRC and ReCoRD, the sample limits apply to questions."""

    title: ClassVar[str] = "task"

    task_name: str = option(f"One of {', '.join(TASKS)}.")
    data_dir: str | None = option("Folder with the official JSONL files of the task (default: the Hub).", None)
    skip_predict: bool = option("Do not predict the test split.", False)

    def check(self) -> None:
        """Check the settings, in addition to the checks for all tasks."""
        super().check()
        task = get_superglue_task(self.task_name)
        check_metric_for_best_model(
            self.metric_for_best_model, ("loss", *dict.fromkeys((*task.metrics, task.main_metric)))
        )
