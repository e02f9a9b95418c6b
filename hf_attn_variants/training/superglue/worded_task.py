"""Fine-tuning an encoder-decoder on a SuperGLUE task in words: it reads T5's wording, the likeliest answer counts."""

from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from ...superglue_tasks import SUPERGLUE, SuperGlueTask, get_superglue_task
from ..engine.text_rows import hash_texts
from ..multiple_choice.base import NO_QUESTIONS, ChoiceEvaluator, ChoiceTask
from ..multiple_choice.words import ChoiceWords
from .data import load_examples
from .diagnostics import DIAGNOSTICS, load_diagnostics, score_diagnostic
from .examples import Example
from .metrics import compute_superglue
from .settings import SuperGlueSettings
from .submission import submission
from .wording import as_logits, right_answers, worded_split

__all__ = ["WordedSuperGlue"]


class WordedEvaluator(ChoiceEvaluator):
    """Evaluates the dev split by the task's metrics.

    The loss is that of the right answers' share of the probability of all answers, in nats a text.
    """

    def __init__(self, task: SuperGlueTask, examples: list[Example], *args: Any):
        super().__init__(*args)
        self.task, self.examples = task, examples

    def _scores(self) -> dict[str, float]:
        dev: Any = self.dev  # there is one of every task
        self.dev_log_shares = self.log_shares(dev)
        metrics = compute_superglue(self.task, self.examples, as_logits(self.task, self.examples, self.dev_log_shares))
        rows = zip(self.dev_log_shares, right_answers(self.task, self.examples), strict=True)
        losses = [-np.logaddexp.reduce(shares[right]) for shares, right in rows if right]
        return metrics | {"loss": float(np.mean(losses))}


class WordedSuperGlue(ChoiceTask[SuperGlueSettings]):
    """Any SuperGLUE task (arXiv:1905.00537), worded as T5 words it (arXiv:1910.10683, appendix D).

    It is learned by writing the answer. What counts is the likeliest of the possible answers, so that each one is an
    answer; a model that learned to write nothing else writes the same.
    """

    def __init__(self, settings: SuperGlueSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_superglue_task(settings.task_name)
        self.examples = load_examples(settings, self.task)
        self.diagnostics = load_diagnostics(settings, self.task)
        self.train = self._split("train") if "train" in self.examples else NO_QUESTIONS
        self.dev = self._split("validation")
        self.name, self.main_metric = f"SuperGLUE {self.task.folder}, worded", self.task.main_metric
        self.shown_metrics = (*self.task.metrics, "combined_score")

    def make_way(self) -> ChoiceWords:
        return ChoiceWords(self.settings, self.config, self.accelerator, word=lambda row: row["text1"])

    def _split(self, name: str) -> Any:
        return worded_split(self.task, name, self.examples[name])

    def make_evaluator(self, model: nn.Module) -> WordedEvaluator:
        self.test = self.eval_set(self._split("test")) if "test" in self.examples else None
        dev: Any = self.dev
        run = self.accelerator, model, self.eval_set(dev), self.settings, self.way
        self.evaluator = WordedEvaluator(self.task, self.examples["validation"], *run)
        return self.evaluator

    def fingerprint(self) -> dict[str, Any]:
        named = {"benchmark": SUPERGLUE, "task_name": self.task.name, "worded": True}
        return {**named, **super().fingerprint()}

    def dev_fingerprint(self) -> dict[str, Any]:
        right = [str(places) for places in right_answers(self.task, self.examples["validation"])]
        return {**super().dev_fingerprint(), "hash of the right dev answers": hash_texts(right)}

    def dev_results(self, evaluator: ChoiceEvaluator) -> dict[str, Any]:
        rows, found = super().dev_results(evaluator), len(self.examples["validation"])
        return rows if rows["eval_samples"] == found else {**rows, "eval_questions": found}

    def results(self) -> dict[str, Any]:
        return {"benchmark": SUPERGLUE, "task_name": self.task.name, "worded": True}

    def predictions(self, evaluator: ChoiceEvaluator) -> dict[str, str]:
        dev = self.examples["validation"]
        return {self.task.submission_file("dev_"): self._submission(dev, evaluator.dev_log_shares)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        results: dict[str, Any] = {}
        files = {}
        if self.test is not None:
            found = self.evaluator.log_shares(self.test)
            files[self.task.submission_file()] = self._submission(self.examples["test"], found)
        for name, examples in self.diagnostics.items():
            found = self.evaluator.log_shares(self.eval_set(worded_split(self.task, name, examples)))
            results |= score_diagnostic(name, examples, found.argmax(-1))
            files[f"{DIAGNOSTICS[name]}.jsonl"] = self._submission(examples, found)
        return results, files

    def _submission(self, examples: list[Example], log_shares: np.ndarray) -> str:
        return submission(self.task, examples, as_logits(self.task, examples, log_shares))
