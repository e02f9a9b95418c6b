"""GLUE's official metrics as `evaluate.Metric`s that need no network and write no file."""

import warnings
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
from datasets.table import InMemoryTable
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

__all__ = ["F1", "METRICS", "Accuracy", "Matthews", "OfflineMetric", "Pearson", "Spearman", "compute_metrics"]


class OfflineMetric(evaluate.Metric):
    """A metric over one item per example, by default a number; `evaluate.load` would ask the Hub for its code."""

    key = ""
    value_type = "int64"
    description = ""

    def __init__(self, **kwargs):
        # Without keep_in_memory, evaluate writes an Arrow file under HF_HOME, which may be read-only.
        super().__init__(keep_in_memory=True, **kwargs)

    def compute(self, *, predictions: Sequence, references: Sequence, **settings: Any) -> dict[str, float]:
        """Scores examples, all given at once.

        Args:
            predictions, references: One item per example, of the types of the metric's features.
            settings: The metric's own.

        Returns:
            Names and values.
        """
        # evaluate's own has the examples hashed by dill; why that may not be: glue_data.make_rows.
        features = self.info.features
        batch = features.encode_batch({"predictions": predictions, "references": references})
        return self._compute(**InMemoryTable.from_pydict(batch, schema=features.arrow_schema).to_pydict(), **settings)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.description,
            citation="",
            inputs_description="predictions and references: one item per example",
            features=self._features(),
        )

    def _features(self) -> datasets.Features:
        value = datasets.Value(self.value_type)
        return datasets.Features({"predictions": value, "references": value})


class Accuracy(OfflineMetric):
    """Share of examples whose class is right."""

    key = "accuracy"
    description = "share of examples whose class is right"

    def _compute(self, predictions: Sequence, references: Sequence) -> dict[str, float]:
        return {self.key: float(accuracy_score(references, predictions))}


class F1(OfflineMetric):
    """Harmonic mean of precision and recall of class 1."""

    key = "f1"
    description = "harmonic mean of precision and recall of class 1"

    def _compute(self, predictions: Sequence, references: Sequence) -> dict[str, float]:
        return {self.key: float(f1_score(references, predictions, zero_division=0.0))}


class Matthews(OfflineMetric):
    """Matthews correlation of classes; 0 where every prediction is the same."""

    key = "matthews_correlation"
    description = "Matthews correlation of predicted and true classes"

    def _compute(self, predictions: Sequence, references: Sequence) -> dict[str, float]:
        return {self.key: float(matthews_corrcoef(references, predictions))}


class _Correlation(OfflineMetric):
    value_type = "float64"
    function = staticmethod(pearsonr)

    def _compute(self, predictions: Sequence, references: Sequence) -> dict[str, float]:
        with warnings.catch_warnings():
            # A constant prediction has no correlation: the value is NaN, which says it without scipy's warning.
            warnings.simplefilter("ignore")
            return {self.key: float(self.function(predictions, references)[0])}


class Pearson(_Correlation):
    """Pearson correlation of scores; NaN where every prediction is the same."""

    key = "pearson"
    description = "Pearson correlation of predicted and true scores"


class Spearman(_Correlation):
    """Spearman rank correlation of scores; NaN where every prediction is the same."""

    key = "spearmanr"
    description = "Spearman rank correlation of predicted and true scores"
    function = staticmethod(spearmanr)


METRICS: dict[str, type[OfflineMetric]] = {
    metric.key: metric for metric in (Accuracy, F1, Matthews, Pearson, Spearman)
}


def compute_metrics(names: Sequence[str], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Computes metrics by name.

    Args:
        names: Keys of `METRICS`.
        predictions: Class ids or scores [examples].
        references: The same, true ones.

    Returns:
        Metric -> value; with several metrics also `combined_score`, their mean, by which GLUE ranks such tasks.

    Raises:
        ValueError: A metric is unknown.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {', '.join(unknown)}: choose from {', '.join(METRICS)}")
    values: dict[str, float] = {}
    for name in names:
        values |= METRICS[name]().compute(predictions=predictions, references=references)
    if len(names) > 1:
        values["combined_score"] = float(np.mean([values[name] for name in names]))
    return values
