"""Metrics of classification and regression (from scikit-learn and SciPy), and the plot of a confusion matrix."""

import math
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
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

from ...files import write_picture
from .labels import LabelScheme, format_names
from .settings import MULTI_LABEL, REGRESSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Predictions",
    "compute_classification_metrics",
    "compute_metric_details",
    "draw_confusion_matrix",
    "pearson",
    "spearman",
]


def _make_correlation(function: Callable) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return a function of references and predictions from a correlation of SciPy. It returns NaN if undefined."""

    def compute(references: np.ndarray, predictions: np.ndarray) -> float:
        if len(references) < 2:
            return math.nan
        with warnings.catch_warnings():
            # A constant prediction has no correlation. The value is NaN, so the warning of SciPy adds nothing.
            warnings.simplefilter("ignore")
            return function(np.asarray(predictions, dtype=np.float64), references)[0]

    return compute


# Map (true values [rows], predictions [rows]) to the correlation.
pearson, spearman = _make_correlation(pearsonr), _make_correlation(spearmanr)


class Predictions:
    """The predictions of a model, computed from its logits [rows, labels] in the order of the names of the scheme.

    Attributes:
        probabilities: [rows, labels] in double precision. With one label per row, the probabilities of a row add up
            to 1. With several, each label has its own. For regression, they are the predicted numbers [rows, 1].
        chosen: Class ids [rows], one 0 or 1 per label [rows, labels], or numbers [rows].
    """

    def __init__(self, scheme: LabelScheme, logits: np.ndarray, threshold: float):
        logits = logits.astype(np.float64)
        if scheme.problem_type == REGRESSION:
            self.probabilities, self.chosen = logits, logits[:, 0]
        elif scheme.problem_type == MULTI_LABEL:
            self.probabilities = expit(logits)
            self.chosen = (self.probabilities > threshold).astype(np.int64)
        else:
            self.probabilities, self.chosen = softmax(logits, axis=-1), logits.argmax(-1)


def compute_classification_metrics(
    scheme: LabelScheme, predicted: Predictions, labels: np.ndarray
) -> dict[str, float]:
    """Compute the metrics of `settings.METRICS_BY_PROBLEM`. A metric that is undefined on these rows is NaN.

    F1 is computed by scikit-learn. Its macro average covers the classes that are true or predicted in some row. With
    several labels per row, the accuracy is the share of rows with exactly the correct labels. The ROC AUC is the mean
    of the one-vs-rest areas of the classes that some rows have and other rows lack.

    Args:
        scheme: The meaning of the labels.
        predicted: The predictions.
        labels: The labels of the rows, as `LabelScheme.encode` returns them.
    """
    if scheme.problem_type == REGRESSION:
        errors = predicted.chosen - labels
        return {
            "rmse": float(np.sqrt(np.mean(errors**2))),
            "mae": float(np.abs(errors).mean()),
            "pearson": float(pearson(labels, predicted.chosen)),
            "spearmanr": float(spearman(labels, predicted.chosen)),
        }
    labels = labels.astype(np.int64)
    truth, chosen, ids = _to_sklearn_classes(scheme, predicted, labels)
    averaged_ids = ids if len(ids) == 1 else None  # None: the classes that occur in the rows
    values = {
        "accuracy": float(accuracy_score(truth, chosen)),
        "f1_macro": float(f1_score(truth, chosen, labels=averaged_ids, average="macro", zero_division=0.0)),
        "f1_micro": float(f1_score(truth, chosen, labels=averaged_ids, average="micro", zero_division=0.0)),
    }
    if scheme.problem_type != MULTI_LABEL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # if all rows have and get the same class, the value is 0
            values["matthews_correlation"] = float(matthews_corrcoef(labels, predicted.chosen))
    areas = [area for area in _compute_roc_areas(scheme, predicted, labels) if not math.isnan(area)]
    values["roc_auc"] = sum(areas) / len(areas) if areas else math.nan
    return values


def compute_metric_details(scheme: LabelScheme, predicted: Predictions, labels: np.ndarray) -> dict[str, Any]:
    """Compute the results that complement the metrics of `compute_classification_metrics`.

    Returns:
        "per_class" maps each name to "precision", "recall", "f1", "roc_auc", the number of rows with the class
        ("support") and the number of rows that are predicted to have it ("predicted"). Undefined values are NaN.
        "confusion_matrix" is present only with one label per row: one list per true class with the number of rows per
        predicted class, in the order of the names. "undefined" maps a metric to the reason why it is undefined, or to
        the classes that it leaves out. For a regression, only "undefined" may be present.
    """
    if scheme.problem_type == REGRESSION:
        columns = {"labels": labels, "predictions": predicted.chosen}
        constant = [name for name, numbers in columns.items() if np.ptp(numbers) == 0]
        reason = f"all {' and all '.join(constant)} are the same" if constant else ""
        return {"undefined": dict.fromkeys(("pearson", "spearmanr"), reason)} if constant else {}
    labels = labels.astype(np.int64)
    several = scheme.problem_type == MULTI_LABEL
    truth, chosen, ids = _to_sklearn_classes(scheme, predicted, labels)
    areas = _compute_roc_areas(scheme, predicted, labels)
    counts = multilabel_confusion_matrix(truth, chosen, labels=ids)
    per_class = {}
    for name, area, ((_, wrong), (missed, right)) in zip(scheme.names, areas, counts.tolist(), strict=True):
        per_class[name] = {
            "precision": _divide(right, right + wrong),
            "recall": _divide(right, right + missed),
            "f1": _divide(2 * right, 2 * right + wrong + missed),
            "roc_auc": area,
            "support": right + missed,
            "predicted": right + wrong,
        }
    details: dict[str, Any] = {"per_class": per_class}
    if not several:
        details["confusion_matrix"] = confusion_matrix(labels, predicted.chosen, labels=ids).tolist()
    if without := [name for name, area in zip(scheme.names, areas, strict=True) if math.isnan(area)]:
        details["undefined"] = {"roc_auc": _explain_undefined_areas(without, len(labels), len(ids), per_class)}
    return details


def _to_sklearn_classes(
    scheme: LabelScheme, predicted: Predictions, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the true and the predicted classes in the format of scikit-learn, and its class ids of the names.

    If there is only one label that a row may have [rows, 1], scikit-learn gets two classes: without (0) and with (1).
    """
    if scheme.problem_type == MULTI_LABEL and len(scheme.names) == 1:
        return labels[:, 0], predicted.chosen[:, 0], [1]
    return labels, predicted.chosen, list(range(len(scheme.names)))


def _explain_undefined_areas(without: Sequence[str], rows: int, classes: int, per_class: dict[str, Any]) -> str:
    """Explain why the ROC AUC of some classes is undefined."""
    everywhere = [name for name in without if per_class[name]["support"] == rows]
    nowhere = [name for name in without if per_class[name]["support"] == 0]
    parts = [f"all {rows} rows have {format_names(everywhere)}"] if everywhere else []
    parts += [f"no row has {format_names(nowhere)}"] if nowhere else []
    num_defined = classes - len(without)
    result = f"it is the mean over the other {num_defined}" if num_defined else "it is not defined"
    return f"{' and '.join(parts)}: {result}"


def _compute_roc_areas(scheme: LabelScheme, predicted: Predictions, labels: np.ndarray) -> list[float]:
    """Return the one-vs-rest ROC AUC of each class, or NaN if all rows or no row have the class."""
    ids = range(len(scheme.names))
    truths = [labels[:, i] if labels.ndim == 2 else labels == i for i in ids]
    return [
        float(roc_auc_score(truth, predicted.probabilities[:, i])) if 0 < truth.sum() < len(truth) else math.nan
        for i, truth in zip(ids, truths, strict=True)
    ]


def _divide(part: int, whole: int) -> float:
    """Return a ratio, or NaN if the denominator is 0."""
    return part / whole if whole else math.nan


# The largest numbers of classes with numbers in the cells, and with a plot at all.
MAX_NUMBERED_CLASSES, MAX_DRAWN_CLASSES = 40, 200
MAX_NAME_LENGTH = 24


def draw_confusion_matrix(matrix: Sequence[Sequence[int]], names: Sequence[str], path: Path, title: str) -> None:
    """Draw a confusion matrix. The shade of a cell is its share of the rows of the true class.

    If the plot fails, log a warning.

    Args:
        matrix: Numbers of rows [true classes, predicted classes].
        names: The names of the classes.
        path: The path of the PNG.
        title: The title of the plot.

    Raises:
        OSError: If the file cannot be written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the plot shows a box instead
        write_picture(path, lambda: _make_figure(np.asarray(matrix), names, title), dpi=120)


def _make_figure(matrix: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    """Return the figure of `draw_confusion_matrix`."""
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
    small = 8 if count <= MAX_NUMBERED_CLASSES else max(2.0, 500 / count)
    ticks: Any = {"fontsize": small, "parse_math": False}  # a name with $ is not a formula
    axes.set_xticks(range(count), tick_labels, rotation=90, **ticks)
    axes.set_yticks(range(count), tick_labels, **ticks)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= MAX_NUMBERED_CLASSES:
        digits = len(str(matrix.max()))
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                color = "white" if number > 0.5 * totals[row, 0] else "black"
                fontsize = min(8.0, 8.0 * 4 / digits)  # four digits fit into a cell
                # The layout engine would otherwise measure every text, which is slow.
                options: Any = {"ha": "center", "va": "center", "in_layout": False}
                axes.text(column, row, str(number), color=color, fontsize=fontsize, **options)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="share of the true class")
    axes.set_title(title, fontsize=10, parse_math=False)
    return figure


def shorten_class_name(name: str) -> str:
    """Return a class name for the plot: one line of visible characters of limited length."""
    line = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in name)
    line = " ".join(line.split())
    return f"{line[: MAX_NAME_LENGTH - 1]}…" if len(line) > MAX_NAME_LENGTH else line
