"""Fine-tuning on a GLUE task: its data, its classifier, its scores and the files of a submission."""

from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedModel

from ...glue_tasks import TASKS, GlueTask, format_prediction, get_task
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask
from ..engine.losses import Objective
from ..engine.models import load_classifier, load_config
from ..engine.tokenizers import check_max_length, close_texts, fit_token_types, load_tokenizer
from .data import GlueSplit, hash_rows, load_ax, load_glue, make_rows, tokenize_split
from .evaluation import EvalSet, GlueEvaluator, classification_objective
from .settings import GlueSettings, check_glue_metric

__all__ = ["GlueFineTuning"]

NO_ROWS = GlueSplit("train", make_rows({}))


class GlueFineTuning(FineTuningTask[GlueSettings, GlueEvaluator]):
    """Sequence classification, or for STS-B regression (arXiv:1804.07461).

    The results have `eval_<metric>` of each dev split; those of MNLI's mismatched one end in `_mm`.
    """

    def __init__(self, settings: GlueSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.task = get_task(settings.task_name)
        self.config = load_config(settings)
        self.tokenizer = load_tokenizer(settings, self.config)
        fit_token_types(self.tokenizer, self.config)
        pair = len(self.task.text_columns) == 2
        close_texts(self.tokenizer, self.config, pair)
        check_max_length(settings.max_length, self.config, self.tokenizer, pair)
        self.splits, self.tests = self._load_splits()
        self.dev_splits = [self.splits[name] for name in self.task.eval_splits if name in self.splits]
        check_glue_metric(settings.metric_for_best_model, self.task, len(self.dev_splits))
        self.collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=settings.pad_to_multiple_of)
        self.name, self.main_metric = self.task.folder, self.task.main_metric
        metrics = (*self.task.metrics, "combined_score")
        self.shown_metrics = (*metrics, *(f"{name}_mm" for name in metrics))

    def _load_splits(self) -> tuple[dict[str, GlueSplit], list[tuple[GlueTask, GlueSplit]]]:
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

    def load_model(self) -> PreTrainedModel:
        model_class = AutoModelForSequenceClassification
        model, self.label_map = load_classifier(self.settings, self.config, self.task.labels, model_class)
        tokenized = self._training_rows(self.splits["train"])
        self.token_counts = tokenized["length"]
        self.rows = tokenized.remove_columns("length")
        return model

    def lengths(self) -> list[int]:
        return self.token_counts

    def objective(self) -> Objective:
        return classification_objective()

    def make_evaluator(self, model: nn.Module) -> GlueEvaluator:
        sets = [self._eval_set(self.task, split) for split in self.dev_splits]
        self.evaluator = GlueEvaluator(self.accelerator, model, sets, self.label_map, self.settings)
        return self.evaluator

    def fingerprint(self) -> dict[str, Any]:
        train = self.splits["train"]
        counted = {"training examples": len(train), "hash of the training data": hash_rows(train)}
        return {"task_name": self.task.name, **counted}

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": [hash_rows(split) for split in self.dev_splits]}

    def dev_results(self, evaluator: GlueEvaluator) -> dict[str, Any]:
        rows = sum(map(len, self.dev_splits))
        return {"eval_samples": rows, "eval_samples_per_second": round(rows / max(evaluator.seconds, 1e-9), 2)}

    def results(self) -> dict[str, Any]:
        return {"task_name": self.task.name}

    def predictions(self, evaluator: GlueEvaluator) -> dict[str, str]:
        found = evaluator.predictions
        return dict(_submission(self.task, split, found[split.name], "dev_") for split in self.dev_splits)

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        files: dict[str, str] = {}
        for task, split in self.tests:
            logits = self.evaluator.predict_logits(self._eval_set(task, split))
            files |= [_submission(task, split, self.evaluator.to_predictions(task, logits))]
        return {}, files

    def _tokenize(self, split: GlueSplit) -> Dataset:
        with self.accelerator.main_process_first():  # the others read the Hub dataset's cache
            return tokenize_split(split, self.tokenizer, self.settings.max_length)

    def _training_rows(self, split: GlueSplit) -> Dataset:
        if not len(split):
            return make_rows({"length": []})
        data, to_model = self._tokenize(split), self.label_map.to_model
        if to_model != tuple(sorted(to_model)):
            data = data.map(lambda row: {"label": to_model[row["label"]]})
        return data

    def _eval_set(self, task: GlueTask, split: GlueSplit) -> EvalSet:
        data = self._tokenize(split)
        unused = [name for name in ("length", "label") if name in data.column_names]
        loader, order = prepare_eval_dataloader(
            self.settings, self.accelerator, data.remove_columns(unused), data["length"], self.collate
        )
        return EvalSet(task, split, loader, order, data["label"] if "label" in unused else None)


def _submission(task: GlueTask, split: GlueSplit, predictions: Any, prefix: str = "") -> tuple[str, str]:
    """Return the name and the content of a GLUE submission's file: a header and one `index<TAB>prediction` a line."""
    rows = zip(split.data["index"], predictions, strict=True)
    lines = ["index\tprediction", *(f"{index}\t{format_prediction(task, value)}" for index, value in rows)]
    return f"{prefix}{task.submission_file(split.name)}", "\n".join(lines) + "\n"
