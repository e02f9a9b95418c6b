"""Fine-tuning on multiple choice, with a base class that the SuperGLUE example also uses."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from choice_data import format_answer, load_choice_data
from choice_models import ChoiceHead, ChoiceLikelihood
from scipy.special import log_softmax
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_attn_variants.training import FineTuningTask
from hf_attn_variants.training.classification.data import ClassificationSplit, hash_rows, make_in_memory_dataset
from hf_attn_variants.training.classification.task import EvalSet
from hf_attn_variants.training.engine.models import load_config
from hf_attn_variants.training.engine.optimization import Objective
from hf_attn_variants.training.engine.settings import check_dev_settings

NO_TRAINING_QUESTIONS = ClassificationSplit("train", make_in_memory_dataset({}))


def format_question(row: dict[str, Any]) -> str:
    r"""Format a question as in UnifiedQA (arXiv 2005.00700): "question \n (A) yes (B) no \n context".

    The separator is a backslash followed by n. The context comes last, so that truncation to `max_length` shortens it.
    """
    names = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(row["choices"]))]
    choices = " ".join(f"({name}) {choice}" for name, choice in zip(names, row["choices"], strict=True))
    parts = (row["text1"], choices) if row["question"] is None else (row["question"], choices, row["text1"])
    return " \\n ".join(parts)


class ChoiceTask(FineTuningTask[Any]):
    """Base class for models that select one of several texts. Subclasses set `train` and `dev` in `__init__`.

    Attributes:
        choice_model: The model that scores the choices.
        format_row: A function that converts a row to the text that an encoder-decoder reads.
        train: The training questions, which are empty if the run only evaluates the model.
        dev: The dev questions, or None without a dev split.
        dev_log_probabilities: The log-probabilities of the choices from the last evaluation [questions, choices].
    """

    train: ClassificationSplit
    dev: ClassificationSplit | None
    main_metric = "accuracy"
    shown_metrics: Sequence[str] = ("accuracy",)
    format_row = staticmethod(format_question)

    def __init__(self, settings: Any, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config = load_config(settings)
        kind = ChoiceLikelihood if self.config.is_encoder_decoder else ChoiceHead
        self.choice_model: Any = kind(settings, self.config, accelerator, self.format_row)
        self.tokenizer, self.collate = self.choice_model.tokenizer, self.choice_model.collate

    def load_model(self) -> PreTrainedModel:
        model = self.choice_model.load_model()
        tokenized = self._tokenize(self.train) if len(self.train) else make_in_memory_dataset({"length": []})
        self.token_counts, self.rows = tokenized["length"], tokenized.remove_columns("length")
        return model

    def get_lengths(self) -> Sequence[int]:
        return self.token_counts

    def make_objective(self) -> Objective:
        return self.choice_model.make_objective()

    def prepare_evaluation(self) -> bool:
        self.dev_set: Any = self.dev and self.make_eval_set(self.dev)
        return self.dev_set is not None

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the dev questions."""
        self.dev_log_probabilities = self.compute_log_probabilities(self.dev_set)
        return self.compute_scores(self.dev_set, self.dev_log_probabilities)

    def compute_scores(self, questions: EvalSet, log_probabilities: np.ndarray) -> dict[str, float]:
        """Return the accuracy and the mean loss per question in nats."""
        labels = np.asarray(questions.labels)
        right = log_probabilities[np.arange(len(labels)), labels]
        return {"accuracy": float((log_probabilities.argmax(-1) == labels).mean()), "loss": float(-right.mean())}

    def compute_log_probabilities(self, questions: EvalSet) -> np.ndarray:
        """Return the log-probabilities of the choices, with minus infinity for missing choices."""
        num_choices = max(map(len, questions.split.data["text2"]))

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
            logits = self.choice_model.scores(self.model, batch)
            return (nn.functional.pad(logits, (0, num_choices - logits.shape[1]), value=-torch.inf),)

        [logits] = self.run_model_on_rows(questions.batches, outputs, questions.split.name)
        return log_softmax(logits.astype(np.float64), axis=-1)

    def make_eval_set(self, split: ClassificationSplit) -> EvalSet:
        """Tokenize a split and return it together with its batches."""
        data = self._tokenize(split)
        unused = [name for name in ("length", "label") if name in data.column_names]
        batches = self.make_eval_batches(data.remove_columns(unused), data["length"])
        return EvalSet(split, batches, data["label"][:] if "label" in unused else None)

    def _tokenize(self, split: ClassificationSplit) -> Any:
        """Tokenize a split, first in the main process, whose cache the other processes then read."""
        with self.accelerator.main_process_first():
            return self.choice_model.tokenize(split)

    def get_fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.train), "hash of the training data": hash_rows(self.train)}

    def get_dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": self.dev and hash_rows(self.dev)}

    def get_dev_results(self) -> dict[str, Any]:
        rows = len(self.dev_set.split)
        return {"eval_samples": rows, "eval_samples_per_second": round(rows / max(self.eval_seconds, 1e-9), 2)}


class MultipleChoiceFineTuning(ChoiceTask):
    """Fine-tuning on RACE (arXiv 1704.04683), SWAG (arXiv 1808.05326), or other tables of questions."""

    name = "multiple choice"

    def __init__(self, settings: Any, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.splits, self.columns = load_choice_data(settings)
        check_dev_settings(settings, "validation" in self.splits)
        self.train = self.splits.get("train", NO_TRAINING_QUESTIONS).take(settings.max_train_samples)
        dev = self.splits.get("validation")
        self.dev = dev and dev.take(settings.max_eval_samples)

    def get_results(self) -> dict[str, Any]:
        columns = {name: value for name, value in self.columns.items() if value is not None}
        return columns | ({"worded": True} if self.config.is_encoder_decoder else {})

    def get_prediction_files(self) -> dict[str, str]:
        return {"dev.jsonl": self._format_predictions(self.dev_set, self.dev_log_probabilities)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if "test" not in self.splits:
            return {}, {}
        test = self.make_eval_set(self.splits["test"])
        shares = self.compute_log_probabilities(test)
        scores = {} if test.labels is None else self.compute_scores(test, shares)
        results = {f"test_{name}": value for name, value in scores.items()}
        return {"test_samples": len(test.split), **results}, {"test.jsonl": self._format_predictions(test, shares)}

    def format_summary(self, results: dict[str, Any]) -> str:
        return super().format_summary(results) if self.dev else f"{self.name} test ({results['test_samples']} rows); "

    def _format_predictions(self, questions: EvalSet, log_probabilities: np.ndarray) -> str:
        """Return one JSON object per question with its row, answer (if known), prediction, probabilities and texts."""
        answer_format, lines = self.columns["answer_format"], []
        several = len({*questions.split.data["file"]}) > 1
        for i, row in enumerate(questions.split.data):
            choices, best = row["choices"], int(log_probabilities[i].argmax())
            record = {"file": row["file"]} if several else {}
            record["row"] = row["index"]
            if questions.labels is not None:
                record["answer"] = format_answer(questions.labels[i], choices, answer_format)
            record |= {"prediction": format_answer(best, choices, answer_format), "choice": choices[best]}
            record["probabilities"] = [float(f"{share:.6g}") for share in np.exp(log_probabilities[i, : len(choices)])]
            question = row["question"]
            record |= {"text": row["text1"]} if question is None else {"context": row["text1"], "question": question}
            lines.append(json.dumps({**record, "choices": choices}, ensure_ascii=False) + "\n")
        return "".join(lines)
