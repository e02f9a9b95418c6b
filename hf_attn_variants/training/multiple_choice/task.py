"""Multiple choice on a user's own tables: their splits, scores and predictions."""

import json
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from ..classification.evaluation import EvalSet
from .answers import shown_answer
from .base import NO_QUESTIONS, ChoiceEvaluator, ChoiceTask, scores_of
from .data import load_choice_data
from .settings import MultipleChoiceSettings

__all__ = ["MultipleChoiceFineTuning"]


class MultipleChoiceFineTuning(ChoiceTask[MultipleChoiceSettings]):
    """Which choice is right: RACE (arXiv:1704.04683), SWAG (arXiv:1808.05326), or a user's own questions.

    A question may have more choices than another. An encoder-decoder reads them in words (see `words`). The results
    have `eval_accuracy`; with answers, the test rows' are `test_accuracy` and `test_loss`.
    """

    name = "multiple choice"

    def __init__(self, settings: MultipleChoiceSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.data = load_choice_data(settings)
        splits = self.data.splits
        settings.check_dev("validation" in splits)
        self.train = splits.get("train", NO_QUESTIONS).first(settings.max_train_samples)
        self.dev = splits["validation"].first(settings.max_eval_samples) if "validation" in splits else None

    def make_evaluator(self, model: nn.Module) -> ChoiceEvaluator | None:
        test = self.data.splits.get("test")
        self.test = None if test is None else self.eval_set(test)
        return super().make_evaluator(model)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "answer format": self.data.answer_format}

    def results(self) -> dict[str, Any]:
        columns = self.data.columns
        named = {
            "context_column": columns.context,
            "question_column": columns.question,
            "answer_column": columns.answer,
        }
        found: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        found |= {"worded": True} if self.config.is_encoder_decoder else {}
        most = max(split.most_choices for split in self.data.splits.values())
        found |= {"choices_columns": list(columns.choices), "most_choices": most}
        return found | ({"answer_format": self.data.answer_format} if columns.answer is not None else {})

    def predictions(self, evaluator: ChoiceEvaluator) -> dict[str, str]:
        dev: Any = evaluator.dev  # called where there is one
        return {"dev.jsonl": self._lines(dev, evaluator.dev_log_shares)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.test is None:
            return {}, {}
        found = self.evaluator.log_shares(self.test)
        results: dict[str, Any] = {"test_samples": len(self.test.split)}
        if self.test.labels is not None:
            scores = scores_of(found, np.asarray(self.test.labels))
            results |= {f"test_{name}": value for name, value in scores.items()}
        return results, {"test.jsonl": self._lines(self.test, found)}

    def summary(self, results: dict[str, Any]) -> str:
        lines = []
        for prefix, split in (("eval_", "dev"), ("test_", "test")):
            if f"{prefix}samples" in results:
                accuracy = results.get(f"{prefix}accuracy")
                scores = "predicted" if accuracy is None else f"accuracy {accuracy:.4f}"
                lines.append(f"{self.name} {split} ({results[f'{prefix}samples']} questions): {scores}\n")
        return "".join(lines)

    def _lines(self, questions: EvalSet, log_shares: np.ndarray) -> str:
        """Return a file of predictions: each question's number, answer if known, prediction and probabilities."""
        data, answer_format = questions.split.data, self.data.answer_format
        files, numbers, choices = data["file"][:], data["index"][:], data["choices"][:]
        firsts, own = data["text1"][:], data["question"][:]
        several = len({*files}) > 1
        lines = []
        for i, (number, texts) in enumerate(zip(numbers, choices, strict=True)):
            record: dict[str, Any] = {"file": files[i]} if several else {}
            record["row"] = number
            if questions.labels is not None:
                record["answer"] = shown_answer(questions.labels[i], texts, answer_format)
            best = int(log_shares[i].argmax())
            record["prediction"] = shown_answer(best, texts, answer_format)
            record["choice"] = texts[best]
            record["probabilities"] = [float(f"{share:.6g}") for share in np.exp(log_shares[i, : len(texts)])]
            record |= {"text": firsts[i]} if own[i] is None else {"context": firsts[i], "question": own[i]}
            record["choices"] = texts
            lines.append(json.dumps(record, ensure_ascii=False))
        return "\n".join(lines) + "\n"
