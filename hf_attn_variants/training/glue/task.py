"""Fine-tuning on a GLUE task: metrics, evaluation and the files of a submission."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from accelerate import Accelerator
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import nn

from ...glue_tasks import TASKS, GlueTask, format_prediction, get_task
from ..classification.data import ClassificationSplit
from ..classification.metrics import pearson, spearman
from ..classification.task import NO_TRAINING_ROWS, EvalSet, LogitsEvaluator, SequenceClassification
from .data import load_ax, load_glue
from .settings import GlueSettings, check_glue_metric

__all__ = ["METRIC_FUNCTIONS", "GlueEvaluator", "GlueFineTuning", "compute_glue_metrics"]

# Map (true values, predictions) to the metric. F1 is the F1 of class 1. If all predictions are equal, the Matthews
# correlation is 0, and the Pearson and Spearman correlations are NaN.
METRIC_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
    "pearson": pearson,
    "spearmanr": spearman,
}


def compute_glue_metrics(names: Sequence[str], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Compute metrics from class ids or scores [examples].

    Args:
        names: The names of the metrics.
        predictions: The predicted values.
        references: The true values.

    Returns:
        The metrics. If there are several, `combined_score` is their mean, with which GLUE ranks such tasks.

    Raises:
        ValueError: If a metric is unknown.

    Example:
        ```python
        compute_metrics(["accuracy"], np.array([0, 1, 1]), np.array([0, 1, 0]))  # {"accuracy": 0.666...}
        ```
    """
    unknown = [name for name in names if name not in METRIC_FUNCTIONS]
    if unknown:
        raise ValueError(f"Metrics must be among {', '.join(METRIC_FUNCTIONS)}, got {', '.join(unknown)}.")
    values = {name: float(METRIC_FUNCTIONS[name](references, predictions)) for name in names}
    if len(names) > 1:
        values["combined_score"] = float(np.mean([values[name] for name in names]))
    return values


class GlueEvaluator(LogitsEvaluator):
    """Evaluator of the dev splits. It stores the last predictions, so that they are not computed twice."""

    def __init__(self, task: GlueTask, *args: Any):
        super().__init__(*args)
        self.task = task
        self.predictions: dict[str, np.ndarray] = {}

    def score(self, eval_set: EvalSet, logits: np.ndarray) -> dict[str, float]:
        predictions = self.to_predictions(self.task, logits)
        self.predictions[eval_set.split.name] = predictions
        return compute_glue_metrics(self.task.metrics, predictions, eval_set.labels)

    def to_predictions(self, task: GlueTask, logits: np.ndarray) -> np.ndarray:
        """Return scores, or class ids in the numbering of the task [rows]."""
        return logits[:, 0] if task.is_regression else np.asarray(self.label_map.to_task)[logits.argmax(-1)]


class GlueFineTuning(SequenceClassification[GlueSettings, GlueEvaluator]):
    """Fine-tuning of a classifier on a GLUE task (arXiv 1804.07461), or of a regressor on STS-B.

    The results contain `eval_<metric>` of each dev split. Names of the mismatched dev split of MNLI end in `_mm`.

    Example:
        ```python
        settings = GlueSettings(model_name_or_path="bert-gqa4", task_name="sst2", output_dir="out")
        results = fine_tune(GlueFineTuning, settings)
        ```
    """

    def __init__(self, settings: GlueSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_task(settings.task_name)
        self.labels = self.task.labels
        self.problem_type = "regression" if self.task.is_regression else "single_label_classification"
        self.fit_tokenizer(pair=len(self.task.text_columns) == 2)
        splits, self.tests = self._load_splits()
        self.train = splits["train"]
        self.dev_splits = [splits[name] for name in self.task.eval_splits if name in splits]
        check_glue_metric(settings.metric_for_best_model, self.task, len(self.dev_splits))
        self.name, self.main_metric = self.task.folder, self.task.main_metric
        metrics = (*self.task.metrics, "combined_score")
        self.shown_metrics = (*metrics, *(f"{name}_mm" for name in metrics))

    def _load_splits(self) -> tuple[dict[str, ClassificationSplit], list[tuple[GlueTask, ClassificationSplit]]]:
        """Read the train and dev splits, and the test splits. Errors in all files come before training."""
        settings, task = self.settings, self.task
        with_train = not settings.only_evaluates
        splits = load_glue(task, settings.data_dir, settings.values(), with_train=with_train)
        splits["train"] = splits["train"].take(settings.max_train_samples) if with_train else NO_TRAINING_ROWS
        for name in task.eval_splits.keys() & splits.keys():
            splits[name] = splits[name].take(settings.max_eval_samples)
        if settings.skip_predict:
            return splits, []
        tests = [(task, splits[name]) for name in task.test_splits if name in splits]
        has_files = any((settings.train_file, settings.validation_file, settings.test_file))
        if task.name == "mnli" and (settings.data_dir is not None or not has_files):
            ax = load_ax(settings.data_dir)
            tests += [(TASKS["ax"], ax)] if ax is not None else []
        return splits, tests

    def make_evaluator(self, model: nn.Module) -> GlueEvaluator:
        sets = [self.make_eval_set(split) for split in self.dev_splits]
        self.evaluator = GlueEvaluator(self.task, self.accelerator, model, sets, self.label_map, self.settings)
        return self.evaluator

    def fingerprint(self) -> dict[str, Any]:
        return {"task_name": self.task.name, **super().fingerprint()}

    def results(self) -> dict[str, Any]:
        return {"task_name": self.task.name}

    def predictions(self, evaluator: GlueEvaluator) -> dict[str, str]:
        return dict(
            _format_submission(self.task, split, evaluator.predictions[split.name], "dev_")
            for split in self.dev_splits
        )

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        files: dict[str, str] = {}
        for task, split in self.tests:
            logits = self.evaluator.predict_logits(self.make_eval_set(split))
            files |= [_format_submission(task, split, self.evaluator.to_predictions(task, logits))]
        return {}, files


def _format_submission(
    task: GlueTask, split: ClassificationSplit, predictions: Any, prefix: str = ""
) -> tuple[str, str]:
    """Return the name and the content of a submission file: a header, and `index<TAB>prediction` lines."""
    rows = zip(split.data["index"], predictions, strict=True)
    lines = ["index\tprediction", *(f"{index}\t{format_prediction(task, value)}" for index, value in rows)]
    return f"{prefix}{task.submission_file(split.name)}", "\n".join(lines) + "\n"
