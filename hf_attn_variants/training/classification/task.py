"""Classification and regression on the user's own tables: objective, evaluation, metrics and predictions."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedModel

from ...files import CONFUSION_FILE
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask, MetricEvaluator, run_rows
from ..engine.losses import Objective, compute_logits
from ..engine.models import LabelMap, check_trained_head, get_model_name, load_classifier, load_config
from ..engine.options import check_metric
from ..engine.settings import FineTuningSettings
from ..engine.tokenizers import append_end_tokens, check_max_length, fit_token_types, load_tokenizer
from .data import ClassificationSplit, hash_rows, load_classification_data, make_rows, tokenize_split
from .labels import LabelScheme, compute_class_weights
from .metrics import (
    MAX_DRAWN_CLASSES,
    Predictions,
    compute_classification_metrics,
    compute_metric_details,
    draw_confusion_matrix,
)
from .settings import METRICS_BY_PROBLEM, MULTI_LABEL, REGRESSION, ClassificationSettings

__all__ = [
    "NO_TRAINING_ROWS",
    "ClassificationFineTuning",
    "EvalSet",
    "LogitsEvaluator",
    "SequenceClassification",
    "make_classification_objective",
    "to_model_labels",
]


def make_classification_objective(weights: Tensor | None = None) -> Objective:
    """Return the loss of a classifier or regressor, summed over the examples. It depends on the labels of the batch.

    For class ids [b], it is the cross-entropy, multiplied by the weight of the class. For numbers [b], it is the
    squared error. For indicators [b, L] (0 or 1 per label), it is the mean of the binary cross-entropies over the
    labels. `weights` then multiplies the terms of the labels that an example has.

    Args:
        weights: One weight per label [L], in the order of the model's outputs. None: all weights are 1.
    """
    return Objective(
        loss_sum=lambda model, batch: compute_loss_sum(compute_logits(model, batch).float(), batch["labels"], weights),
        count=lambda batch: len(batch["labels"]),
    )


def compute_loss_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the loss of `make_classification_objective` for logits [b, L]."""
    weights = None if weights is None else weights.to(logits.device)
    if labels.dim() == 2:
        losses = functional.binary_cross_entropy_with_logits(
            logits, labels.float(), pos_weight=weights, reduction="none"
        )
        return losses.mean(-1).sum()
    if labels.is_floating_point():
        return functional.mse_loss(logits.squeeze(-1), labels.float(), reduction="sum")
    return functional.cross_entropy(logits, labels, weight=weights, reduction="sum")


def to_model_labels(labels: np.ndarray, label_map: LabelMap) -> np.ndarray:
    """Reorder labels from the order of the task to the order of the model's outputs.

    Args:
        labels: Class ids [rows], one 0 or 1 per label [rows, L], or numbers [rows], which do not change.
        label_map: The two orders.
    """
    if labels.ndim == 2:
        return labels[:, list(label_map.to_task)]
    return labels if labels.dtype.kind == "f" else np.asarray(label_map.to_model)[labels]


@dataclass
class EvalSet:
    """A tokenized split to evaluate or to predict.

    Attributes:
        split: The rows.
        loader: The batches. The longest rows come first.
        order: The index of the row that comes at each position.
        labels: The labels in the order of the task, or None if they are unknown.
    """

    split: ClassificationSplit
    loader: DataLoader
    order: Sequence[int]
    labels: Any


class LogitsEvaluator(MetricEvaluator, ABC):
    """Evaluator of dev splits that computes the metrics from the logits of all rows."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        sets: list[EvalSet],
        label_map: LabelMap,
        settings: FineTuningSettings,
        weights: Tensor | None = None,
    ):
        super().__init__(self._compute_scores)
        self.accelerator, self.model, self.sets = accelerator, model, sets
        self.label_map, self.settings, self.weights = label_map, settings, weights

    @abstractmethod
    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        """Return the metrics of a split from its logits [rows, labels], in the order of the model's outputs."""

    def _compute_scores(self) -> dict[str, float]:
        """Return the metrics of every dev split. Names of the second one (MNLI mismatched) end in `_mm`."""
        metrics: dict[str, float] = {}
        for i, eval_set in enumerate(self.sets):
            logits = self.predict_logits(eval_set)
            values = self.score(eval_set, logits)
            values["loss"] = self._compute_loss(eval_set, logits)
            metrics |= {key + ("_mm" if i else ""): value for key, value in values.items()}
        return metrics

    def predict_logits(self, eval_set: EvalSet) -> np.ndarray:
        """Return the logits of a split [rows, labels], in the order of its rows."""
        loader, order, name = eval_set.loader, eval_set.order, eval_set.split.name
        return run_rows(self.accelerator, self.model, loader, order, self._compute_logits, name, self.settings)[0]

    def _compute_logits(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        """Return the logits of a batch [b, labels] in single precision."""
        return (compute_logits(self.model, batch).float(),)

    def _compute_loss(self, eval_set: EvalSet, logits: np.ndarray) -> float:
        """Return the mean loss of a split."""
        labels = to_model_labels(np.asarray(eval_set.labels), self.label_map)
        return float(compute_loss_sum(torch.from_numpy(logits), torch.from_numpy(labels), self.weights)) / len(labels)


SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)
EvaluatorT = TypeVar("EvaluatorT", bound=LogitsEvaluator)
NO_TRAINING_ROWS = ClassificationSplit("train", make_rows({}))


class SequenceClassification(FineTuningTask[SettingsT, EvaluatorT]):
    """Training of a classifier or regressor on texts or pairs of texts.

    The `__init__` of a subclass calls `fit_tokenizer` and sets the attributes below.

    Attributes:
        labels: The names of the classes in the order of their ids. None for a regression.
        problem_type: The problem type of Transformers.
        train: The training rows. Empty for a run that only evaluates.
        dev_splits: The splits that are evaluated. The first one selects the best weights.
        weights: One weight per label, in the order of `labels`. `load_model` reorders them to the order of the outputs
            (`output_weights`).
    """

    labels: Sequence[str] | None
    problem_type: str
    train: ClassificationSplit
    dev_splits: list[ClassificationSplit]
    weights: Tensor | None = None

    def __init__(self, settings: SettingsT, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config = load_config(settings)
        check_trained_head(settings, self.config, "ForSequenceClassification", "classifies texts")
        self.tokenizer = load_tokenizer(settings, self.config)

    def fit_tokenizer(self, pair: bool) -> None:
        """Fit the tokenizer to the model, and check the length of texts or pairs of texts.

        Raises:
            ValueError: If the tokenizer or the length does not fit the model.
        """
        fit_token_types(self.tokenizer, self.config)
        append_end_tokens(self.tokenizer, self.config, pair)
        length, multiple = self.settings.max_length, self.settings.pad_to_multiple_of
        check_max_length(length, self.config, self.tokenizer, pair, multiple=multiple)
        self.collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple)

    def load_model(self) -> PreTrainedModel:
        model, self.label_map = load_classifier(
            self.settings, self.config, self.labels, AutoModelForSequenceClassification, self.problem_type
        )
        self.output_weights = None if self.weights is None else self.weights[list(self.label_map.to_task)]
        tokenized = self._tokenize_training_rows(self.train)
        self.token_counts = tokenized["length"]
        self.rows = tokenized.remove_columns("length")
        return model

    def lengths(self) -> list[int]:
        return self.token_counts

    def objective(self) -> Objective:
        return make_classification_objective(self.output_weights)

    def fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.train), "hash of the training data": hash_rows(self.train)}

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": [hash_rows(split) for split in self.dev_splits]}

    def dev_results(self, evaluator: EvaluatorT) -> dict[str, Any]:
        rows = sum(map(len, self.dev_splits))
        return {"eval_samples": rows, "eval_samples_per_second": round(rows / max(evaluator.seconds, 1e-9), 2)}

    def make_eval_set(self, split: ClassificationSplit) -> EvalSet:
        """Tokenize a split and return it with its batches."""
        data = self._tokenize(split)
        unused = [name for name in ("length", "label") if name in data.column_names]
        loader, order = prepare_eval_dataloader(
            self.settings, self.accelerator, data.remove_columns(unused), data["length"], self.collate
        )
        return EvalSet(split, loader, order, data["label"][:] if "label" in unused else None)

    def _tokenize(self, split: ClassificationSplit) -> Dataset:
        """Tokenize a split. The main process tokenizes first, and the other processes read its cache."""
        with self.accelerator.main_process_first():
            data = tokenize_split(split, self.tokenizer, self.settings.max_length)
        if self.config.is_encoder_decoder:
            self._check_end_tokens(split, data)
        return data

    def _check_end_tokens(self, split: ClassificationSplit, data: Dataset) -> None:
        """Check that all rows have the same number of end tokens.

        The classification heads of Transformers for encoder-decoders read the last end token, and require that all
        rows of a batch have equally many.
        """
        texts = ("a", "a") if "text2" in split.data.column_names else ("a",)
        end, expected = self.config.eos_token_id, self.tokenizer(*texts)["input_ids"].count(self.config.eos_token_id)
        wrong = next((i for i, ids in enumerate(data["input_ids"]) if ids.count(end) != expected), None)
        if wrong is not None:
            raise ValueError(
                f"{split.describe_row(wrong)}: The text must not contain {self.tokenizer.eos_token}, because the "
                "classifier reads the model's output at this token. Remove it from the text."
            )

    def _tokenize_training_rows(self, split: ClassificationSplit) -> Dataset:
        """Tokenize the training rows, with labels in the order of the model's outputs."""
        if not len(split):
            return make_rows({"length": []})
        data, to_model, to_task = self._tokenize(split), self.label_map.to_model, self.label_map.to_task
        if to_task == tuple(sorted(to_task)):
            return data
        if isinstance(data[0]["label"], list):
            return data.map(lambda row: {"label": [row["label"][i] for i in to_task]})
        return data.map(lambda row: {"label": to_model[row["label"]]})


class ClassificationEvaluator(LogitsEvaluator):
    """Evaluator of the dev rows. It stores the last predictions, so that they are not computed twice."""

    def __init__(self, scheme: LabelScheme, threshold: float, *args: Any):
        super().__init__(*args)
        self.scheme, self.threshold = scheme, threshold
        self.predictions: dict[str, Predictions] = {}

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        predicted = self.predictions[eval_set.split.name] = self.to_predictions(logits)
        return compute_classification_metrics(self.scheme, predicted, np.asarray(eval_set.labels))

    def to_predictions(self, logits: np.ndarray) -> Predictions:
        """Return the predictions for logits [rows, labels] in the order of the model's outputs."""
        order = list(self.label_map.to_model)
        return Predictions(self.scheme, logits[:, order], self.threshold)


class ClassificationFineTuning(SequenceClassification[ClassificationSettings, ClassificationEvaluator]):
    """Fine-tuning on tables with one label per row, several labels per row, or a number per row.

    The results contain `eval_<metric>` of the dev rows for the metrics of `settings.METRICS_BY_PROBLEM`, and
    `eval_per_class`, `eval_confusion_matrix` and `eval_undefined` (see `metrics.compute_metric_details`). If the test
    rows have labels, their results start with `test_`.

    Example:
        ```python
        settings = ClassificationSettings(
            model_name_or_path="bert-gqa4", train_file="train.csv", validation_file="dev.csv", output_dir="out"
        )
        results = fine_tune(ClassificationFineTuning, settings)
        ```
    """

    def __init__(self, settings: ClassificationSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.data = load_classification_data(settings, self.config)
        self.scheme = self.data.scheme
        self.problem_type = self.scheme.problem_type
        self.labels = None if self.problem_type == REGRESSION else self.scheme.names
        self.fit_tokenizer(pair=len(self.data.text_columns) == 2)
        self.metric_names = METRICS_BY_PROBLEM[self.problem_type]
        check_metric(settings.metric_for_best_model, ("loss", *self.metric_names))
        settings.check_dev("validation" in self.data.splits)
        self.train = self._select_training_split()
        self.dev_splits = [
            split.take(settings.max_eval_samples) for name, split in self.data.splits.items() if name == "validation"
        ]
        values = self.train.data["label"][:] if len(self.train) else []
        weights = compute_class_weights(settings.class_weights, self.scheme, values)
        self.weights = None if weights is None else torch.tensor(weights)
        self.name = self.problem_type.replace("_", " ")
        self.main_metric, self.shown_metrics = self.metric_names[0], self.metric_names

    def _select_training_split(self) -> ClassificationSplit:
        """Return the training rows of the run, after --shuffle_train_dataset and --max_train_samples."""
        split = self.data.splits.get("train", NO_TRAINING_ROWS)
        if len(split) and self.settings.shuffle_train_dataset:
            order = torch.randperm(len(split), generator=torch.Generator().manual_seed(self.settings.seed))
            split = ClassificationSplit(split.name, split.data.select(order.tolist()))
        return split.take(self.settings.max_train_samples)

    def make_evaluator(self, model: nn.Module) -> ClassificationEvaluator | None:
        sets = [self.make_eval_set(split) for split in self.dev_splits]
        test = self.data.splits.get("test")
        self.test = None if test is None else self.make_eval_set(test)
        run = self.accelerator, model, sets, self.label_map, self.settings, self.output_weights
        self.evaluator = ClassificationEvaluator(self.scheme, self.data.threshold, *run)
        return self.evaluator if sets else None

    def fingerprint(self) -> dict[str, Any]:
        labels = {"problem type": self.problem_type, "labels of the model": list(self.scheme.names)}
        return {**super().fingerprint(), **labels}

    def dev_results(self, evaluator: ClassificationEvaluator) -> dict[str, Any]:
        [dev] = evaluator.sets
        details = compute_metric_details(self.scheme, evaluator.predictions[dev.split.name], np.asarray(dev.labels))
        return {**super().dev_results(evaluator), **{f"eval_{name}": value for name, value in details.items()}}

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = {"problem_type": self.problem_type, "text_columns": list(self.data.text_columns)}
        if self.data.label_column is not None:
            results["label_column"] = self.data.label_column
        if self.data.label_separator is not None:
            results["label_separator"] = self.data.label_separator
        if self.problem_type == MULTI_LABEL:
            results["threshold"] = self.data.threshold
        if self.labels is not None:
            results["labels"] = list(self.labels)
        if self.weights is not None:
            results["class_weights"] = dict(zip(self.scheme.names, self.weights.tolist(), strict=True))
        return results

    def predictions(self, evaluator: ClassificationEvaluator) -> dict[str, str]:
        [dev] = evaluator.sets
        return {"dev.jsonl": self._format_predictions(dev, evaluator.predictions[dev.split.name])}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        for dev in self.evaluator.sets:
            self._draw_confusion_matrix(dev, self.evaluator.predictions[dev.split.name], CONFUSION_FILE, "dev")
        if self.test is None:
            return {}, {}
        predicted = self.evaluator.to_predictions(self.evaluator.predict_logits(self.test))
        results: dict[str, Any] = {"test_samples": len(self.test.split)}
        if self.test.labels is not None:
            labels = np.asarray(self.test.labels)
            values = compute_classification_metrics(self.scheme, predicted, labels) | compute_metric_details(
                self.scheme, predicted, labels
            )
            results |= {f"test_{name}": value for name, value in values.items()}
            self._draw_confusion_matrix(self.test, predicted, CONFUSION_FILE.replace(".", "_test."), "test")
        return results, {"test.jsonl": self._format_predictions(self.test, predicted)}

    def summary(self, results: dict[str, Any]) -> str:
        lines = []
        for prefix, split in (("eval_", "dev"), ("test_", "test")):
            if f"{prefix}samples" in results:
                metrics = [(name, results[prefix + name]) for name in self.metric_names if prefix + name in results]
                values = [f"{name} {'none' if math.isnan(value) else f'{value:.4f}'}" for name, value in metrics]
                scores = ", ".join(values) or "predicted"
                lines.append(f"{self.name} {split} ({results[f'{prefix}samples']} rows): {scores}\n")
        return "".join(lines)

    def _draw_confusion_matrix(self, rows: EvalSet, predicted: Predictions, name: str, split: str) -> None:
        """Draw the confusion matrix of a split, if there is one label per row and not too many classes."""
        drawn = self.problem_type not in (REGRESSION, MULTI_LABEL) and len(self.scheme.names) <= MAX_DRAWN_CLASSES
        if not drawn or not self.accelerator.is_main_process:
            return
        matrix = compute_metric_details(self.scheme, predicted, np.asarray(rows.labels))["confusion_matrix"]
        title = f"{get_model_name(self.settings)}, {split}: {len(rows.split):,} rows"
        draw_confusion_matrix(matrix, self.scheme.names, Path(self.settings.output_dir) / name, title)

    def _format_predictions(self, rows: EvalSet, predicted: Predictions) -> str:
        """Return the content of a JSONL file of predictions.

        Each line has the number of the row, the label if it is known, the prediction, the probabilities and the texts.
        """
        files, numbers = rows.split.data["file"][:], rows.split.data["index"][:]
        columns = self.data.text_columns
        texts = [rows.split.data[f"text{i + 1}"][:] for i in range(len(columns))]
        several = len(set(files)) > 1
        lines = []
        for i, number in enumerate(numbers):
            record: dict[str, Any] = {"file": files[i]} if several else {}
            record["row"] = number
            if rows.labels is not None:
                record["label"] = self._to_names(rows.labels[i])
            record["prediction"] = self._to_names(predicted.chosen[i])
            if self.labels is not None:
                shares = [float(f"{share:.6g}") for share in predicted.probabilities[i]]
                record["probabilities"] = dict(zip(self.scheme.names, shares, strict=True))
            record["text"] = {column: values[i] for column, values in zip(columns, texts, strict=True)}
            lines.append(json.dumps(record, ensure_ascii=False))
        return "\n".join(lines) + "\n"

    def _to_names(self, value: Any) -> Any:
        """Return a label as its name, as a list of names, or as a number."""
        names = self.scheme.names
        if self.problem_type == REGRESSION:
            return float(f"{value:.7g}")  # what single precision holds
        if self.problem_type == MULTI_LABEL:
            return [name for name, has in zip(names, value, strict=True) if has]
        return names[int(value)]
