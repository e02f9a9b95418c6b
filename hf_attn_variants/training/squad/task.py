"""Fine-tuning on SQuAD: its questions, its model, its scores and the files that the official scripts read."""

import json
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForQuestionAnswering, PreTrainedModel

from ...modeling.mechanisms.patterns.pattern_table import takes_global_mask
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask, shown_metrics
from ..engine.losses import Objective
from ..engine.models import check_trained_head, load_config, load_model
from ..engine.tokenizers import fit_token_types, load_tokenizer
from .answers import Prediction, nbest_entries
from .data import Question, hash_questions, load_squad
from .evaluation import QuestionSet, SquadEvaluator, span_objective
from .settings import SquadSettings
from .windows import Window, checked_stride, make_windows, window_collator

__all__ = ["SquadFineTuning"]


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
        scores = ", ".join(f"{name} {results[f'eval_{name}']:.2f}" for name in shown_metrics(self, results))
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
