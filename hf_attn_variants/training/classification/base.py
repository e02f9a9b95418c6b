"""What every training of a classifier of texts shares: its tokenizer, its model, its rows and its dev sets."""

from collections.abc import Sequence
from typing import Any, TypeVar

from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedModel

from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask
from ..engine.losses import Objective
from ..engine.models import check_trained_head, load_classifier, load_config
from ..engine.settings import FineTuningSettings
from ..engine.tokenizers import check_max_length, close_texts, fit_token_types, load_tokenizer
from .evaluation import EvalSet, LogitsEvaluator, classification_objective
from .splits import ClassificationSplit, hash_rows, make_rows, tokenize_split

__all__ = ["NO_ROWS", "SequenceClassification"]

SettingsT = TypeVar("SettingsT", bound=FineTuningSettings)
EvaluatorT = TypeVar("EvaluatorT", bound=LogitsEvaluator)
NO_ROWS = ClassificationSplit("train", make_rows({}))


class SequenceClassification(FineTuningTask[SettingsT, EvaluatorT]):
    """A training of a classifier, or of a regressor, of texts or pairs of texts.

    A task's `__init__` calls `fit_tokenizer` and sets the attributes below.

    Attributes:
        labels: the names of the classes in the order of their ids; None for a regression.
        problem_type: transformers' name of it.
        train: the training rows; none for a run that only evaluates.
        dev_splits: those that are evaluated; the first one decides.
        weights: one a label, in the order of `labels`; `load_model` sets `output_weights`, in that of the outputs.
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
        """Make the tokenizer fit the model, and check the length of texts, or of pairs of them.

        Raises:
            ValueError: if the tokenizer cannot be made to fit, or the length.
        """
        fit_token_types(self.tokenizer, self.config)
        close_texts(self.tokenizer, self.config, pair)
        length, multiple = self.settings.max_length, self.settings.pad_to_multiple_of
        check_max_length(length, self.config, self.tokenizer, pair, multiple=multiple)
        self.collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple)

    def load_model(self) -> PreTrainedModel:
        model, self.label_map = load_classifier(
            self.settings, self.config, self.labels, AutoModelForSequenceClassification, self.problem_type
        )
        self.output_weights = None if self.weights is None else self.weights[list(self.label_map.to_task)]
        tokenized = self._training_rows(self.train)
        self.token_counts = tokenized["length"]
        self.rows = tokenized.remove_columns("length")
        return model

    def lengths(self) -> list[int]:
        return self.token_counts

    def objective(self) -> Objective:
        return classification_objective(self.output_weights)

    def fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.train), "hash of the training data": hash_rows(self.train)}

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": [hash_rows(split) for split in self.dev_splits]}

    def dev_results(self, evaluator: EvaluatorT) -> dict[str, Any]:
        rows = sum(map(len, self.dev_splits))
        return {"eval_samples": rows, "eval_samples_per_second": round(rows / max(evaluator.seconds, 1e-9), 2)}

    def eval_set(self, split: ClassificationSplit) -> EvalSet:
        """Return a split as it is evaluated or predicted."""
        data = self._tokenize(split)
        unused = [name for name in ("length", "label") if name in data.column_names]
        loader, order = prepare_eval_dataloader(
            self.settings, self.accelerator, data.remove_columns(unused), data["length"], self.collate
        )
        return EvalSet(split, loader, order, data["label"][:] if "label" in unused else None)

    def _tokenize(self, split: ClassificationSplit) -> Dataset:
        with self.accelerator.main_process_first():  # the others read the Hub dataset's cache
            data = tokenize_split(split, self.tokenizer, self.settings.max_length)
        if self.config.is_encoder_decoder:
            self._check_ends(split, data)
        return data

    def _check_ends(self, split: ClassificationSplit, data: Dataset) -> None:
        # Upstream's heads read at the last end token, and take as many of a row as of any other.
        texts = ("a", "a") if "text2" in split.data.column_names else ("a",)
        end, expected = self.config.eos_token_id, self.tokenizer(*texts)["input_ids"].count(self.config.eos_token_id)
        wrong = next((i for i, ids in enumerate(data["input_ids"]) if ids.count(end) != expected), None)
        if wrong is not None:
            raise ValueError(
                f"{split.where(wrong)}: its text spells {self.tokenizer.eos_token}, the token behind which the "
                "model's classifier reads: take it out"
            )

    def _training_rows(self, split: ClassificationSplit) -> Dataset:
        if not len(split):
            return make_rows({"length": []})
        data, to_model, to_task = self._tokenize(split), self.label_map.to_model, self.label_map.to_task
        if to_task == tuple(sorted(to_task)):
            return data
        if isinstance(data[0]["label"], list):
            return data.map(lambda row: {"label": [row["label"][i] for i in to_task]})
        return data.map(lambda row: {"label": to_model[row["label"]]})
