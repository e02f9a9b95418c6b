"""Metrics of classification and regression (scikit-learn and scipy), and the plot of a confusion matrix."""

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

from ...pictures import write_picture
from .labels import LabelScheme, listed
from .settings import MULTI_LABEL, REGRESSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Predictions", "draw_confusion", "pearson", "score", "score_details", "spearman"]


def _correlation(function: Callable) -> Callable[[np.ndarray, np.ndarray], float]:
    def compute(references: np.ndarray, predictions: np.ndarray) -> float:
        if len(references) < 2:
            return math.nan
        with warnings.catch_warnings():
            # A constant prediction has no correlation: the value is NaN, which says it without scipy's warning.
            warnings.simplefilter("ignore")
            return function(np.asarray(predictions, dtype=np.float64), references)[0]

    return compute


# (true values [rows], predictions [rows]) -> the correlation.
pearson, spearman = _correlation(pearsonr), _correlation(spearmanr)


class Predictions:
    """What a model says of rows, from its logits [rows, labels] in the order of the scheme's names.

    Attributes:
        probabilities: [rows, labels] in double precision: they add up to 1 a row, or each is one of its own where a
            row may have several labels; of a regression the numbers themselves, [rows, 1].
        chosen: class ids [rows], one 0 or 1 a label [rows, labels], or numbers [rows].
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


def score(scheme: LabelScheme, found: Predictions, labels: np.ndarray) -> dict[str, float]:
    """Compute the metrics of `settings.METRICS`; one that is not defined on these rows is NaN.

    F1 is scikit-learn's: the macro mean is over the classes that are true or predicted in some row. With several
    labels a row, the accuracy is that of whole sets of labels. The ROC AUC is the mean over the classes of one class
    against the rest, of those classes that some rows have and some have not.

    Args:
        scheme: what the labels are.
        found: the predictions.
        labels: of each row, as `LabelScheme.values` gives them.
    """
    if scheme.problem_type == REGRESSION:
        errors = found.chosen - labels
        return {
            "rmse": float(np.sqrt(np.mean(errors**2))),
            "mae": float(np.abs(errors).mean()),
            "pearson": float(pearson(labels, found.chosen)),
            "spearmanr": float(spearman(labels, found.chosen)),
        }
    labels = labels.astype(np.int64)
    truth, chosen, ids = _as_classes(scheme, found, labels)
    only = ids if len(ids) == 1 else None  # None: the classes that rows have
    values = {
        "accuracy": float(accuracy_score(truth, chosen)),
        "f1_macro": float(f1_score(truth, chosen, labels=only, average="macro", zero_division=0.0)),
        "f1_micro": float(f1_score(truth, chosen, labels=only, average="micro", zero_division=0.0)),
    }
    if scheme.problem_type != MULTI_LABEL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows of one class, all predicted so: 0
            values["matthews_correlation"] = float(matthews_corrcoef(labels, found.chosen))
    areas = [area for area in _areas(scheme, found, labels) if not math.isnan(area)]
    values["roc_auc"] = sum(areas) / len(areas) if areas else math.nan
    return values


def score_details(scheme: LabelScheme, found: Predictions, labels: np.ndarray) -> dict[str, Any]:
    """Return what the results have beside the metrics of `score`.

    Returns:
        "per_class": {name: "precision", "recall", "f1", "roc_auc", and the numbers of rows that have the class
        ("support") and that are predicted to ("predicted")}, NaN where one is not defined; "confusion_matrix" of one
        label a row, a list a true class of the numbers of rows predicted as each, in the order of the names;
        "undefined": {metric: why it is not defined, or which classes are not in it}. Of a regression the last alone.
    """
    if scheme.problem_type == REGRESSION:
        constant = [what for what, each in (("labels", labels), ("predictions", found.chosen)) if np.ptp(each) == 0]
        reason = f"all {' and all '.join(constant)} are the same" if constant else ""
        return {"undefined": dict.fromkeys(("pearson", "spearmanr"), reason)} if constant else {}
    labels = labels.astype(np.int64)
    several = scheme.problem_type == MULTI_LABEL
    truth, chosen, ids = _as_classes(scheme, found, labels)
    areas = _areas(scheme, found, labels)
    counts = multilabel_confusion_matrix(truth, chosen, labels=ids)
    per_class = {}
    for name, area, ((_, wrong), (missed, right)) in zip(scheme.names, areas, counts.tolist(), strict=True):
        per_class[name] = {
            "precision": _ratio(right, right + wrong),
            "recall": _ratio(right, right + missed),
            "f1": _ratio(2 * right, 2 * right + wrong + missed),
            "roc_auc": area,
            "support": right + missed,
            "predicted": right + wrong,
        }
    details: dict[str, Any] = {"per_class": per_class}
    if not several:
        details["confusion_matrix"] = confusion_matrix(labels, found.chosen, labels=ids).tolist()
    if without := [name for name, area in zip(scheme.names, areas, strict=True) if math.isnan(area)]:
        details["undefined"] = {"roc_auc": _why_no_area(without, len(labels), len(ids), per_class)}
    return details


def _as_classes(
    scheme: LabelScheme, found: Predictions, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return true and predicted classes as scikit-learn takes them, and which of its classes the names are.

    Of one label that a row may have, [rows, 1], it makes two classes: without it (0) and with it (1).
    """
    if scheme.problem_type == MULTI_LABEL and len(scheme.names) == 1:
        return labels[:, 0], found.chosen[:, 0], [1]
    return labels, found.chosen, list(range(len(scheme.names)))


def _why_no_area(without: Sequence[str], rows: int, classes: int, per_class: dict[str, Any]) -> str:
    everywhere = [name for name in without if per_class[name]["support"] == rows]
    nowhere = [name for name in without if per_class[name]["support"] == 0]
    parts = [f"all {rows} rows have {listed(everywhere)}"] if everywhere else []
    parts += [f"no row has {listed(nowhere)}"] if nowhere else []
    others = classes - len(without)
    return f"{' and '.join(parts)}: {f'it is the mean over the other {others}' if others else 'it is not defined'}"


def _areas(scheme: LabelScheme, found: Predictions, labels: np.ndarray) -> list[float]:
    """Return each class's area under the ROC curve, against the rest; NaN where all rows have it, or none."""
    ids = range(len(scheme.names))
    truths = [labels[:, i] if labels.ndim == 2 else labels == i for i in ids]
    return [
        float(roc_auc_score(truth, found.probabilities[:, i])) if 0 < truth.sum() < len(truth) else math.nan
        for i, truth in zip(ids, truths, strict=True)
    ]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


# Classes up to which cells have numbers, and up to which there is a picture.
MOST_NUMBERED, MOST_DRAWN = 40, 200
LONGEST_NAME = 24


def draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], path: Path, title: str) -> None:
    """Draw the numbers of rows by true and predicted class, each row's share of its class as its shade.

    What cannot be drawn is a warning; an OSError says that the file cannot be written.

    Args:
        matrix: [true classes, predicted classes].
        names: of the classes.
        path: of the PNG.
        title: above it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box stands for it
        write_picture(path, lambda: _figure(np.asarray(matrix), names, title), dpi=120)


def _figure(matrix: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(names)
    cell = 0.42 if count <= MOST_NUMBERED else 12 / count  # inches
    shown = [shown_name(name) for name in names]
    margin = 1.6 + 0.075 * max(map(len, shown))
    size = max(3.2, cell * count)
    figure = Figure(figsize=(size + margin + 1.2, size + margin), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.12)  # inches: labels stand free of the edge
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    totals = np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(matrix / totals, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    small = 8 if count <= MOST_NUMBERED else max(2.0, 500 / count)
    ticks: Any = {"fontsize": small, "parse_math": False}  # a name with $ is no formula
    axes.set_xticks(range(count), shown, rotation=90, **ticks)
    axes.set_yticks(range(count), shown, **ticks)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= MOST_NUMBERED:
        digits = len(str(matrix.max()))
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                colour = "white" if number > 0.5 * totals[row, 0] else "black"
                fit = min(8.0, 8.0 * 4 / digits)  # four digits fit into a cell
                inside: Any = {
                    "ha": "center",
                    "va": "center",
                    "in_layout": False,
                }  # the layout would ask each for its size
                axes.text(column, row, str(number), color=colour, fontsize=fit, **inside)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="share of the true class")
    axes.set_title(title, fontsize=10, parse_math=False)
    return figure


def shown_name(name: str) -> str:
    """Return a class's name as it stands beside the picture: one line of characters that can be seen, not too long."""
    line = "".join(" " if unicodedata.category(each)[0] in "CZ" else each for each in name)
    line = " ".join(line.split())
    return f"{line[: LONGEST_NAME - 1]}…" if len(line) > LONGEST_NAME else line
