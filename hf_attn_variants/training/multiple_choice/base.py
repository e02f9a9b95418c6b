"""What every training on questions with choices shares: its model, its rows, its dev set and its scores."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from scipy.special import log_softmax
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..classification.evaluation import EvalSet
from ..classification.splits import hash_rows, make_rows
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.evaluation import Scores, run_rows
from ..engine.finetune import FineTuningTask
from ..engine.losses import Objective
from ..engine.models import load_config
from ..engine.settings import FineTuningSettings
from .choices import ChoiceSplit
from .head import ChoiceHead
from .words import ChoiceWords

__all__ = ["NO_QUESTIONS", "ChoiceEvaluator", "ChoiceTask", "scores_of"]

SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)
NO_QUESTIONS = ChoiceSplit("train", make_rows({}))


class ChoiceEvaluator(Scores):
    """Evaluates the dev questions, and predicts others."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        dev: EvalSet | None,
        settings: FineTuningSettings,
        way: ChoiceHead | ChoiceWords,
    ):
        super().__init__(self._scores)
        self.accelerator, self.model, self.dev, self.settings, self.way = accelerator, model, dev, settings, way
        self.dev_log_shares = np.empty((0, 0))

    def _scores(self) -> dict[str, float]:
        dev: Any = self.dev  # scored where there is one
        labels = np.asarray(dev.labels)
        self.dev_log_shares = self.log_shares(dev)
        return scores_of(self.dev_log_shares, labels)

    def log_shares(self, questions: EvalSet) -> np.ndarray:
        """Return the logarithms of the choices' probabilities [questions, most choices], in double precision.

        They are minus infinity where a question has no such choice.
        """
        most = max(map(len, questions.split.data["text2"]))

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
            logits = self.way.scores(self.model, batch)
            return (pad(logits, (0, most - logits.shape[1]), value=-torch.inf),)

        loader, order, name = questions.loader, questions.order, questions.split.name
        [logits] = run_rows(self.accelerator, self.model, loader, order, outputs, name, self.settings)
        return log_softmax(logits.astype(np.float64), axis=-1)


def scores_of(log_shares: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracy, and the loss in nats a question, of log-probabilities [questions, choices]."""
    right = log_shares[np.arange(len(labels)), labels]
    return {"accuracy": float((log_shares.argmax(-1) == labels).mean()), "loss": float(-right.mean())}


class ChoiceTask(FineTuningTask[SettingsT, ChoiceEvaluator]):
    """A training of a model that chooses among texts: an encoder by a head, an encoder-decoder in words.

    A task's `__init__` sets `train` and `dev`.

    Attributes:
        way: how the model chooses.
        train: the training questions; none for a run that only evaluates.
        dev: those that are evaluated; None where there are none.
    """

    train: ChoiceSplit
    dev: ChoiceSplit | None

    main_metric = "accuracy"
    shown_metrics: tuple[str, ...] = ("accuracy",)

    def __init__(self, settings: SettingsT, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config = load_config(settings)
        self.way = self.make_way()
        self.tokenizer, self.collate = self.way.tokenizer, self.way.collate

    def make_way(self) -> ChoiceHead | ChoiceWords:
        """Return how the model chooses."""
        if self.config.is_encoder_decoder:
            return ChoiceWords(self.settings, self.config, self.accelerator)
        return ChoiceHead(self.settings, self.config)

    def load_model(self) -> PreTrainedModel:
        model = self.way.load_model()
        self.token_counts: Sequence[int] = []
        self.rows = make_rows({})
        if len(self.train):
            tokenized = self._tokenize(self.train)
            self.token_counts = tokenized["length"]
            self.rows = tokenized.remove_columns("length")
        return model

    def lengths(self) -> Sequence[int]:
        return self.token_counts

    def objective(self) -> Objective:
        return self.way.objective()

    def make_evaluator(self, model: nn.Module) -> ChoiceEvaluator | None:
        dev = None if self.dev is None else self.eval_set(self.dev)
        self.evaluator = ChoiceEvaluator(self.accelerator, model, dev, self.settings, self.way)
        return self.evaluator if dev is not None else None

    def eval_set(self, split: ChoiceSplit) -> EvalSet:
        """Return a split as it is evaluated or predicted."""
        data = self._tokenize(split)
        unused = [name for name in ("length", "label") if name in data.column_names]
        loader, order = prepare_eval_dataloader(
            self.settings, self.accelerator, data.remove_columns(unused), data["length"], self.collate
        )
        return EvalSet(split, loader, order, data["label"][:] if "label" in unused else None)

    def fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.train), "hash of the training data": hash_rows(self.train)}

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": None if self.dev is None else hash_rows(self.dev)}

    def dev_results(self, evaluator: ChoiceEvaluator) -> dict[str, Any]:
        rows = 0 if self.dev is None else len(self.dev)
        return {"eval_samples": rows, "eval_samples_per_second": round(rows / max(evaluator.seconds, 1e-9), 2)}

    def _tokenize(self, split: ChoiceSplit) -> Dataset:
        with self.accelerator.main_process_first():  # as every task makes its rows
            return self.way.tokenize(split)
