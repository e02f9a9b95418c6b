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
from transformers import AutoModelForMultipleChoice, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING

from ..classification.evaluation import EvalSet
from ..classification.splits import hash_rows, make_rows
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.evaluation import Scores, run_rows
from ..engine.finetune import FineTuningTask
from ..engine.losses import Objective
from ..engine.models import load_config, load_model
from ..engine.settings import FineTuningSettings
from ..engine.tokenizers import check_max_length, fit_token_types, load_tokenizer
from .choices import ChoiceCollator, ChoiceSplit, choice_logits, choice_objective, tokenize_choices

__all__ = ["NO_QUESTIONS", "ChoiceEvaluator", "ChoiceTask", "scores_of"]

SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)
NO_QUESTIONS = ChoiceSplit("train", make_rows({}))
HEAD = "ForMultipleChoice"


class ChoiceEvaluator(Scores):
    """Evaluates the dev questions, and predicts others."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, dev: EvalSet | None, settings: FineTuningSettings):
        super().__init__(self._scores)
        self.accelerator, self.model, self.dev, self.settings = accelerator, model, dev, settings
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
            logits = choice_logits(self.model, batch)
            return (pad(logits, (0, most - logits.shape[1]), value=-torch.inf),)

        loader, order, name = questions.loader, questions.order, questions.split.name
        [logits] = run_rows(self.accelerator, self.model, loader, order, outputs, name, self.settings)
        return log_softmax(logits.astype(np.float64), axis=-1)


def scores_of(log_shares: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracy, and the loss in nats a question, of log-probabilities [questions, choices]."""
    right = log_shares[np.arange(len(labels)), labels]
    return {"accuracy": float((log_shares.argmax(-1) == labels).mean()), "loss": float(-right.mean())}


class ChoiceTask(FineTuningTask[SettingsT, ChoiceEvaluator]):
    """A training of a model that chooses among texts.

    A task's `__init__` sets the attributes below.

    Attributes:
        train: the training questions; none for a run that only evaluates.
        dev: those that are evaluated; None where there are none.
    """

    train: ChoiceSplit
    dev: ChoiceSplit | None

    main_metric, shown_metrics = "accuracy", ("accuracy",)

    def __init__(self, settings: SettingsT, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config = load_config(settings)
        _check_model(settings, self.config)
        self.tokenizer = load_tokenizer(settings, self.config)
        fit_token_types(self.tokenizer, self.config)
        check_max_length(settings.max_length, self.config, self.tokenizer, pair=True)
        self.collate = ChoiceCollator(self.tokenizer, settings.pad_to_multiple_of)

    def load_model(self) -> PreTrainedModel:
        self.config.num_labels, self.config.problem_type = 1, None  # whatever the checkpoint classified
        had_head = any(HEAD in name for name in self.config.architectures or [])
        model = load_model(
            self.settings, self.config, AutoModelForMultipleChoice, ignore_mismatched_sizes=not had_head
        )
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
        return choice_objective()

    def make_evaluator(self, model: nn.Module) -> ChoiceEvaluator | None:
        dev = None if self.dev is None else self.eval_set(self.dev)
        self.evaluator = ChoiceEvaluator(self.accelerator, model, dev, self.settings)
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
            return tokenize_choices(split, self.tokenizer, self.settings.max_length)


def _check_model(settings: FineTuningSettings, config: PreTrainedConfig) -> None:
    """Raise ValueError if the architecture has no multiple-choice head, or is only evaluated and was saved without."""
    name = settings.model_name_or_path
    auto_map: Any = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_MULTIPLE_CHOICE_MAPPING and "AutoModelForMultipleChoice" not in auto_map:
        other = (
            "word it as text: `attn-variants seq2seq` with tables whose source has the question and its choices and "
            "whose target is the right one"
            if config.is_encoder_decoder
            else "take an encoder such as BERT, RoBERTa, ALBERT, ELECTRA or DistilBERT"
        )
        raise ValueError(f"{name} ({config.model_type}) has no multiple-choice head in transformers: {other}")
    if settings.only_evaluates and not any(HEAD in each for each in config.architectures or []):
        saved = ", ".join(config.architectures or []) or "no class"
        raise ValueError(f"--num_train_epochs 0 needs a model that was trained to choose; {name} was saved as {saved}")
