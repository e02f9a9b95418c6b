"""Fine-tuning on a SuperGLUE task: a classifier of texts, of COPA a model that chooses; which task a model gets."""

from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from ...superglue_tasks import SUPERGLUE, SuperGlueTask, get_superglue_task
from ..classification.base import NO_ROWS, SequenceClassification
from ..classification.evaluation import EvalSet, LogitsEvaluator
from ..classification.splits import ClassificationSplit, make_rows
from ..engine.finetune import fine_tune
from ..engine.models import load_config
from ..multiple_choice.base import NO_QUESTIONS, ChoiceEvaluator, ChoiceTask
from ..multiple_choice.choices import ChoiceSplit
from .data import load_examples
from .diagnostics import DIAGNOSTICS, load_diagnostics, score_diagnostic
from .examples import Example
from .metrics import compute_superglue
from .settings import SuperGlueSettings
from .submission import submission
from .worded_task import WordedSuperGlue

__all__ = ["CopaFineTuning", "SuperGlueFineTuning", "fine_tune_superglue"]


def fine_tune_superglue(settings: SuperGlueSettings) -> dict[str, Any]:
    """Fine-tune on the task that the settings name; return and raise what `engine.finetune.fine_tune` does.

    An encoder classifies texts, or of COPA chooses; an encoder-decoder reads the task in words, unless
    `settings.classifier` asks for a head.
    """
    if _reads_words(settings):
        return fine_tune(WordedSuperGlue, settings)
    if settings.task_name.lower() == "copa":
        return fine_tune(CopaFineTuning, settings)
    return fine_tune(SuperGlueFineTuning, settings)


def _reads_words(settings: SuperGlueSettings) -> bool:
    """Say whether the model reads the task in words; raise ValueError where it is told to do otherwise, and cannot."""
    config, name = load_config(settings), settings.model_name_or_path
    if settings.classifier and not config.is_encoder_decoder:
        raise ValueError(
            f"--classifier is for encoder-decoders; {name} ({config.model_type}) is an encoder, which has a head "
            "anyway: leave it out"
        )
    classifiers = [each for each in config.architectures or [] if each.endswith("ForSequenceClassification")]
    if config.is_encoder_decoder and settings.only_evaluates and classifiers and not settings.classifier:
        raise ValueError(f"{name} was saved as {classifiers[0]}: give --classifier")
    return config.is_encoder_decoder and not settings.classifier


class SuperGlueEvaluator(LogitsEvaluator):
    """Evaluates the dev split; keeps the last scores of its rows, so that the final ones need no second pass."""

    def __init__(self, task: SuperGlueTask, examples: dict[str, list[Example]], *args: Any):
        super().__init__(*args)
        self.task, self.examples = task, examples
        self.dev_scores = np.empty((0, 0))

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        self.dev_scores = self.in_tasks_order(logits)
        return compute_superglue(self.task, self.examples[eval_set.split.name], self.dev_scores)

    def in_tasks_order(self, logits: np.ndarray) -> np.ndarray:
        """Return the model's logits [rows, labels] in the order of the task's labels."""
        return logits[:, list(self.label_map.to_model)]


class SuperGlueFineTuning(SequenceClassification[SuperGlueSettings, SuperGlueEvaluator]):
    """BoolQ, CB, MultiRC, ReCoRD, RTE, WiC or WSC (arXiv:1905.00537), each as the classification of a text or pair.

    As in the paper's baselines, each answer of MultiRC and each candidate of ReCoRD is one such row, told by itself.
    Those mark the words of WiC and WSC by their states; here signs in the text mark them (see `examples`).
    """

    def __init__(self, settings: SuperGlueSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_superglue_task(settings.task_name)
        self.labels, self.problem_type = self.task.labels, "single_label_classification"
        self.fit_tokenizer(pair=len(self.task.fields) == 2)
        self.examples = load_examples(settings, self.task)
        self.diagnostics = load_diagnostics(settings, self.task)
        self.train = _rows("train", self.examples["train"]) if "train" in self.examples else NO_ROWS
        self.dev_splits = [_rows("validation", self.examples["validation"])]
        self.name, self.main_metric = f"SuperGLUE {self.task.folder}", self.task.main_metric
        self.shown_metrics = (*self.task.metrics, "combined_score")

    def make_evaluator(self, model: nn.Module) -> SuperGlueEvaluator:
        test = self.examples.get("test")
        self.test = None if test is None else self.eval_set(_rows("test", test))
        sets = [self.eval_set(split) for split in self.dev_splits]
        run = self.accelerator, model, sets, self.label_map, self.settings
        self.evaluator = SuperGlueEvaluator(self.task, self.examples, *run)
        return self.evaluator

    def fingerprint(self) -> dict[str, Any]:
        return {"benchmark": SUPERGLUE, "task_name": self.task.name, **super().fingerprint()}

    def dev_results(self, evaluator: SuperGlueEvaluator) -> dict[str, Any]:
        rows, found = super().dev_results(evaluator), len(self.examples["validation"])
        return rows if rows["eval_samples"] == found else {**rows, "eval_questions": found}

    def results(self) -> dict[str, Any]:
        return {
            "benchmark": SUPERGLUE,
            "task_name": self.task.name,
            "problem_type": self.problem_type,
            "labels": list(self.task.labels),
            "text_columns": list(self.task.fields),
        }

    def predictions(self, evaluator: SuperGlueEvaluator) -> dict[str, str]:
        dev = self.examples["validation"]
        return {self.task.submission_file("dev_"): submission(self.task, dev, evaluator.dev_scores)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        results: dict[str, Any] = {}
        files = {}
        if self.test is not None:
            logits = self._logits(self.test)
            files[self.task.submission_file()] = submission(self.task, self.examples["test"], logits)
        for name, examples in self.diagnostics.items():
            logits = self._logits(self.eval_set(_rows(name, examples)))
            results |= score_diagnostic(name, examples, logits.argmax(-1))
            files[f"{DIAGNOSTICS[name]}.jsonl"] = submission(self.task, examples, logits)
        return results, files

    def _logits(self, rows: EvalSet) -> np.ndarray:
        """Return the logits of rows to predict [rows, labels], in the order of the task's labels."""
        return self.evaluator.in_tasks_order(self.evaluator.predict_logits(rows))


class CopaFineTuning(ChoiceTask[SuperGlueSettings]):
    """COPA (arXiv:1905.00537): which of two sentences is the cause, or the effect, of a premise."""

    name = "SuperGLUE COPA"

    def __init__(self, settings: SuperGlueSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_superglue_task(settings.task_name)
        self.examples = load_examples(settings, self.task)
        self.train = _questions("train", self.examples["train"]) if "train" in self.examples else NO_QUESTIONS
        self.dev = _questions("validation", self.examples["validation"])

    def make_evaluator(self, model: nn.Module) -> ChoiceEvaluator | None:
        test = self.examples.get("test")
        self.test = None if test is None else self.eval_set(_questions("test", test))
        return super().make_evaluator(model)

    def fingerprint(self) -> dict[str, Any]:
        return {"benchmark": SUPERGLUE, "task_name": self.task.name, **super().fingerprint()}

    def results(self) -> dict[str, Any]:
        return {"benchmark": SUPERGLUE, "task_name": self.task.name}

    def predictions(self, evaluator: ChoiceEvaluator) -> dict[str, str]:
        dev = self.examples["validation"]
        return {self.task.submission_file("dev_"): submission(self.task, dev, evaluator.dev_log_shares)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.test is None:
            return {}, {}
        found = self.evaluator.log_shares(self.test)
        return {}, {self.task.submission_file(): submission(self.task, self.examples["test"], found)}


def _rows(name: str, examples: list[Example]) -> ClassificationSplit:
    """Return examples as rows of a classifier: each of their texts, or pairs, one."""
    texts = zip(*(each for example in examples for each in example.texts), strict=True)
    columns: dict[str, list] = {f"text{i}": list(column) for i, column in enumerate(texts, start=1)}
    columns["index"] = [example.index[-1] for example in examples for _ in example.texts]
    if examples[0].labels is not None:
        columns["label"] = [label for example in examples for label in example.labels or ()]
    return ClassificationSplit(name, make_rows(columns))


def _questions(name: str, examples: list[Example]) -> ChoiceSplit:
    """Return examples as questions with choices."""
    columns: dict[str, list] = {
        "text1": [example.texts[0][0] for example in examples],
        "text2": [[choice for _, choice in example.texts] for example in examples],
        "index": [example.index[0] for example in examples],
    }
    if examples[0].labels is not None:
        columns["label"] = [example.labels[0] for example in examples if example.labels]
    return ChoiceSplit(name, make_rows(columns))
