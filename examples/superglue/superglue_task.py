"""Fine-tuning on SuperGLUE with a text classifier, or with a multiple-choice model (for COPA and encoder-decoders)."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from accelerate import Accelerator
from choice_task import NO_TRAINING_QUESTIONS, ChoiceTask
from superglue_data import DIAGNOSTICS, Example, load_examples
from superglue_scores import compute_diagnostic_scores, compute_superglue_metrics, format_submission
from superglue_tasks import DATASET, get_superglue_task

from hf_attn_variants.training import FineTuningTask
from hf_attn_variants.training.classification.data import ClassificationSplit, make_in_memory_dataset
from hf_attn_variants.training.classification.task import (
    NO_TRAINING_ROWS,
    EvalSet,
    SequenceClassification,
)
from hf_attn_variants.training.engine.models import load_config


def get_task_class(settings: Any) -> type[Any]:
    """Return the task class for the SuperGLUE task and the model in the settings."""
    chooses = get_superglue_task(settings.task_name).name == "copa" or load_config(settings).is_encoder_decoder
    return SuperGlueChoice if chooses else SuperGlueClassification


class _SuperGlue(FineTuningTask[Any]):
    """Base class for both task classes.

    `dev_logits` and the result of `compute_split_logits` are in the format that `compute_superglue_metrics` expects.
    """

    config: Any

    def __init__(self, settings: Any, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_superglue_task(settings.task_name)
        self.examples = load_examples(settings, self.task)
        self.name, self.main_metric = f"SuperGLUE {self.task.folder}", self.task.main_metric
        self.shown_metrics = (*self.task.metrics, "combined_score")
        self.dev_logits = np.empty((0, 0))

    @abstractmethod
    def compute_split_logits(self, name: str) -> np.ndarray:
        """Return the logits for a split."""

    def get_results(self) -> dict[str, Any]:
        names = {"dataset_type": DATASET, "dataset_name": self.name, "dataset_config": self.task.name}
        return {"dataset": names, "task_name": self.task.name, "worded": self.config.is_encoder_decoder}

    def get_prediction_files(self) -> dict[str, str]:
        return {
            f"dev_{self.task.folder}.jsonl": format_submission(self.task, self.examples["validation"], self.dev_logits)
        }

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        results: dict[str, Any] = {}
        files = {}
        for name, folder in {"test": self.task.folder, **DIAGNOSTICS}.items():
            if name in self.examples:
                logits = self.compute_split_logits(name)
                files[f"{folder}.jsonl"] = format_submission(self.task, self.examples[name], logits)
                results |= compute_diagnostic_scores(name, self.examples[name], logits.argmax(-1))
        return results, files


class SuperGlueClassification(_SuperGlue, SequenceClassification[Any]):
    """Fine-tuning of a classifier for texts or pairs. Each MultiRC answer and each ReCoRD candidate is a pair.

    For WiC and WSC, the baselines in the paper use the hidden states of the relevant words. Here, the words are marked
    with symbols in the text.
    """

    def __init__(self, settings: Any, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.labels, self.problem_type = self.task.labels, "single_label_classification"
        self.configure_tokenizer(pair=len(self.task.fields) == 2)
        self.train = self._load_rows("train") if "train" in self.examples else NO_TRAINING_ROWS
        self.dev_splits = [self._load_rows("validation")]

    def _load_rows(self, name: str) -> ClassificationSplit:
        """Convert a split to texts with labels."""
        examples = self.examples[name]
        texts = zip(*(text for example in examples for text in example.texts), strict=True)
        columns: dict[str, list] = {f"text{i}": list(column) for i, column in enumerate(texts, start=1)}
        columns["index"] = [example.index[-1] for example in examples for _ in example.texts]
        if examples[0].labels is not None:
            columns["label"] = [label for example in examples for label in example.labels or ()]
        return ClassificationSplit(name, make_in_memory_dataset(columns))

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        self.dev_logits = logits[:, list(self.label_map.to_model)]
        return compute_superglue_metrics(self.task, self.examples["validation"], self.dev_logits)

    def compute_split_logits(self, name: str) -> np.ndarray:
        return self.predict_logits(self.make_eval_set(self._load_rows(name)))[:, list(self.label_map.to_model)]

    def get_results(self) -> dict[str, Any]:
        columns = {"labels": list(self.task.labels), "text_columns": list(self.task.fields)}
        return {**super().get_results(), "problem_type": self.problem_type, **columns}


class SuperGlueChoice(_SuperGlue, ChoiceTask):
    """Fine-tuning on COPA for encoders, and on every task for encoder-decoders.

    Encoder-decoders read texts in the T5 format and predict the most probable answer. The loss is the negative
    logarithm of the probability of the correct answers, relative to the probability of all answers.
    """

    @staticmethod
    def format_row(row: dict[str, Any]) -> str:
        """Return the text in a row, which is already in the T5 format."""
        return row["text1"]

    def __init__(self, settings: Any, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.train = self._make_questions("train") if "train" in self.examples else NO_TRAINING_QUESTIONS
        self.dev = self._make_questions("validation")

    def _make_questions(self, name: str) -> ClassificationSplit:
        """Convert a split to questions.

        A ReCoRD training question is repeated for each of its correct answers. The label of a dev question is the list
        of its correct answers.
        """
        rows = [
            (text, choices, example.index[-1], label)
            for example in self.examples[name]
            for text, choices, right in self._iterate_choices(example)
            for label in (right if name == "train" else [right if example.labels else None])
        ]
        columns = dict(zip(("text1", "text2", "index", "label"), map(list, zip(*rows, strict=True)), strict=True))
        columns["choices"] = columns["text2"]
        return ClassificationSplit(
            name, make_in_memory_dataset({k: v for k, v in columns.items() if v[0] is not None})
        )

    def _iterate_choices(self, example: Example) -> Iterator[tuple[str, list[str], list[int]]]:
        """Yield the texts in an example for the model, each with its choices and the indices of correct choices."""
        labels = example.labels or ()
        if self.task.name == "record":
            yield example.t5_texts[0], list(example.choices), [i for i, label in enumerate(labels) if label]
        elif not self.config.is_encoder_decoder:  # COPA
            yield example.texts[0][0], [choice for _, choice in example.texts], list(labels)
        else:
            for i, text in enumerate(example.t5_texts):
                yield text, list(self.task.labels), list(labels[i : i + 1])

    def compute_scores(self, questions: EvalSet, log_probabilities: np.ndarray) -> dict[str, float]:
        examples = self.examples["validation"]
        self.dev_logits = self._to_logits(examples, log_probabilities)
        pairs = zip(log_probabilities, questions.labels, strict=True)
        losses = [-np.logaddexp.reduce(shares[right]) for shares, right in pairs if right]
        return {**compute_superglue_metrics(self.task, examples, self.dev_logits), "loss": float(np.mean(losses))}

    def _to_logits(self, examples: Sequence[Example], log_probabilities: np.ndarray) -> np.ndarray:
        """Convert log-probabilities to logits of the choices. For ReCoRD, the shape is [candidates, 2]."""
        if self.task.name != "record":
            return log_probabilities
        right = np.concatenate([log_probabilities[i, : len(example.choices)] for i, example in enumerate(examples)])
        return np.stack([np.zeros_like(right), right], axis=1)

    def compute_split_logits(self, name: str) -> np.ndarray:
        return self._to_logits(
            self.examples[name], self.compute_log_probabilities(self.make_eval_set(self._make_questions(name)))
        )
