"""The nine GLUE tasks and the AX diagnostic set (arXiv:1804.07461), with their columns, labels, metrics and files."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task with its columns, labels, metrics and file names.

    Attributes:
        name: the name on the Hub, which is also the value of `--task_name`.
        folder: the name of the folder in the official release.
        text_columns: for each of the one or two text columns, the names used in TSV files and on the Hub.
        label_columns: the names of the label column.
        labels: the class names in the order of the class ids on the Hub. None for STS-B, whose labels are scores from
            0 to 5.
        metrics: the official metrics, named as in `training.glue.metrics`.
        eval_splits: the TSV file for each dev split on the Hub. The first split is used to select the best model.
        test_splits: the TSV file for each test split on the Hub.
        submits_class_names: whether a submission contains class names instead of ids.
        headerless_columns: the column names for files without a header, for each possible number of columns.
        headerless_test_columns: the column names for test files without a header, for each possible number of columns.
        may_have_broken_rows: whether the official file contains rows that are split by a line break. These rows are
            counted and skipped.
    """

    name: str
    folder: str
    text_columns: tuple[tuple[str, ...], ...]
    label_columns: tuple[str, ...] = ("label",)
    labels: tuple[str, ...] | None = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    eval_splits: dict[str, str] = field(default_factory=lambda: {"validation": "dev.tsv"})
    test_splits: dict[str, str] = field(default_factory=lambda: {"test": "test.tsv"})
    submits_class_names: bool = False
    headerless_columns: dict[int, tuple[str, ...]] = field(default_factory=dict)
    headerless_test_columns: dict[int, tuple[str, ...]] = field(default_factory=dict)
    may_have_broken_rows: bool = False

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics, and their mean if there are several."""
        return self.metrics if len(self.metrics) == 1 else (*self.metrics, "combined_score")

    @property
    def main_metric(self) -> str:
        """The metric that is used to select the best model."""
        return self.metric_names[-1]

    @property
    def is_regression(self) -> bool:
        """True if the label is a score instead of a class."""
        return self.labels is None

    def get_submission_file(self, split: str) -> str:
        """Return the name of the file that contains the predictions for a split in a GLUE submission."""
        kind = {"matched": "-m", "mismatched": "-mm"}.get(split.partition("_")[2], "")
        return f"{self.folder}{kind}.tsv"


_PAIR = (("sentence1", "premise"), ("sentence2", "hypothesis"))
_PAIR_LAYOUT: dict[int, tuple[str, ...]] = {4: ("index", "sentence1", "sentence2", "label")}
_PAIR_TEST_LAYOUT: dict[int, tuple[str, ...]] = {3: ("index", "sentence1", "sentence2")}
_STSB_LAYOUT = tuple("index genre filename year old_index source1 source2 sentence1 sentence2 score".split())
_PARSES = ("sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse")
_MNLI_START = ("index", "promptID", "pairID", "genre", *_PARSES, "sentence1", "sentence2")
_NLI_LABELS = ("entailment", "neutral", "contradiction")

_TASKS = [
    GlueTask(
        name="cola",
        folder="CoLA",
        text_columns=(("sentence",),),
        labels=("unacceptable", "acceptable"),
        metrics=("matthews_correlation",),
        headerless_columns={4: ("source", "label", "star", "sentence")},
        headerless_test_columns={2: ("index", "sentence")},
    ),
    GlueTask(
        name="sst2",
        folder="SST-2",
        text_columns=(("sentence",),),
        labels=("negative", "positive"),
        headerless_columns={2: ("sentence", "label")},
        headerless_test_columns={2: ("index", "sentence")},
    ),
    GlueTask(
        name="mrpc",
        folder="MRPC",
        text_columns=(("#1 String", "sentence1"), ("#2 String", "sentence2")),
        label_columns=("Quality", "label"),
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        headerless_columns={5: ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")},
        headerless_test_columns={5: ("index", "#1 ID", "#2 ID", "#1 String", "#2 String")},
    ),
    GlueTask(
        name="stsb",
        folder="STS-B",
        text_columns=_PAIR,
        label_columns=("score", "label"),
        labels=None,
        metrics=("pearson", "spearmanr"),
        headerless_columns={10: _STSB_LAYOUT},
        headerless_test_columns={9: _STSB_LAYOUT[:-1]},
    ),
    GlueTask(
        name="qqp",
        folder="QQP",
        text_columns=(("question1",), ("question2",)),
        label_columns=("is_duplicate", "label"),
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        headerless_columns={6: ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")},
        headerless_test_columns={3: ("id", "question1", "question2")},
        may_have_broken_rows=True,
    ),
    GlueTask(
        name="mnli",
        folder="MNLI",
        text_columns=_PAIR,
        label_columns=("gold_label", "label"),
        labels=_NLI_LABELS,
        eval_splits={"validation_matched": "dev_matched.tsv", "validation_mismatched": "dev_mismatched.tsv"},
        test_splits={"test_matched": "test_matched.tsv", "test_mismatched": "test_mismatched.tsv"},
        submits_class_names=True,
        headerless_columns={
            4: ("index", "sentence1", "sentence2", "gold_label"),
            12: (*_MNLI_START, "label1", "gold_label"),
            16: (*_MNLI_START, "label1", "label2", "label3", "label4", "label5", "gold_label"),
        },
        headerless_test_columns={3: ("index", "sentence1", "sentence2"), 10: _MNLI_START},
    ),
    GlueTask(
        name="qnli",
        folder="QNLI",
        text_columns=(("question",), ("sentence",)),
        labels=("entailment", "not_entailment"),
        submits_class_names=True,
        headerless_columns={4: ("index", "question", "sentence", "label")},
        headerless_test_columns={3: ("index", "question", "sentence")},
    ),
    GlueTask(
        name="rte",
        folder="RTE",
        text_columns=_PAIR,
        labels=("entailment", "not_entailment"),
        submits_class_names=True,
        headerless_columns=_PAIR_LAYOUT,
        headerless_test_columns=_PAIR_TEST_LAYOUT,
    ),
    GlueTask(
        name="wnli",
        folder="WNLI",
        text_columns=_PAIR,
        labels=("not_entailment", "entailment"),
        headerless_columns=_PAIR_LAYOUT,
        headerless_test_columns=_PAIR_TEST_LAYOUT,
    ),
    # The diagnostic set has no training data. A model that was trained on MNLI predicts its labels.
    GlueTask(
        name="ax",
        folder="AX",
        text_columns=_PAIR,
        labels=_NLI_LABELS,
        metrics=("matthews_correlation",),
        eval_splits={},
        test_splits={"test": "AX.tsv"},
        submits_class_names=True,
        headerless_test_columns=_PAIR_TEST_LAYOUT,
    ),
]
TASKS: dict[str, GlueTask] = {task.name: task for task in _TASKS}


def get_task(name: str) -> GlueTask:
    """Return the task with the given Hub name ("stsb") or official name ("STS-B"), ignoring case.

    Raises:
        ValueError: if the task does not exist or has no training data.

    Example:
        >>> get_task("STS-B").name
        'stsb'
    """
    task = TASKS.get(name.lower().replace("-", "").replace("_", ""))
    if task is None or not task.eval_splits:
        trained = ", ".join(name for name, task in TASKS.items() if task.eval_splits)
        hint = " To predict the labels of ax, train on mnli." if task is not None else ""
        raise ValueError(f"--task_name must be one of {trained}, got {name!r}.{hint}")
    return task


def parse_label(task: GlueTask, text: str) -> int | float:
    """Parse a label, which may be a class name, a class id or a score.

    Raises:
        ValueError: if the text is not a valid label for the task. The caller adds the file and row to the message.
    """
    if task.labels is None:
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not 0.0 <= score <= 5.0:
            raise ValueError(f"The label must be a score from 0 to 5, got {text!r}.")
        return score
    if text in task.labels:
        return task.labels.index(text)
    if text.isdecimal() and int(text) < len(task.labels):
        return int(text)
    raise ValueError(
        f"The label must be one of {', '.join(task.labels)} or a class id from 0 to {len(task.labels) - 1}, "
        f"got {text!r}."
    )


def format_prediction(task: GlueTask, value: float) -> str:
    """Format a prediction for a GLUE submission as a score with three decimals, a class name or a class id."""
    if task.labels is None:
        return f"{min(5.0, max(0.0, float(value))):.3f}"
    return task.labels[int(value)] if task.submits_class_names else str(int(value))
