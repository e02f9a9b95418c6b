"""Settings for classification and regression on user-provided tables."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..engine.settings import (
    BETWEEN_0_AND_1,
    TableSettings,
    check_metric_for_best_model,
    dev_option,
    fixed_option,
    parse_json_flag,
)

# The problem types in Transformers.
SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
# In multi-label classification, labels with a probability above this threshold are predicted.
DEFAULT_THRESHOLD = 0.5
# The dev metrics for each problem type, in addition to the loss. The first metric selects the best weights by default.
METRICS_BY_PROBLEM: dict[str, tuple[str, ...]] = {
    SINGLE_LABEL: ("accuracy", "f1_macro", "f1_micro", "matthews_correlation", "roc_auc"),
    MULTI_LABEL: ("f1_micro", "f1_macro", "accuracy", "roc_auc"),
    REGRESSION: ("rmse", "mae", "pearson", "spearmanr"),
}


def _parse_class_weights(text: str) -> Any:
    """Parse the value of --class_weights, which is JSON if it starts with "{" and text otherwise."""
    return parse_json_flag(text) if text.lstrip().startswith("{") else text


@dataclass(frozen=True, kw_only=True)
class ClassificationSettings(TableSettings):
    """Settings for classification and regression on tables, such as the columns and the problem type.

    Example:
        ```python
        settings = ClassificationSettings(
            model_name_or_path="bert-gqa4", train_file="train.csv", validation_file="dev.csv", output_dir="out"
        )
        results = fine_tune(ClassificationFineTuning, settings)
        ```
    """

    title: ClassVar[str] = "task"

    text_columns: tuple[str, ...] | None = dev_option(
        "Column that contains the texts, or two columns for pairs (default: a common name, such as text, or sentence1 "
        "and sentence2).",
        None,
        metavar="NAME",
    )
    label_column: str | None = dev_option(
        "Column that contains the labels (default: a common name, such as label).", None
    )
    label_separator: str | None = fixed_option(
        "Separator between several labels in a row, such as ';' in 'sports;politics'. In JSON, labels are lists.", None
    )
    problem_type: str | None = fixed_option(
        f"One of {', '.join(PROBLEM_TYPES)} (default: inferred from the training labels as described below).",
        None,
        choices=PROBLEM_TYPES,
        metavar="TYPE",
    )
    labels: tuple[str, ...] | None = fixed_option(
        "Labels in the order of the model's outputs (default: the sorted training labels).", None, metavar="NAME"
    )
    class_weights: dict[str, Any] | str | None = fixed_option(  # noqa: RUF009 (the default is None)
        "Weight of each label's examples in the loss, either 'balanced' or JSON such as '{\"spam\": 3}' (others: 1). "
        "With several labels per row, it is the weight of the examples that have the label.",
        None,
        metavar="balanced|JSON",
        type=_parse_class_weights,
    )
    threshold: float | None = dev_option(
        "With several labels per row, labels with a probability above this threshold are predicted (default: "
        f"{DEFAULT_THRESHOLD}).",
        None,
        range=BETWEEN_0_AND_1,
    )
    shuffle_train_dataset: bool = fixed_option(
        "Shuffle the training rows before --max_train_samples selects the first ones. Rows are always shuffled in "
        "each epoch.",
        False,
    )

    def check(self) -> None:
        """Check the settings, including those that are specific to this task."""
        super().check()
        self._check_labels()
        known = dict.fromkeys(name for kind in PROBLEM_TYPES for name in METRICS_BY_PROBLEM[kind])
        check_metric_for_best_model(
            self.metric_for_best_model, ("loss", *METRICS_BY_PROBLEM.get(self.problem_type or "", known))
        )

    def _check_labels(self) -> None:
        """Check `text_columns`, `labels` and `class_weights`."""
        columns, names, weights = self.text_columns, self.labels, self.class_weights
        if columns is not None and not (len(columns) in (1, 2) and len({*columns}) == len(columns)):
            raise ValueError(
                "--text_columns must be a single column, or two different columns for pairs, got "
                f"{', '.join(columns)}."
            )
        if names is not None and (len({*names}) < len(names) or not all(name.strip() == name != "" for name in names)):
            raise ValueError(f"--labels must be distinct and must not have surrounding spaces, got {list(names)}.")
        is_mapping = isinstance(weights, dict) and weights and all(map(_is_valid_weight, weights.values()))
        if weights not in (None, "balanced") and not is_mapping:
            raise ValueError(
                f"--class_weights must be `balanced` or a mapping from labels to numbers above 0, such as "
                f'{{"spam": 3}}, got {weights!r}.'
            )


def _is_valid_weight(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
