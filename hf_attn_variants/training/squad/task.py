"""Fine-tuning of extractive question answering on SQuAD 1.1 and 2.0, with its evaluation."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModelForQuestionAnswering, PreTrainedModel

from ...modeling.mechanisms.patterns.pattern_table import takes_global_mask
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask, MetricEvaluator, list_shown_metrics, run_rows
from ..engine.losses import Objective
from ..engine.models import check_trained_head, load_config, load_model
from ..engine.tokenizers import fit_token_types, load_tokenizer
from .data import Question, Window, checked_stride, hash_questions, load_squad, make_windows, window_collator
from .metrics import Prediction, compute_squad, find_predictions, nbest_entries
from .settings import SquadSettings

__all__ = ["QuestionSet", "SquadEvaluator", "SquadFineTuning", "span_objective"]

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


class SquadEvaluator(MetricEvaluator):
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


class SquadFineTuning(FineTuningTask[SquadSettings, SquadEvaluator]):
    """Extractive question answering, v1.1 (arXiv:1606.05250) or v2.0 (arXiv:1806.03822).

    The results have `eval_exact_match` and `eval_f1`; for v2.0 `eval_exact`, `eval_f1`, those of questions with and
    without an answer, and those of the best threshold.
    """

    rows: list[Window]

    main_metric = "f1"
    shown_metrics = ("exact_match", "exact", "f1", "HasAns_f1", "NoAns_f1")
    unit = "windows"

    def __init__(self, settings: SquadSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.name = "SQuAD v2.0" if settings.version_2_with_negative else "SQuAD v1.1"
        self.config = load_config(settings)
        check_trained_head(settings, self.config, "ForQuestionAnswering", "answers questions")
        self.tokenizer = load_tokenizer(settings, self.config)
        fit_token_types(self.tokenizer, self.config)
        self.stride = checked_stride(settings, self.config, self.tokenizer)
        self.splits = self._load_splits()
        self._check_metric()
        marks_questions = takes_global_mask(self.config)
        self.collate = window_collator(self.tokenizer, settings.pad_to_multiple_of, marks_questions)
        self.train = self.splits.get("train", [])

    def _load_splits(self) -> dict[str, list[Question]]:
        settings = self.settings
        from_hub, with_train = settings.validation_file is None, not settings.only_evaluates
        # The others read the Hub dataset's cache.
        with self.accelerator.main_process_first() if from_hub else nullcontext():
            splits = load_squad(settings.values(), from_hub, settings.version_2_with_negative, with_train)
        limits = {"train": settings.max_train_samples, "dev": settings.max_eval_samples}
        return {name: questions[: limits.get(name)] for name, questions in splits.items()}

    def _check_metric(self) -> None:
        metric = (self.settings.metric_for_best_model or "").removeprefix("eval_")
        for prefix, answered in (("HasAns_", True), ("NoAns_", False)):
            if metric.startswith(prefix) and not any(bool(q.answers) == answered for q in self.splits["dev"]):
                kind = "an answer" if answered else "no answer"
                raise ValueError(f"--metric_for_best_model {metric!r}: no question of the dev split has {kind}")

    def load_model(self) -> PreTrainedModel:
        self.config.num_labels = 2  # a start and an end, whatever the checkpoint classified
        model = load_model(self.settings, self.config, AutoModelForQuestionAnswering)
        self.rows = self._windows(self.train, for_training=True)
        return model

    def lengths(self) -> list[int]:
        return _lengths(self.rows)

    def objective(self) -> Objective:
        return span_objective()

    def make_evaluator(self, model: nn.Module) -> SquadEvaluator:
        self.evaluator = SquadEvaluator(self.accelerator, model, self._question_set("dev"), self.settings)
        self.test = self._question_set("test") if "test" in self.splits else None
        return self.evaluator

    def fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.train), "hash of the training data": hash_questions(self.train)}

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": hash_questions(self.splits["dev"])}

    def dev_results(self, evaluator: SquadEvaluator) -> dict[str, Any]:
        return {"eval_samples": len(evaluator.data.questions), "eval_windows": len(evaluator.data.windows)}

    def results(self) -> dict[str, Any]:
        return {"train_samples": len(self.train), "train_windows": len(self.rows)}

    def predictions(self, evaluator: SquadEvaluator) -> dict[str, str]:
        return self._files("dev", evaluator.predictions)

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        return {}, self._files("test", self.evaluator.predict(self.test)[0]) if self.test is not None else {}

    def summary(self, results: dict[str, Any]) -> str:
        scores = ", ".join(f"{name} {results[f'eval_{name}']:.2f}" for name in list_shown_metrics(self, results))
        rows = f"{results['eval_samples']} questions, {results['eval_windows']} windows"
        return f"{self.name} dev ({rows}): {scores}; "

    def _windows(self, questions: list[Question], for_training: bool = False) -> list[Window]:
        lengths = self.settings.max_length, self.stride, self.settings.max_query_length
        token_types = getattr(self.config, "type_vocab_size", 0) > 1
        return make_windows(questions, self.tokenizer, *lengths, token_types, for_training)

    def _question_set(self, name: str) -> QuestionSet:
        rows = self._windows(self.splits[name])
        loader, order = prepare_eval_dataloader(self.settings, self.accelerator, rows, _lengths(rows), self.collate)
        return QuestionSet(name, self.splits[name], rows, loader, order)

    def _files(self, split: str, predictions: list[Prediction]) -> dict[str, str]:
        threshold, n_best = self.settings.threshold, self.settings.n_best_size
        files: dict[str, dict[str, Any]] = {
            split: {p.id: p.answer(threshold) for p in predictions},
            f"nbest_{split}": {p.id: nbest_entries(p, threshold is not None, n_best) for p in predictions},
        }
        if threshold is not None:
            files[f"null_odds_{split}"] = {p.id: p.null_odds for p in predictions}
        return {
            f"{name}.json": json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()
        }


def _lengths(windows: list[Window]) -> list[int]:
    return [len(window.input_ids) for window in windows]
