"""The evaluation of a GLUE task: its official metrics."""

from typing import Any

import numpy as np

from ...glue_tasks import GlueTask
from ..classification.evaluation import EvalSet, LogitsEvaluator
from .metrics import compute_metrics

__all__ = ["GlueEvaluator"]


class GlueEvaluator(LogitsEvaluator):
    """Evaluates dev splits; keeps the last predictions, so that the final ones need no second pass."""

    def __init__(self, task: GlueTask, *args: Any):
        super().__init__(*args)
        self.task = task
        self.predictions: dict[str, np.ndarray] = {}

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        predictions = self.to_predictions(self.task, logits)
        self.predictions[eval_set.split.name] = predictions
        return compute_metrics(self.task.metrics, predictions, eval_set.labels)

    def to_predictions(self, task: GlueTask, logits: np.ndarray) -> np.ndarray:
        """Return scores, or class ids in the task's numbering [rows]."""
        return logits[:, 0] if task.is_regression else np.asarray(self.label_map.to_task)[logits.argmax(-1)]
