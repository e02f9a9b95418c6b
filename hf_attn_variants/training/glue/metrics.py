"""GLUE's official metrics: scikit-learn's and scipy's functions under GLUE's names."""

from collections.abc import Callable, Sequence

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ..classification.metrics import pearson, spearman

__all__ = ["METRICS", "compute_metrics"]


# (true values, predictions) -> the metric. F1 is that of class 1. Where every prediction is the same, Matthews
# correlation is 0, and the other two are NaN.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
    "pearson": pearson,
    "spearmanr": spearman,
}


def compute_metrics(names: Sequence[str], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Compute metrics by name, of class ids or scores [examples].

    With several metrics there is also `combined_score`, their mean, by which GLUE ranks such tasks.

    Raises:
        ValueError: if a metric is unknown.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {', '.join(unknown)}: choose from {', '.join(METRICS)}")
    values = {name: float(METRICS[name](references, predictions)) for name in names}
    if len(names) > 1:
        values["combined_score"] = float(np.mean([values[name] for name in names]))
    return values
