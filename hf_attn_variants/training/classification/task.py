"""Classification and regression on a user's own tables: their splits, scores, predictions and confusion matrices."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from ...files import CONFUSION_FILE
from ..engine.models import model_name
from ..engine.options import check_metric
from .base import NO_ROWS, SequenceClassification
from .confusion import MOST_DRAWN, draw_confusion
from .data import load_classification_data
from .evaluation import EvalSet, LogitsEvaluator
from .labels import LabelScheme, class_weights
from .metrics import Predictions, score, score_details
from .settings import METRICS, MULTI_LABEL, REGRESSION, ClassificationSettings
from .splits import ClassificationSplit

__all__ = ["ClassificationFineTuning"]


class ClassificationEvaluator(LogitsEvaluator):
    """Evaluates the dev rows; keeps the last predictions, so that the final ones need no second pass."""

    def __init__(self, scheme: LabelScheme, threshold: float, *args: Any):
        super().__init__(*args)
        self.scheme, self.threshold = scheme, threshold
        self.predictions: dict[str, Predictions] = {}

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        found = self.predictions[eval_set.split.name] = self.to_predictions(logits)
        return score(self.scheme, found, np.asarray(eval_set.labels))

    def to_predictions(self, logits: np.ndarray) -> Predictions:
        """Return what the model's logits [rows, labels] say."""
        order = list(self.label_map.to_model)
        return Predictions(self.scheme, logits[:, order], self.threshold)


class ClassificationFineTuning(SequenceClassification[ClassificationSettings, ClassificationEvaluator]):
    """One label a row of several, several labels a row, or a number.

    The results have `eval_<metric>` of the dev rows, as `settings.METRICS` names them, `eval_per_class`,
    `eval_confusion_matrix` and `eval_undefined` (see `metrics.score_details`); with labels, the test rows' are
    `test_...`.
    """

    def __init__(self, settings: ClassificationSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.data = load_classification_data(settings, self.config)
        self.scheme = self.data.scheme
        self.problem_type = self.scheme.problem_type
        self.labels = None if self.problem_type == REGRESSION else self.scheme.names
        self.fit_tokenizer(pair=len(self.data.text_columns) == 2)
        self.metric_names = METRICS[self.problem_type]
        check_metric(settings.metric_for_best_model, ("loss", *self.metric_names))
        settings.check_dev("validation" in self.data.splits)
        self.train = self._training_split()
        self.dev_splits = [
            split.first(settings.max_eval_samples) for name, split in self.data.splits.items() if name == "validation"
        ]
        values = self.train.data["label"][:] if len(self.train) else []
        weights = class_weights(settings.class_weights, self.scheme, values)
        self.weights = None if weights is None else torch.tensor(weights)
        self.name = self.problem_type.replace("_", " ")
        self.main_metric, self.shown_metrics = self.metric_names[0], self.metric_names

    def _training_split(self) -> ClassificationSplit:
        split = self.data.splits.get("train", NO_ROWS)
        if len(split) and self.settings.shuffle_train_dataset:
            order = torch.randperm(len(split), generator=torch.Generator().manual_seed(self.settings.seed))
            split = ClassificationSplit(split.name, split.data.select(order.tolist()))
        return split.first(self.settings.max_train_samples)

    def make_evaluator(self, model: nn.Module) -> ClassificationEvaluator | None:
        sets = [self.eval_set(split) for split in self.dev_splits]
        test = self.data.splits.get("test")
        self.test = None if test is None else self.eval_set(test)
        run = self.accelerator, model, sets, self.label_map, self.settings, self.output_weights
        self.evaluator = ClassificationEvaluator(self.scheme, self.data.threshold, *run)
        return self.evaluator if sets else None

    def fingerprint(self) -> dict[str, Any]:
        found = {"problem type": self.problem_type, "labels of the model": list(self.scheme.names)}
        return {**super().fingerprint(), **found}

    def dev_results(self, evaluator: ClassificationEvaluator) -> dict[str, Any]:
        [dev] = evaluator.sets
        details = score_details(self.scheme, evaluator.predictions[dev.split.name], np.asarray(dev.labels))
        return {**super().dev_results(evaluator), **{f"eval_{name}": value for name, value in details.items()}}

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = {"problem_type": self.problem_type, "text_columns": list(self.data.text_columns)}
        if self.data.label_column is not None:
            found["label_column"] = self.data.label_column
        if self.data.label_separator is not None:
            found["label_separator"] = self.data.label_separator
        if self.problem_type == MULTI_LABEL:
            found["threshold"] = self.data.threshold
        if self.labels is not None:
            found["labels"] = list(self.labels)
        if self.weights is not None:
            found["class_weights"] = dict(zip(self.scheme.names, self.weights.tolist(), strict=True))
        return found

    def predictions(self, evaluator: ClassificationEvaluator) -> dict[str, str]:
        [dev] = evaluator.sets
        return {"dev.jsonl": self._lines(dev, evaluator.predictions[dev.split.name])}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        for dev in self.evaluator.sets:
            self._draw(dev, self.evaluator.predictions[dev.split.name], CONFUSION_FILE, "dev")
        if self.test is None:
            return {}, {}
        found = self.evaluator.to_predictions(self.evaluator.predict_logits(self.test))
        results: dict[str, Any] = {"test_samples": len(self.test.split)}
        if self.test.labels is not None:
            labels = np.asarray(self.test.labels)
            values = score(self.scheme, found, labels) | score_details(self.scheme, found, labels)
            results |= {f"test_{name}": value for name, value in values.items()}
            self._draw(self.test, found, CONFUSION_FILE.replace(".", "_test."), "test")
        return results, {"test.jsonl": self._lines(self.test, found)}

    def summary(self, results: dict[str, Any]) -> str:
        lines = []
        for prefix, split in (("eval_", "dev"), ("test_", "test")):
            if f"{prefix}samples" in results:
                given = [(name, results[prefix + name]) for name in self.metric_names if prefix + name in results]
                values = [f"{name} {'none' if math.isnan(value) else f'{value:.4f}'}" for name, value in given]
                scores = ", ".join(values) or "predicted"
                lines.append(f"{self.name} {split} ({results[f'{prefix}samples']} rows): {scores}\n")
        return "".join(lines)

    def _draw(self, rows: EvalSet, found: Predictions, name: str, split: str) -> None:
        drawn = self.problem_type not in (REGRESSION, MULTI_LABEL) and len(self.scheme.names) <= MOST_DRAWN
        if not drawn or not self.accelerator.is_main_process:
            return
        matrix = score_details(self.scheme, found, np.asarray(rows.labels))["confusion_matrix"]
        title = f"{model_name(self.settings)}, {split}: {len(rows.split):,} rows"
        draw_confusion(matrix, self.scheme.names, Path(self.settings.output_dir) / name, title)

    def _lines(self, rows: EvalSet, found: Predictions) -> str:
        """Return a file of predictions: each row's number, label if known, prediction, probabilities and texts."""
        files, numbers = rows.split.data["file"][:], rows.split.data["index"][:]
        columns = self.data.text_columns
        texts = [rows.split.data[f"text{i + 1}"][:] for i in range(len(columns))]
        several = len(set(files)) > 1
        lines = []
        for i, number in enumerate(numbers):
            record: dict[str, Any] = {"file": files[i]} if several else {}
            record["row"] = number
            if rows.labels is not None:
                record["label"] = self._named(rows.labels[i])
            record["prediction"] = self._named(found.chosen[i])
            if self.labels is not None:
                shares = [float(f"{share:.6g}") for share in found.probabilities[i]]
                record["probabilities"] = dict(zip(self.scheme.names, shares, strict=True))
            record["text"] = {column: values[i] for column, values in zip(columns, texts, strict=True)}
            lines.append(json.dumps(record, ensure_ascii=False))
        return "\n".join(lines) + "\n"

    def _named(self, value: Any) -> Any:
        names = self.scheme.names
        if self.problem_type == REGRESSION:
            return float(f"{value:.7g}")  # what single precision holds
        if self.problem_type == MULTI_LABEL:
            return [name for name, has in zip(names, value, strict=True) if has]
        return names[int(value)]
