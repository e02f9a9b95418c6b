"""The eight SuperGLUE tasks (arXiv:1905.00537): labels, metrics, names of files, labels of a submission."""

from dataclasses import dataclass

__all__ = ["SUPERGLUE", "SUPERGLUE_DATASET", "SUPERGLUE_TASKS", "SuperGlueTask", "get_superglue_task"]

# What results call the benchmark: RTE is a task of both.
SUPERGLUE = "superglue"
SUPERGLUE_DATASET = "aps/super_glue"  # on the Hub
_ANSWERS = ("False", "True")


@dataclass(frozen=True)
class SuperGlueTask:
    """What the code must know about a SuperGLUE task.

    Attributes:
        name, folder: its names on the Hub (and as `--task_name`) and in the official release, whose file of a
            submission is called as the folder.
        labels: class names in the order of the Hub's class ids; COPA's are its choices.
        submitted: what a submission has in the place of each label.
        metrics: official metrics, by their names in `training.superglue.metrics`.
        fields: of a row, as a card calls the texts that a model reads.
    """

    name: str
    folder: str
    fields: tuple[str, ...]
    labels: tuple[str, ...] = _ANSWERS
    submitted: tuple[str | int, ...] = ("false", "true")
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def main_metric(self) -> str:
        """The metric of the leaderboard: the mean where there are two."""
        return "combined_score" if len(self.metrics) > 1 else self.metrics[0]

    def submission_file(self, prefix: str = "") -> str:
        """Return what a file of the task's predictions is called."""
        return f"{prefix}{self.folder}.jsonl"


_CB_LABELS = ("entailment", "contradiction", "neutral")
_RTE_LABELS = ("entailment", "not_entailment")
_TASKS = [
    SuperGlueTask("boolq", "BoolQ", ("passage", "question")),
    SuperGlueTask("cb", "CB", ("premise", "hypothesis"), _CB_LABELS, _CB_LABELS, ("accuracy", "f1_macro")),
    SuperGlueTask("copa", "COPA", ("premise", "choice"), ("choice1", "choice2"), (0, 1)),
    SuperGlueTask(
        "multirc", "MultiRC", ("paragraph", "question and answer"), submitted=(0, 1), metrics=("f1a", "exact_match")
    ),
    SuperGlueTask("record", "ReCoRD", ("passage", "query"), metrics=("f1", "exact_match")),
    SuperGlueTask("rte", "RTE", ("premise", "hypothesis"), _RTE_LABELS, _RTE_LABELS),
    SuperGlueTask("wic", "WiC", ("sentence1", "sentence2")),
    SuperGlueTask("wsc", "WSC", ("text",), submitted=_ANSWERS),
]
SUPERGLUE_TASKS: dict[str, SuperGlueTask] = {task.name: task for task in _TASKS}


def get_superglue_task(name: str) -> SuperGlueTask:
    """Find a task by its name, whatever the case.

    Raises:
        ValueError: if there is no such task.
    """
    task = SUPERGLUE_TASKS.get(name.lower())
    if task is None:
        is_diagnostic = name.lower().replace("-", "") in ("axb", "axg")
        hint = "; both diagnostic sets are predicted after training on rte" if is_diagnostic else ""
        raise ValueError(f"unknown --task_name {name!r}: choose one of {', '.join(SUPERGLUE_TASKS)}{hint}")
    return task
