"""The objective of extractive question answering, and its evaluation by SQuAD's official metrics.

Letters: b windows, n tokens a window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ..engine.evaluation import Scores, run_rows
from ..engine.losses import Objective
from .answers import Prediction, find_predictions
from .data import Question
from .metrics import compute_squad
from .settings import SquadSettings
from .windows import Window

__all__ = ["QuestionSet", "SquadEvaluator", "span_objective"]

POSITIONS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class QuestionSet:
    """A split to evaluate or predict: its windows are run longest first, `order` says which window came when."""

    name: str
    questions: list[Question]
    windows: list[Window]
    loader: DataLoader
    order: list[int]


def span_objective() -> Objective:
    """Return the mean of the cross-entropies of the answer's first and last token, summed over windows."""
    return Objective(
        loss_sum=lambda model, batch: _losses(_span_logits(model, batch), batch).sum(),
        count=lambda batch: len(batch["input_ids"]),
    )


def _span_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits [b, n, 2] of each token to be the answer's first, and last; padding cannot be either."""
    inputs: dict[str, Any] = {key: value for key, value in batch.items() if key not in POSITIONS}
    if getattr(model, "module", model).config.is_encoder_decoder:
        inputs["use_cache"] = False  # its decoder would keep keys and values that nothing reads
    outputs = model(**inputs)
    logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1).float()
    return logits.masked_fill(batch["attention_mask"][..., None] == 0, torch.finfo(logits.dtype).min)


def _losses(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of each window [b]; logits [b, n, 2]."""
    labels = torch.stack([batch[name] for name in POSITIONS], dim=-1)  # [b, 2]
    return functional.cross_entropy(logits, labels, reduction="none").mean(-1)


class SquadEvaluator(Scores):
    """Evaluates the dev split; keeps the last predictions, so that the final ones need no second pass."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, data: QuestionSet, settings: SquadSettings):
        super().__init__(self._scores)
        self.accelerator, self.model, self.data, self.settings = accelerator, model, data, settings
        self.predictions: list[Prediction] = []

    def _scores(self) -> dict[str, float]:
        """Return the official metrics of the dev split, and the "loss" of its windows (by the first answers)."""
        self.predictions, loss = self.predict(self.data)
        threshold, texts = self.settings.threshold, {p.id: p.text for p in self.predictions}
        given = () if threshold is None else ({p.id: p.null_odds for p in self.predictions}, threshold)
        return {**compute_squad(self.data.questions, texts, *given), "loss": loss}

    def predict(self, data: QuestionSet) -> tuple[list[Prediction], float]:
        """Return the predictions of a split, in its questions' order, and the mean loss of its windows."""
        logits, losses = run_rows(
            self.accelerator, self.model, data.loader, data.order, self._outputs, data.name, self.settings
        )
        limits = self.settings.n_best_size, self.settings.max_answer_length
        found = find_predictions(data.questions, data.windows, logits[..., 0], logits[..., 1], *limits)
        # In the order of the passes: a sum of floats depends on it.
        return found, float(torch.from_numpy(losses[data.order]).mean())

    def _outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = _span_logits(self.model, batch)  # [b, n, 2]
        padding = (0, 0, 0, self.settings.max_length - logits.shape[1])
        padded = functional.pad(logits, padding, value=torch.finfo(logits.dtype).min)
        return padded, _losses(logits, batch)
