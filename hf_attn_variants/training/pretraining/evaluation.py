"""Scores of held-out text: loss, accuracy, and what they become without word order and without attention."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..engine.evaluation import Scores, run_rows
from .context_check import attention_zeroed, context_results
from .settings import PretrainingSettings
from .task import PretrainingTask

__all__ = ["TextEvaluator"]


class TextEvaluator(Scores):
    """Evaluates the dev text: "loss" (nats an item), "perplexity", "accuracy" and the number of items."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        loader: DataLoader,
        task: PretrainingTask,
        settings: PretrainingSettings,
    ):
        super().__init__(self._scores)
        self.accelerator, self.model, self.loader = accelerator, model, loader
        self.task, self.settings = task, settings

    def _scores(self) -> dict[str, float]:
        (loss, accuracy, items), *pairs = _means(self._sums())
        perplexity = float(np.exp(min(loss, 700.0)))  # exp overflows above
        metrics = {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, self.task.items: items}
        if pairs and pairs[0][2]:
            metrics["sentence_loss"], metrics["sentence_accuracy"], _ = pairs[0]
        return metrics

    def _sums(self, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda batch: batch) -> list[float]:
        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            return (self.task.row_sums(self.model, change(batch)),)

        dataset: Any = self.loader.dataset
        in_order = range(len(dataset))
        rows = run_rows(self.accelerator, self.model, self.loader, in_order, outputs, "dev", self.settings)[0]
        return torch.from_numpy(rows).double().sum(0).tolist()  # not every device has float64

    def check_context(self) -> dict[str, Any]:
        """Evaluate twice more, without word order and without attention; see `context_results`."""
        shuffled = _means(self._sums(self.task.shuffle))[0][0]
        with attention_zeroed(self.accelerator.unwrap_model(self.model)):
            zeroed = _means(self._sums())[0][0]
        return context_results(self.metrics["loss"], shuffled, zeroed)


def _means(sums: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return mean loss, share of right ones and number, of items and, where they are summed too, of pairs."""
    threes = [sums[i : i + 3] for i in range(0, len(sums), 3)]
    return [(loss / max(number, 1), right / max(number, 1), int(number)) for loss, right, number in threes]
