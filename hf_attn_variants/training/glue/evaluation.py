"""The objective and the evaluation of sequence classification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ...glue_tasks import GlueTask
from ..engine.evaluation import Scores, run_rows
from ..engine.losses import Objective, plain_logits
from ..engine.models import LabelMap
from .data import GlueSplit
from .metrics import compute_metrics
from .settings import GlueSettings

__all__ = ["EvalSet", "GlueEvaluator", "classification_objective"]


def classification_objective() -> Objective:
    """Return the cross-entropy of class ids, or squared error of one score, summed over examples."""
    return Objective(
        loss_sum=lambda model, batch: _loss_sum(plain_logits(model, batch).float(), batch["labels"]),
        count=lambda batch: len(batch["labels"]),
    )


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return functional.mse_loss(logits.squeeze(-1), labels.float(), reduction="sum")
    return functional.cross_entropy(logits, labels, reduction="sum")


@dataclass
class EvalSet:
    """A tokenised split to evaluate or predict: its rows are run longest first, `order` says which row came when."""

    task: GlueTask
    split: GlueSplit
    loader: DataLoader
    order: Sequence[int]
    labels: Any  # in the task's numbering; None where there are none


class GlueEvaluator(Scores):
    """Evaluates dev splits; keeps the last predictions, so that the final ones need no second pass."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        sets: list[EvalSet],
        label_map: LabelMap,
        settings: GlueSettings,
    ):
        super().__init__(self._scores)
        self.accelerator, self.model, self.sets = accelerator, model, sets
        self.label_map, self.settings = label_map, settings
        self.predictions: dict[str, np.ndarray] = {}

    def _scores(self) -> dict[str, float]:
        """Return the metrics of every dev split; those of a second one (MNLI mismatched) end in `_mm`."""
        metrics: dict[str, float] = {}
        for i, eval_set in enumerate(self.sets):
            logits = self.predict_logits(eval_set)
            predictions = self.to_predictions(eval_set.task, logits)
            self.predictions[eval_set.split.name] = predictions
            values = compute_metrics(eval_set.task.metrics, predictions, eval_set.labels)
            values["loss"] = self._loss(eval_set, logits)
            metrics |= {key + ("_mm" if i else ""): value for key, value in values.items()}
        return metrics

    def predict_logits(self, eval_set: EvalSet) -> np.ndarray:
        """Return the logits of a split [rows, labels], in the rows' order."""
        loader, order, name = eval_set.loader, eval_set.order, eval_set.split.name
        return run_rows(self.accelerator, self.model, loader, order, self._logits, name, self.settings)[0]

    def _logits(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        return (plain_logits(self.model, batch).float(),)

    def to_predictions(self, task: GlueTask, logits: np.ndarray) -> np.ndarray:
        """Return scores, or class ids in the task's numbering [rows]."""
        return logits[:, 0] if task.is_regression else np.asarray(self.label_map.to_task)[logits.argmax(-1)]

    def _loss(self, eval_set: EvalSet, logits: np.ndarray) -> float:
        labels = np.asarray(eval_set.labels)
        if not eval_set.task.is_regression:
            labels = np.asarray(self.label_map.to_model)[labels]
        return float(_loss_sum(torch.from_numpy(logits), torch.from_numpy(labels))) / len(labels)
