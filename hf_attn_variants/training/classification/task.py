"""Fine-tuning for classification and regression, with metrics from scikit-learn and SciPy."""

import json
import math
import unicodedata
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from scipy.special import expit, softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    multilabel_confusion_matrix,
    roc_auc_score,
)
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedModel

from ...files import CONFUSION_FILE, save_plot
from ..engine import models
from ..engine.dataloaders import EvalBatches
from ..engine.finetune import FineTuningTask
from ..engine.optimization import Objective, compute_logits
from ..engine.settings import FineTuningSettings, check_dev_settings, check_metric_for_best_model
from . import METRICS_BY_PROBLEM, MULTI_LABEL, REGRESSION, ClassificationSettings
from .data import (
    ClassificationSplit,
    LabelScheme,
    compute_class_weights,
    format_names,
    hash_rows,
    load_classification_data,
    make_in_memory_dataset,
    tokenize_split,
)


def _correlate(
    function: Callable[[np.ndarray, np.ndarray], Any], references: np.ndarray, predictions: np.ndarray
) -> float:
    """Compute a correlation with a function from SciPy, or return NaN if the correlation is undefined."""
    if len(references) < 2:
        return math.nan
    with warnings.catch_warnings():
        # Constant predictions have no correlation. The result is NaN, so SciPy's warning is redundant.
        warnings.simplefilter("ignore")
        return function(np.asarray(predictions, dtype=np.float64), references)[0]


# Correlation functions that take the true values [rows] and the predictions [rows].
pearson, spearman = partial(_correlate, pearsonr), partial(_correlate, spearmanr)


class ClassificationOutput:
    """A model's predictions, computed from its logits [rows, labels] in the order of the scheme's names.

    Attributes:
        probabilities: The probabilities [rows, labels] in double precision. With one label per row, the probabilities
            in a row add up to 1. With several labels per row, each label has an independent probability. For
            regression, the array contains the predicted numbers [rows, 1] instead.
        predicted_labels: The predicted class ids [rows], indicators (0 or 1) for each label [rows, labels], or numbers
            [rows].
    """

    def __init__(self, scheme: LabelScheme, logits: np.ndarray, threshold: float):
        logits = logits.astype(np.float64)
        if scheme.problem_type == REGRESSION:
            self.probabilities, self.predicted_labels = logits, logits[:, 0]
        elif scheme.problem_type == MULTI_LABEL:
            self.probabilities = expit(logits)
            self.predicted_labels = (self.probabilities > threshold).astype(np.int64)
        else:
            self.probabilities, self.predicted_labels = softmax(logits, axis=-1), logits.argmax(-1)


def compute_classification_metrics(
    scheme: LabelScheme, predictions: ClassificationOutput, labels: np.ndarray
) -> dict[str, float]:
    """Compute the metrics in `METRICS_BY_PROBLEM`. Metrics that are undefined for these rows are NaN.

    F1 is computed with scikit-learn. Its macro average covers the classes that are true or predicted in at least one
    row. With several labels per row, accuracy is the share of rows for which all labels are predicted correctly. ROC
    AUC is the mean of the one-vs-rest areas, excluding classes to which no row or every row belongs.

    Args:
        scheme: The label scheme.
        predictions: The predictions.
        labels: The labels of the rows, as returned by `LabelScheme.encode`.
    """
    if scheme.problem_type == REGRESSION:
        errors = predictions.predicted_labels - labels
        return {
            "rmse": float(np.sqrt(np.mean(errors**2))),
            "mae": float(np.abs(errors).mean()),
            "pearson": float(pearson(labels, predictions.predicted_labels)),
            "spearmanr": float(spearman(labels, predictions.predicted_labels)),
        }
    labels = labels.astype(np.int64)
    true_classes, predicted_classes, ids = _to_sklearn_classes(scheme, predictions, labels)
    averaged_ids = ids if len(ids) == 1 else None  # None selects the classes that occur in the rows
    values = {"accuracy": float(accuracy_score(true_classes, predicted_classes))}
    for average in ("macro", "micro"):
        score = f1_score(true_classes, predicted_classes, labels=averaged_ids, average=average, zero_division=0.0)
        values[f"f1_{average}"] = float(score)
    if scheme.problem_type != MULTI_LABEL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the value is 0 if all true and predicted classes are the same
            values["matthews_correlation"] = float(matthews_corrcoef(labels, predictions.predicted_labels))
    areas = [area for area in _compute_roc_aucs(scheme, predictions, labels) if not math.isnan(area)]
    values["roc_auc"] = sum(areas) / len(areas) if areas else math.nan
    return values


def compute_metric_details(
    scheme: LabelScheme, predictions: ClassificationOutput, labels: np.ndarray
) -> dict[str, Any]:
    """Compute the details that complement the metrics from `compute_classification_metrics`.

    Returns:
        A dictionary with the following keys. For regression, it can only contain "undefined".

        - "per_class" maps each class name to "precision", "recall", "f1", "roc_auc", the number of rows in the class
          ("support") and the number of rows predicted to be in the class ("predicted"). Undefined values are NaN.
        - "confusion_matrix" (only with one label per row) contains one list per true class, with the number of rows
          per predicted class. The classes are in the order of their ids.
        - "undefined" (only if a metric is undefined or excludes classes) maps the metric to the reason.
    """
    if scheme.problem_type == REGRESSION:
        columns = {"labels": labels, "predictions": predictions.predicted_labels}
        constant = [name for name, numbers in columns.items() if np.ptp(numbers) == 0]
        reason = f"all {' and all '.join(constant)} are the same" if constant else ""
        return {"undefined": dict.fromkeys(("pearson", "spearmanr"), reason)} if constant else {}
    labels = labels.astype(np.int64)
    is_multi_label = scheme.problem_type == MULTI_LABEL
    true_classes, predicted_classes, ids = _to_sklearn_classes(scheme, predictions, labels)
    areas = _compute_roc_aucs(scheme, predictions, labels)
    counts = multilabel_confusion_matrix(true_classes, predicted_classes, labels=ids)
    per_class = {}
    for name, area, ((_, false_positives), (false_negatives, true_positives)) in zip(
        scheme.names, areas, counts.tolist(), strict=True
    ):
        per_class[name] = {
            "precision": _divide_or_nan(true_positives, true_positives + false_positives),
            "recall": _divide_or_nan(true_positives, true_positives + false_negatives),
            "f1": _divide_or_nan(2 * true_positives, 2 * true_positives + false_positives + false_negatives),
            "roc_auc": area,
            "support": true_positives + false_negatives,
            "predicted": true_positives + false_positives,
        }
    details: dict[str, Any] = {"per_class": per_class}
    if not is_multi_label:
        details["confusion_matrix"] = confusion_matrix(labels, predictions.predicted_labels, labels=ids).tolist()
    if undefined_classes := [name for name, area in zip(scheme.names, areas, strict=True) if math.isnan(area)]:
        details["undefined"] = {
            "roc_auc": _describe_undefined_roc_auc(undefined_classes, len(labels), len(ids), per_class)
        }
    return details


def _to_sklearn_classes(
    scheme: LabelScheme, predictions: ClassificationOutput, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the true classes, the predicted classes and the class ids in scikit-learn's format.

    A multi-label problem with a single label [rows, 1] is converted to binary classification [rows]: class 1 if the
    row has the label, and class 0 otherwise.
    """
    if scheme.problem_type == MULTI_LABEL and len(scheme.names) == 1:
        return labels[:, 0], predictions.predicted_labels[:, 0], [1]
    return labels, predictions.predicted_labels, list(range(len(scheme.names)))


def _describe_undefined_roc_auc(
    undefined_classes: Sequence[str], num_rows: int, num_classes: int, per_class: dict[str, Any]
) -> str:
    """Describe why the ROC AUC is undefined for the classes in `undefined_classes`."""
    classes_in_all_rows = [name for name in undefined_classes if per_class[name]["support"] == num_rows]
    classes_in_no_row = [name for name in undefined_classes if per_class[name]["support"] == 0]
    parts = [f"all {num_rows} rows have {format_names(classes_in_all_rows)}"] if classes_in_all_rows else []
    parts += [f"no row has {format_names(classes_in_no_row)}"] if classes_in_no_row else []
    num_defined = num_classes - len(undefined_classes)
    result = f"it is the mean over the other {num_defined}" if num_defined else "it is not defined"
    return f"{' and '.join(parts)}: {result}"


def _compute_roc_aucs(scheme: LabelScheme, predictions: ClassificationOutput, labels: np.ndarray) -> list[float]:
    """Return the one-vs-rest ROC AUC for each class, or NaN if all rows or no rows belong to the class."""
    ids = range(len(scheme.names))
    class_truths = [labels[:, i] if labels.ndim == 2 else labels == i for i in ids]
    return [
        float(roc_auc_score(truth, predictions.probabilities[:, i])) if 0 < truth.sum() < len(truth) else math.nan
        for i, truth in zip(ids, class_truths, strict=True)
    ]


def _divide_or_nan(numerator: int, denominator: int) -> float:
    """Return the quotient of two numbers, or NaN if the denominator is 0."""
    return numerator / denominator if denominator else math.nan


# The maximum number of classes for which the cells contain numbers, and for which the matrix is plotted.
MAX_NUMBERED_CLASSES, MAX_DRAWN_CLASSES = 40, 200
MAX_NAME_LENGTH = 24


def plot_confusion_matrix(matrix: Sequence[Sequence[int]], names: Sequence[str], path: Path, title: str) -> None:
    """Plot a confusion matrix, in which the shade of a cell shows its share of the rows in the true class.

    If plotting fails, a warning is logged.

    Args:
        matrix: The numbers of rows [true classes, predicted classes].
        names: The names of the classes.
        path: The path of the PNG file.
        title: The title of the plot.

    Raises:
        OSError: If the file cannot be written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the plot shows a box instead
        save_plot(path, lambda: _make_confusion_matrix_figure(np.asarray(matrix), names, title), dpi=120)


def _make_confusion_matrix_figure(matrix: np.ndarray, names: Sequence[str], title: str) -> Any:
    """Create the figure that `plot_confusion_matrix` saves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(names)
    cell = 0.42 if count <= MAX_NUMBERED_CLASSES else 12 / count  # inches
    tick_labels = [shorten_class_name(name) for name in names]
    margin = 1.6 + 0.075 * max(map(len, tick_labels))
    size = max(3.2, cell * count)
    figure = Figure(figsize=(size + margin + 1.2, size + margin), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.12)  # inches between the labels and the edge
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    totals = np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(matrix / totals, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    font_size = 8 if count <= MAX_NUMBERED_CLASSES else max(2.0, 500 / count)
    ticks: Any = {"fontsize": font_size, "parse_math": False}  # a "$" in a name must not start a formula
    axes.set_xticks(range(count), tick_labels, rotation=90, **ticks)
    axes.set_yticks(range(count), tick_labels, **ticks)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= MAX_NUMBERED_CLASSES:
        digits = len(str(matrix.max()))
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                color = "white" if number > 0.5 * totals[row, 0] else "black"
                fontsize = min(8.0, 8.0 * 4 / digits)  # four digits fit in a cell
                # With in_layout=True, the layout engine would measure each text, which is slow.
                options: Any = {"ha": "center", "va": "center", "in_layout": False}
                axes.text(column, row, str(number), color=color, fontsize=fontsize, **options)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="share of the true class")
    axes.set_title(title, fontsize=10, parse_math=False)
    return figure


def shorten_class_name(name: str) -> str:
    """Shorten a class name to a single line of visible characters for the plot."""
    line = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in name)
    line = " ".join(line.split())
    return f"{line[: MAX_NAME_LENGTH - 1]}…" if len(line) > MAX_NAME_LENGTH else line


def make_classification_objective(weights: Tensor | None = None) -> Objective:
    """Create the training objective for a classifier or regressor. The loss depends on the type of the labels.

    For class ids [b], the loss is the cross-entropy, multiplied by the weight of the class. For numbers [b], it is the
    squared error. For indicators [b, L] (0 or 1 per label), it is the binary cross-entropy, averaged over the
    labels. In this case, `weights` only multiplies the terms of the labels whose indicator is 1.

    Args:
        weights: One weight per label [L], in the order of the model's outputs. If None, all weights are 1.
    """
    return Objective(
        loss_sum=lambda model, batch: compute_classification_loss_sum(
            compute_logits(model, batch).float(), batch["labels"], weights
        ),
        count=lambda batch: len(batch["labels"]),
    )


def compute_classification_loss_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the loss from `make_classification_objective` for logits [b, L], summed over the batch."""
    weights = None if weights is None else weights.to(logits.device)
    if labels.dim() == 2:
        losses = functional.binary_cross_entropy_with_logits(
            logits, labels.float(), pos_weight=weights, reduction="none"
        )
        return losses.mean(-1).sum()
    if labels.is_floating_point():
        return functional.mse_loss(logits.squeeze(-1), labels.float(), reduction="sum")
    return functional.cross_entropy(logits, labels, weight=weights, reduction="sum")


def reorder_labels_for_model(labels: np.ndarray, label_map: models.LabelMap) -> np.ndarray:
    """Reorder labels from the order of the task to the order of the model's outputs.

    Args:
        labels: The class ids [rows], indicators (0 or 1) for each label [rows, L], or numbers [rows], which are left
            unchanged.
        label_map: The mapping between the two orders.
    """
    if labels.ndim == 2:
        return labels[:, list(label_map.to_task)]
    return labels if labels.dtype.kind == "f" else np.asarray(label_map.to_model)[labels]


@dataclass
class EvalSet:
    """A tokenized split for evaluation or prediction.

    Attributes:
        split: The split before tokenization.
        batches: The batches, and the order of the rows in the batches.
        labels: The labels, with classes in the order of the task, or None if the labels are unknown.
    """

    split: ClassificationSplit
    batches: EvalBatches
    labels: Any


SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)
NO_TRAINING_ROWS = ClassificationSplit("train", make_in_memory_dataset({}))


class SequenceClassification(FineTuningTask[SettingsT]):
    """Base class for fine-tuning a classifier or regressor on texts or text pairs.

    The `__init__` method of a subclass must call `configure_tokenizer` and set the attributes below.

    Attributes:
        labels: The class names in the order of their ids, or None for regression.
        problem_type: The problem type, as in Transformers.
        train: The training rows. Empty if the run only evaluates.
        dev_splits: The splits to evaluate. The first split is used to select the best weights.
        weights: One loss weight per label in the order of `labels`, or None. `load_model` stores the weights in the
            order of the model's outputs as `output_weights`.
    """

    labels: Sequence[str] | None
    problem_type: str
    train: ClassificationSplit
    dev_splits: list[ClassificationSplit]
    weights: Tensor | None = None

    def __init__(self, settings: SettingsT, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config = models.load_config(settings)
        models.check_trained_head(settings, self.config, "ForSequenceClassification", "classifies texts")
        self.tokenizer = models.load_tokenizer(settings, self.config)

    def configure_tokenizer(self, pair: bool) -> None:
        """Adapt the tokenizer to the model, and check the maximum length of the texts or text pairs.

        Raises:
            ValueError: If the tokenizer or the maximum length is not valid for the model.
        """
        models.configure_token_types(self.tokenizer, self.config)
        models.configure_eos_token(self.tokenizer, self.config, pair)
        length, multiple = self.settings.max_length, self.settings.pad_to_multiple_of
        models.check_max_length(length, self.config, self.tokenizer, pair, pad_to_multiple_of=multiple)
        self.collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple)

    def load_model(self) -> PreTrainedModel:
        model, self.label_map = models.load_classifier(
            self.settings, self.config, self.labels, AutoModelForSequenceClassification, self.problem_type
        )
        self.output_weights = None if self.weights is None else self.weights[list(self.label_map.to_task)]
        tokenized = self._tokenize_training_rows(self.train)
        self.token_counts = tokenized["length"]
        self.rows = tokenized.remove_columns("length")
        return model

    def get_lengths(self) -> list[int]:
        return self.token_counts

    def make_objective(self) -> Objective:
        return make_classification_objective(self.output_weights)

    def prepare_evaluation(self) -> bool:
        self.dev_sets = [self.make_eval_set(split) for split in self.dev_splits]
        return bool(self.dev_sets)

    @abstractmethod
    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        """Compute the metrics of a split from the model's logits [rows, labels]."""

    def evaluate(self) -> dict[str, float]:
        """Compute the metrics of all dev splits. Metrics of a second split (MNLI mismatched) have the suffix `_mm`."""
        metrics: dict[str, float] = {}
        for i, eval_set in enumerate(self.dev_sets):
            logits = self.predict_logits(eval_set)
            values = self.score(eval_set, logits)
            labels = torch.from_numpy(reorder_labels_for_model(np.asarray(eval_set.labels), self.label_map))
            loss = compute_classification_loss_sum(torch.from_numpy(logits), labels, self.output_weights)
            values["loss"] = float(loss) / len(labels)
            metrics |= {key + ("_mm" if i else ""): value for key, value in values.items()}
        return metrics

    def predict_logits(self, eval_set: EvalSet) -> np.ndarray:
        """Compute the logits [rows, labels] for a split in single precision, with the rows in their original order."""

        def compute_outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            return (compute_logits(self.model, batch).float(),)

        return self.run_model_on_rows(eval_set.batches, compute_outputs, eval_set.split.name)[0]

    def get_fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.train), "hash of the training data": hash_rows(self.train)}

    def get_dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": [hash_rows(split) for split in self.dev_splits]}

    def get_dev_results(self) -> dict[str, Any]:
        rows = sum(map(len, self.dev_splits))
        return {"eval_samples": rows, "eval_samples_per_second": round(rows / max(self.eval_seconds, 1e-9), 2)}

    def make_eval_set(self, split: ClassificationSplit) -> EvalSet:
        """Tokenize a split, and return it with its batches."""
        data = self._tokenize(split)
        unused = [name for name in ("length", "label") if name in data.column_names]
        batches = self.make_eval_batches(data.remove_columns(unused), data["length"])
        return EvalSet(split, batches, data["label"][:] if "label" in unused else None)

    def _tokenize(self, split: ClassificationSplit) -> Dataset:
        """Tokenize a split, first on the main process, so that the other processes can read the cached result."""
        with self.accelerator.main_process_first():
            data = tokenize_split(split, self.tokenizer, self.settings.max_length)
        if self.config.is_encoder_decoder:
            self._check_eos_token_counts(split, data)
        return data

    def _check_eos_token_counts(self, split: ClassificationSplit, data: Dataset) -> None:
        """Check that all rows have the same number of end-of-sequence tokens.

        In Transformers, the classification heads of encoder-decoder models read the output at the last end-of-sequence
        token. They require the same number of these tokens in all rows of a batch.
        """
        texts = ("a", "a") if "text2" in split.data.column_names else ("a",)
        end, expected = self.config.eos_token_id, self.tokenizer(*texts)["input_ids"].count(self.config.eos_token_id)
        mismatched_row = next((i for i, ids in enumerate(data["input_ids"]) if ids.count(end) != expected), None)
        if mismatched_row is not None:
            raise ValueError(
                f"{split.describe_row(mismatched_row)}: The text must not contain {self.tokenizer.eos_token} because "
                "the classifier reads the model's output at this token. Remove it from the text."
            )

    def _tokenize_training_rows(self, split: ClassificationSplit) -> Dataset:
        """Tokenize the training rows, with labels in the order of the model's outputs."""
        if not len(split):
            return make_in_memory_dataset({"length": []})
        data, to_model, to_task = self._tokenize(split), self.label_map.to_model, self.label_map.to_task
        if to_task == tuple(sorted(to_task)):
            return data
        if isinstance(data[0]["label"], list):
            return data.map(lambda row: {"label": [row["label"][i] for i in to_task]})
        return data.map(lambda row: {"label": to_model[row["label"]]})


class ClassificationFineTuning(SequenceClassification[ClassificationSettings]):
    """Fine-tuning for classification or regression on tables with a label, several labels or a number in each row.

    The results for the dev rows contain `eval_<metric>` for each metric in `METRICS_BY_PROBLEM`, as well as
    `eval_per_class`, `eval_confusion_matrix` and `eval_undefined` (see `compute_metric_details`). If the test rows
    have labels, the results also contain the same values with the prefix `test_`.

    Example:
        ```python
        settings = ClassificationSettings(
            model_name_or_path="bert-gqa4", train_file="train.csv", validation_file="dev.csv", output_dir="out"
        )
        results = fine_tune(ClassificationFineTuning, settings)
        ```
    """

    def __init__(self, settings: ClassificationSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.data = load_classification_data(settings, self.config)
        self.scheme = self.data.scheme
        self.problem_type = self.scheme.problem_type
        self.labels = None if self.problem_type == REGRESSION else self.scheme.names
        self.configure_tokenizer(pair=len(self.data.text_columns) == 2)
        self.metric_names = METRICS_BY_PROBLEM[self.problem_type]
        check_metric_for_best_model(settings.metric_for_best_model, ("loss", *self.metric_names))
        check_dev_settings(settings, "validation" in self.data.splits)
        self.train = self._select_training_split()
        self.dev_splits = [
            split.take(settings.max_eval_samples) for name, split in self.data.splits.items() if name == "validation"
        ]
        values = self.train.data["label"][:] if len(self.train) else []
        weights = compute_class_weights(settings.class_weights, self.scheme, values)
        self.weights = None if weights is None else torch.tensor(weights)
        self.name = self.problem_type.replace("_", " ")
        self.main_metric, self.shown_metrics = self.metric_names[0], self.metric_names

    def _select_training_split(self) -> ClassificationSplit:
        """Select the training rows according to --shuffle_train_dataset and --max_train_samples."""
        split = self.data.splits.get("train", NO_TRAINING_ROWS)
        if len(split) and self.settings.shuffle_train_dataset:
            order = torch.randperm(len(split), generator=torch.Generator().manual_seed(self.settings.seed))
            split = ClassificationSplit(split.name, split.data.select(order.tolist()))
        return split.take(self.settings.max_train_samples)

    def prepare_evaluation(self) -> bool:
        test = self.data.splits.get("test")
        self.test = None if test is None else self.make_eval_set(test)
        return super().prepare_evaluation()

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        self.dev_predictions = self._to_predictions(logits)
        return compute_classification_metrics(self.scheme, self.dev_predictions, np.asarray(eval_set.labels))

    def _to_predictions(self, logits: np.ndarray) -> ClassificationOutput:
        """Convert the model's logits [rows, labels] to predictions."""
        return ClassificationOutput(self.scheme, logits[:, list(self.label_map.to_model)], self.data.threshold)

    def get_fingerprint(self) -> dict[str, Any]:
        labels = {"problem type": self.problem_type, "labels of the model": list(self.scheme.names)}
        return {**super().get_fingerprint(), **labels}

    def get_dev_results(self) -> dict[str, Any]:
        [dev] = self.dev_sets
        details = compute_metric_details(self.scheme, self.dev_predictions, np.asarray(dev.labels))
        return {**super().get_dev_results(), **{f"eval_{name}": value for name, value in details.items()}}

    def get_results(self) -> dict[str, Any]:
        weights = None if self.weights is None else self.weights.tolist()
        results = {
            "problem_type": self.problem_type,
            "text_columns": list(self.data.text_columns),
            "label_column": self.data.label_column,
            "label_separator": self.data.label_separator,
            "threshold": self.data.threshold if self.problem_type == MULTI_LABEL else None,
            "labels": None if self.labels is None else list(self.labels),
            "class_weights": weights and dict(zip(self.scheme.names, weights, strict=True)),
        }
        return {name: value for name, value in results.items() if value is not None}

    def get_prediction_files(self) -> dict[str, str]:
        return {"dev.jsonl": self._format_predictions(self.dev_sets[0], self.dev_predictions)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        for dev in self.dev_sets:
            self._plot_confusion_matrix(dev, self.dev_predictions, CONFUSION_FILE, "dev")
        if self.test is None:
            return {}, {}
        predicted = self._to_predictions(self.predict_logits(self.test))
        results: dict[str, Any] = {"test_samples": len(self.test.split)}
        if self.test.labels is not None:
            labels = np.asarray(self.test.labels)
            values: dict[str, Any] = compute_classification_metrics(self.scheme, predicted, labels)
            values |= compute_metric_details(self.scheme, predicted, labels)
            results |= {f"test_{name}": value for name, value in values.items()}
            self._plot_confusion_matrix(self.test, predicted, CONFUSION_FILE.replace(".", "_test."), "test")
        return results, {"test.jsonl": self._format_predictions(self.test, predicted)}

    def format_summary(self, results: dict[str, Any]) -> str:
        lines = []
        for prefix, split in (("eval_", "dev"), ("test_", "test")):
            if f"{prefix}samples" in results:
                metrics = [(name, results[prefix + name]) for name in self.metric_names if prefix + name in results]
                values = [f"{name} {'none' if math.isnan(value) else f'{value:.4f}'}" for name, value in metrics]
                scores = ", ".join(values) or "predicted"
                lines.append(f"{self.name} {split} ({results[f'{prefix}samples']} rows): {scores}\n")
        return "".join(lines)

    def _plot_confusion_matrix(
        self, eval_set: EvalSet, predictions: ClassificationOutput, file_name: str, split: str
    ) -> None:
        """Plot the confusion matrix of a split if there is one label per row and not too many classes."""
        is_plotted = self.problem_type not in (REGRESSION, MULTI_LABEL) and len(self.scheme.names) <= MAX_DRAWN_CLASSES
        if not is_plotted or not self.accelerator.is_main_process:
            return
        matrix = compute_metric_details(self.scheme, predictions, np.asarray(eval_set.labels))["confusion_matrix"]
        title = f"{models.get_model_name(self.settings)}, {split}: {len(eval_set.split):,} rows"
        plot_confusion_matrix(matrix, self.scheme.names, Path(self.settings.output_dir) / file_name, title)

    def _format_predictions(self, eval_set: EvalSet, predictions: ClassificationOutput) -> str:
        """Format predictions as the content of a JSONL file.

        Each line contains the row number, the label (if known), the prediction, the probabilities (except for
        regression) and the texts. If there are several files, it also contains the file name.
        """
        files, numbers = eval_set.split.data["file"][:], eval_set.split.data["index"][:]
        columns = self.data.text_columns
        texts = [eval_set.split.data[f"text{i + 1}"][:] for i in range(len(columns))]
        has_several_files = len(set(files)) > 1
        lines = []
        for i, number in enumerate(numbers):
            record: dict[str, Any] = {"file": files[i]} if has_several_files else {}
            record["row"] = number
            if eval_set.labels is not None:
                record["label"] = self._to_label_names(eval_set.labels[i])
            record["prediction"] = self._to_label_names(predictions.predicted_labels[i])
            if self.labels is not None:
                shares = [float(f"{share:.6g}") for share in predictions.probabilities[i]]
                record["probabilities"] = dict(zip(self.scheme.names, shares, strict=True))
            record["text"] = {column: values[i] for column, values in zip(columns, texts, strict=True)}
            lines.append(json.dumps(record, ensure_ascii=False))
        return "\n".join(lines) + "\n"

    def _to_label_names(self, value: Any) -> Any:
        """Convert an encoded label to its name, to a list of names (with several labels per row), or to a number."""
        names = self.scheme.names
        if self.problem_type == REGRESSION:
            return float(f"{value:.7g}")  # the digits that single precision can represent
        if self.problem_type == MULTI_LABEL:
            return [name for name, has in zip(names, value, strict=True) if has]
        return names[int(value)]
