"""The settings of classification and regression on a user's own tables."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..engine.options import ALWAYS, BETWEEN_0_AND_1, WITH_BEST_WEIGHTS, check_metric, option, parse_json_flag
from ..engine.settings import TableSettings

__all__ = [
    "METRICS",
    "MULTI_LABEL",
    "PROBLEM_TYPES",
    "REGRESSION",
    "SINGLE_LABEL",
    "THRESHOLD",
    "ClassificationSettings",
]

# transformers' names.
SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
# Of several labels a row, those are predicted whose probability is more.
THRESHOLD = 0.5
# The dev metrics of each, beside the loss; the first one tells the best weights where none is named.
METRICS: dict[str, tuple[str, ...]] = {
    SINGLE_LABEL: ("accuracy", "f1_macro", "f1_micro", "matthews_correlation", "roc_auc"),
    MULTI_LABEL: ("f1_micro", "f1_macro", "accuracy", "roc_auc"),
    REGRESSION: ("rmse", "mae", "pearson", "spearmanr"),
}


def _weights(text: str) -> Any:
    return parse_json_flag(text) if text.lstrip().startswith("{") else text


@dataclass(frozen=True, kw_only=True)
class ClassificationSettings(TableSettings):
    """Which columns of the tables have texts and labels, and what the labels mean."""

    title: ClassVar[str] = "task"

    text_columns: tuple[str, ...] | None = option(
        "The column of texts, or the two of pairs (default: a common name, such as text, or sentence1 and sentence2).",
        None,
        metavar="NAME",
        resume=WITH_BEST_WEIGHTS,
    )
    label_column: str | None = option(
        "The column of labels (default: a common name, such as label).", None, resume=WITH_BEST_WEIGHTS
    )
    label_separator: str | None = option(
        "What divides the labels of a row that has several, as ';' in 'sports;politics'; in JSON they are a list.",
        None,
        resume=ALWAYS,
    )
    problem_type: str | None = option(
        f"One of {', '.join(PROBLEM_TYPES)} (default: what the training labels are; see below).",
        None,
        choices=PROBLEM_TYPES,
        resume=ALWAYS,
        metavar="TYPE",
    )
    labels: tuple[str, ...] | None = option(
        "The labels in the order of the model's outputs (default: those of the training rows, sorted).",
        None,
        metavar="NAME",
        resume=ALWAYS,
    )
    class_weights: dict[str, Any] | str | None = option(  # noqa: RUF009 (None, which nobody changes)
        "What each label's examples count in the loss: 'balanced', or JSON, as in '{\"spam\": 3}', others 1; with "
        "several labels a row, what having the label counts.",
        None,
        metavar="balanced|JSON",
        resume=ALWAYS,
        type=_weights,
    )
    threshold: float | None = option(
        f"Several labels a row: those are predicted whose probability is more (default: {THRESHOLD}).",
        None,
        range=BETWEEN_0_AND_1,
        resume=WITH_BEST_WEIGHTS,
    )
    shuffle_train_dataset: bool = option(
        "Shuffle the training rows before --max_train_samples takes the first; each epoch does in any case.",
        False,
        resume=ALWAYS,
    )

    def check(self) -> None:
        super().check()
        self._check_columns()
        self._check_labels()
        known = dict.fromkeys(name for kind in PROBLEM_TYPES for name in METRICS[kind])
        check_metric(self.metric_for_best_model, ("loss", *METRICS.get(self.problem_type or "", known)))

    def _check_columns(self) -> None:
        columns = self.text_columns
        if columns is not None and not (len(columns) in (1, 2) and len({*columns}) == len(columns)):
            raise ValueError(
                f"--text_columns takes one column, or the two of pairs, divided by spaces; got {', '.join(columns)}"
            )
        if columns is not None and self.label_column in columns:
            raise ValueError(f"--label_column {self.label_column} is one of --text_columns")

    def _check_labels(self) -> None:
        kind, names, weights = self.problem_type, self.labels, self.class_weights
        if self.label_separator == "":
            raise ValueError("--label_separator must not be empty")
        for name in ("label_separator", "threshold"):
            if getattr(self, name) is not None and kind not in (None, MULTI_LABEL):
                raise ValueError(f"--{name} is for several labels a row; --problem_type is {kind}")
        if names is not None and (len({*names}) < len(names) or not all(name.strip() == name != "" for name in names)):
            raise ValueError(f"--labels must be different, none blank or with space around it; got {list(names)}")
        if kind == REGRESSION and (names is not None or weights is not None):
            raise ValueError("--labels and --class_weights are for classes; --problem_type is regression")
        if isinstance(weights, dict):
            wrong = [name for name, each in weights.items() if not _is_weight(each)]
            if wrong or not weights:
                got = f"; got {wrong[0]!r}: {weights[wrong[0]]!r}" if wrong else ", got none"
                raise ValueError(f"--class_weights must be numbers above 0, a label each{got}")
        elif weights not in (None, "balanced"):
            raise ValueError(f'--class_weights must be balanced or a JSON object ({{"spam": 3}}), got {weights!r}')
        if weights == "balanced" and self.only_evaluates:
            raise ValueError("--class_weights balanced counts training rows, and --num_train_epochs 0 reads none")


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
