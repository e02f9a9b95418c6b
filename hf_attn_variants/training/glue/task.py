"""Fine-tuning on a GLUE task: its data, its classifier, its scores and the files of a submission."""

from typing import Any

from accelerate import Accelerator
from torch import nn

from ...glue_tasks import TASKS, GlueTask, format_prediction, get_task
from ..classification.base import NO_ROWS, SequenceClassification
from ..classification.splits import ClassificationSplit
from .data import load_ax, load_glue
from .evaluation import GlueEvaluator
from .settings import GlueSettings, check_glue_metric

__all__ = ["GlueFineTuning"]


class GlueFineTuning(SequenceClassification[GlueSettings, GlueEvaluator]):
    """Sequence classification, or for STS-B regression (arXiv:1804.07461).

    The results have `eval_<metric>` of each dev split; those of MNLI's mismatched one end in `_mm`.
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
        """Read train and dev splits by name, and what is predicted after training, so that it cannot fail then."""
        settings, task = self.settings, self.task
        with_train = not settings.only_evaluates
        splits = load_glue(task, settings.data_dir, settings.values(), with_train=with_train)
        splits["train"] = splits["train"].first(settings.max_train_samples) if with_train else NO_ROWS
        for name in task.eval_splits.keys() & splits.keys():
            splits[name] = splits[name].first(settings.max_eval_samples)
        if settings.skip_predict:
            return splits, []
        tests = [(task, splits[name]) for name in task.test_splits if name in splits]
        has_files = any((settings.train_file, settings.validation_file, settings.test_file))
        if task.name == "mnli" and (settings.data_dir is not None or not has_files):
            ax = load_ax(settings.data_dir)
            tests += [(TASKS["ax"], ax)] if ax is not None else []
        return splits, tests

    def make_evaluator(self, model: nn.Module) -> GlueEvaluator:
        sets = [self.eval_set(split) for split in self.dev_splits]
        self.evaluator = GlueEvaluator(self.task, self.accelerator, model, sets, self.label_map, self.settings)
        return self.evaluator

    def fingerprint(self) -> dict[str, Any]:
        return {"task_name": self.task.name, **super().fingerprint()}

    def results(self) -> dict[str, Any]:
        return {"task_name": self.task.name}

    def predictions(self, evaluator: GlueEvaluator) -> dict[str, str]:
        found = evaluator.predictions
        return dict(_submission(self.task, split, found[split.name], "dev_") for split in self.dev_splits)

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        files: dict[str, str] = {}
        for task, split in self.tests:
            logits = self.evaluator.predict_logits(self.eval_set(split))
            files |= [_submission(task, split, self.evaluator.to_predictions(task, logits))]
        return {}, files


def _submission(task: GlueTask, split: ClassificationSplit, predictions: Any, prefix: str = "") -> tuple[str, str]:
    """Return the name and the content of a GLUE submission's file: a header and one `index<TAB>prediction` a line."""
    rows = zip(split.data["index"], predictions, strict=True)
    lines = ["index\tprediction", *(f"{index}\t{format_prediction(task, value)}" for index, value in rows)]
    return f"{prefix}{task.submission_file(split.name)}", "\n".join(lines) + "\n"
