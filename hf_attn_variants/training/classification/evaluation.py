"""The objective of sequence classification and regression, and what evaluates a model on its dev splits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ..engine.evaluation import Scores, run_rows
from ..engine.losses import Objective, plain_logits
from ..engine.models import LabelMap
from ..engine.settings import FineTuningSettings
from .splits import ClassificationSplit

__all__ = ["EvalSet", "LogitsEvaluator", "classification_objective", "labels_of_model"]


def classification_objective(weights: Tensor | None = None) -> Objective:
    """Return the loss of a classifier, summed over examples; what it is, the labels of a batch say.

    Class ids [b]: cross-entropy, an example's times its class's weight. One number each, [b]: the squared error. One 0
    or 1 a label, [b, L]: the mean over the labels of the binary cross-entropy, in which a label that an example has
    weighs as much as `weights` says.

    Args:
        weights: one a label [L], in the order of the model's outputs; None: 1 each.
    """
    return Objective(
        loss_sum=lambda model, batch: loss_sum(plain_logits(model, batch).float(), batch["labels"], weights),
        count=lambda batch: len(batch["labels"]),
    )


def loss_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the loss of `classification_objective`, from logits [b, L]."""
    weights = None if weights is None else weights.to(logits.device)
    if labels.dim() == 2:
        losses = functional.binary_cross_entropy_with_logits(
            logits, labels.float(), pos_weight=weights, reduction="none"
        )
        return losses.mean(-1).sum()
    if labels.is_floating_point():
        return functional.mse_loss(logits.squeeze(-1), labels.float(), reduction="sum")
    return functional.cross_entropy(logits, labels, weight=weights, reduction="sum")


def labels_of_model(labels: np.ndarray, label_map: LabelMap) -> np.ndarray:
    """Return labels in the task's order, class ids [rows] or one 0 or 1 a label [rows, L], in that of the outputs."""
    if labels.ndim == 2:
        return labels[:, list(label_map.to_task)]
    return labels if labels.dtype.kind == "f" else np.asarray(label_map.to_model)[labels]


@dataclass
class EvalSet:
    """A tokenised split to evaluate or predict: its rows are run longest first, `order` says which row came when."""

    split: ClassificationSplit
    loader: DataLoader
    order: Sequence[int]
    labels: Any  # in the task's order; None where there are none


class LogitsEvaluator(Scores, ABC):
    """Evaluates dev splits by the logits of their rows; keeps what a task makes of them."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        sets: list[EvalSet],
        label_map: LabelMap,
        settings: FineTuningSettings,
        weights: Tensor | None = None,
    ):
        super().__init__(self._scores)
        self.accelerator, self.model, self.sets = accelerator, model, sets
        self.label_map, self.settings, self.weights = label_map, settings, weights

    @abstractmethod
    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        """Return a split's metrics from its logits [rows, labels], which are in the order of the model's outputs."""

    def _scores(self) -> dict[str, float]:
        """Return the metrics of every dev split; those of a second one (MNLI mismatched) end in `_mm`."""
        metrics: dict[str, float] = {}
        for i, eval_set in enumerate(self.sets):
            logits = self.predict_logits(eval_set)
            values = self.score(eval_set, logits)
            values["loss"] = self._loss(eval_set, logits)
            metrics |= {key + ("_mm" if i else ""): value for key, value in values.items()}
        return metrics

    def predict_logits(self, eval_set: EvalSet) -> np.ndarray:
        """Return the logits of a split [rows, labels], in the rows' order."""
        loader, order, name = eval_set.loader, eval_set.order, eval_set.split.name
        return run_rows(self.accelerator, self.model, loader, order, self._logits, name, self.settings)[0]

    def _logits(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        return (plain_logits(self.model, batch).float(),)

    def _loss(self, eval_set: EvalSet, logits: np.ndarray) -> float:
        labels = labels_of_model(np.asarray(eval_set.labels), self.label_map)
        return float(loss_sum(torch.from_numpy(logits), torch.from_numpy(labels), self.weights)) / len(labels)
