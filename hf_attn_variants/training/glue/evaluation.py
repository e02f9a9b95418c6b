"""The objective and the evaluation of sequence classification."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ..engine.dataloaders import in_rows_order
from ..engine.loop import Objective
from ..engine.models import LabelMap
from ..engine.tracking import progress_bar
from .data import GlueSplit
from .metrics import compute_metrics
from .tasks import GlueTask

__all__ = ["EvalSet", "GlueEvaluator", "classification_objective"]


def classification_objective() -> Objective:
    """Cross-entropy of class ids, or squared error of one score; summed over examples."""

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits.float()  # [b, labels]
        return _loss_sum(logits, labels)

    return Objective(loss_sum=loss_sum, count=lambda batch: len(batch["labels"]))


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
    labels: Sequence[float] | None  # in the task's numbering


class GlueEvaluator:
    """Evaluates dev splits; keeps the last predictions, so that the final ones need no second pass."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, sets: list[EvalSet], label_map: LabelMap, quiet: bool
    ):
        self.accelerator, self.model, self.sets = accelerator, model, sets
        self.label_map, self.quiet = label_map, quiet
        self.predictions: dict[str, np.ndarray] = {}
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        """Metrics of every dev split; those of a second one (MNLI mismatched) end in `_mm`."""
        start = time.perf_counter()
        self.metrics = {}
        for i, eval_set in enumerate(self.sets):
            logits = self.predict_logits(eval_set)
            predictions = self.to_predictions(eval_set.task, logits)
            self.predictions[eval_set.split.name] = predictions
            values = compute_metrics(eval_set.task.metrics, predictions, eval_set.labels)
            values["loss"] = self._loss(eval_set, logits)
            self.metrics |= {key + ("_mm" if i else ""): value for key, value in values.items()}
        self.seconds = time.perf_counter() - start
        return dict(self.metrics)

    @torch.no_grad()
    def predict_logits(self, eval_set: EvalSet) -> np.ndarray:
        """Logits of a split [rows, labels], in the rows' order."""
        self.model.eval()
        gathered = []
        bar = progress_bar(
            self.accelerator, self.quiet, iterable=eval_set.loader, desc=f"Running {eval_set.split.name}", leave=False
        )
        for batch in bar:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            logits = self.model(**inputs).logits.float()
            gathered.append(self.accelerator.gather_for_metrics(logits).cpu())
        return in_rows_order(torch.cat(gathered), eval_set.order)

    def to_predictions(self, task: GlueTask, logits: np.ndarray) -> np.ndarray:
        """Scores, or class ids in the task's numbering [rows]."""
        return logits[:, 0] if task.is_regression else np.asarray(self.label_map.to_task)[logits.argmax(-1)]

    def _loss(self, eval_set: EvalSet, logits: np.ndarray) -> float:
        labels = np.asarray(eval_set.labels)
        if not eval_set.task.is_regression:
            labels = np.asarray(self.label_map.to_model)[labels]
        return float(_loss_sum(torch.from_numpy(logits), torch.from_numpy(labels))) / len(labels)
