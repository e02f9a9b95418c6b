"""Fine-tuning and evaluation on extractive question answering with SQuAD v1.1 or v2.0."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForQuestionAnswering, PreTrainedModel

from ...modeling.mechanisms.patterns.pattern_table import supports_global_mask
from ..engine import models
from ..engine.dataloaders import EvalBatches
from ..engine.finetune import FineTuningTask, list_shown_metrics
from ..engine.optimization import Objective
from . import SquadSettings
from . import data as squad_data

ANSWER_POSITIONS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class QuestionSet:
    """A tokenized split for evaluation or prediction.

    Attributes:
        name: The name of the split.
        questions: The questions.
        windows: The windows of the questions.
        batches: The batches of windows, and the order of the windows in the batches.
    """

    name: str
    questions: list[squad_data.Question]
    windows: list[squad_data.Window]
    batches: EvalBatches


def _compute_span_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute the logits for the start and end of the answer [b, n, 2], with the lowest possible value for padding."""
    inputs: dict[str, Any] = {key: value for key, value in batch.items() if key not in ANSWER_POSITIONS}
    if getattr(model, "module", model).config.is_encoder_decoder:
        inputs["use_cache"] = False  # a cache of the decoder's keys and values would never be read
    outputs = model(**inputs)
    logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1).float()
    return logits.masked_fill(batch["attention_mask"][..., None] == 0, torch.finfo(logits.dtype).min)


def _compute_losses(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss of each window [b] from logits [b, n, 2]."""
    labels = torch.stack([batch[name] for name in ANSWER_POSITIONS], dim=-1)  # [b, 2]
    return functional.cross_entropy(logits, labels, reduction="none").mean(-1)


class SquadFineTuning(FineTuningTask[SquadSettings]):
    """Fine-tuning on extractive question answering with SQuAD v1.1 (arXiv 1606.05250) or v2.0 (arXiv 1806.03822).

    The results for v1.1 contain `eval_exact_match` and `eval_f1`. The results for v2.0 contain `eval_exact`,
    `eval_f1`, the metrics for questions with and without an answer, and the metrics at the best threshold.

    Example:
        ```python
        settings = SquadSettings(model_name_or_path="bert-gqa4", output_dir="out")
        results = fine_tune(SquadFineTuning, settings)
        ```
    """

    rows: list[squad_data.Window]

    main_metric = "f1"
    shown_metrics = ("exact_match", "exact", "f1", "HasAns_f1", "NoAns_f1")
    unit = "windows"

    def __init__(self, settings: SquadSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.name = "SQuAD v2.0" if settings.version_2_with_negative else "SQuAD v1.1"
        self.config = models.load_config(settings)
        models.check_trained_head(settings, self.config, "ForQuestionAnswering", "answers questions")
        self.tokenizer = models.load_tokenizer(settings, self.config)
        models.configure_token_types(self.tokenizer, self.config)
        self.stride = squad_data.compute_stride(settings, self.config, self.tokenizer)
        self.splits = self._load_splits()
        marks_questions = supports_global_mask(self.config)
        self.collate = squad_data.make_window_collator(self.tokenizer, settings.pad_to_multiple_of, marks_questions)
        self.train = self.splits.get("train", [])

    def _load_splits(self) -> dict[str, list[squad_data.Question]]:
        """Read the splits, and limit them to the maximum numbers of samples."""
        settings = self.settings
        from_hub, with_train = settings.validation_file is None, not settings.only_evaluates
        # The main process loads the dataset first, so that the other processes can read the cached files.
        with self.accelerator.main_process_first() if from_hub else nullcontext():
            splits = squad_data.load_squad(settings.values(), from_hub, settings.version_2_with_negative, with_train)
        limits = {"train": settings.max_train_samples, "dev": settings.max_eval_samples}
        return {name: questions[: limits.get(name)] for name, questions in splits.items()}

    def load_model(self) -> PreTrainedModel:
        self.config.num_labels = 2  # the start and the end, regardless of the checkpoint's classes
        model = models.load_model(self.settings, self.config, AutoModelForQuestionAnswering)
        self.rows = self._make_windows(self.train, for_training=True)
        return model

    def get_lengths(self) -> list[int]:
        return [len(window.input_ids) for window in self.rows]

    def make_objective(self) -> Objective:
        """Return the mean of the cross-entropies of the answer's start and end as the objective."""
        return Objective(
            loss_sum=lambda model, batch: _compute_losses(_compute_span_logits(model, batch), batch).sum(),
            count=lambda batch: len(batch["input_ids"]),
        )

    def prepare_evaluation(self) -> bool:
        self.dev = self._make_question_set("dev")
        self.test = self._make_question_set("test") if "test" in self.splits else None
        return True

    def evaluate(self) -> dict[str, float]:
        """Compute the official metrics and the mean loss on the dev split.

        The value "loss" is the mean over all windows, with the first correct answer to each question as the target.
        """
        self.dev_predictions, loss = self._predict_answers(self.dev)
        threshold, texts = self.settings.threshold, {p.id: p.text for p in self.dev_predictions}
        null_options = () if threshold is None else ({p.id: p.null_odds for p in self.dev_predictions}, threshold)
        return {**squad_data.compute_squad_metrics(self.dev.questions, texts, *null_options), "loss": loss}

    def _predict_answers(self, data: QuestionSet) -> tuple[list[squad_data.Prediction], float]:
        """Predict the answers for a split in the order of its questions, and compute the mean loss of its windows."""
        logits, losses = self.run_model_on_rows(data.batches, self._compute_outputs, data.name)
        limits = self.settings.n_best_size, self.settings.max_answer_length
        predictions = squad_data.extract_predictions(
            data.questions, data.windows, logits[..., 0], logits[..., 1], *limits
        )
        # The losses are summed in batch order because floating-point sums depend on the order.
        return predictions, float(torch.from_numpy(losses[list(data.batches[1])]).mean())

    def _compute_outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the logits of a batch, padded to the maximum length, and the loss of each window."""
        logits = _compute_span_logits(self.model, batch)  # [b, n, 2]
        padding = (0, 0, 0, self.settings.max_length - logits.shape[1])
        padded = functional.pad(logits, padding, value=torch.finfo(logits.dtype).min)
        return padded, _compute_losses(logits, batch)

    def get_fingerprint(self) -> dict[str, Any]:
        return {
            "training examples": len(self.train),
            "hash of the training data": squad_data.hash_questions(self.train),
        }

    def get_dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": squad_data.hash_questions(self.splits["dev"])}

    def get_dev_results(self) -> dict[str, Any]:
        return {"eval_samples": len(self.dev.questions), "eval_windows": len(self.dev.windows)}

    def get_results(self) -> dict[str, Any]:
        return {"train_samples": len(self.train), "train_windows": len(self.rows)}

    def get_prediction_files(self) -> dict[str, str]:
        return self._format_prediction_files("dev", self.dev_predictions)

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.test is None:
            return {}, {}
        return {}, self._format_prediction_files("test", self._predict_answers(self.test)[0])

    def format_summary(self, results: dict[str, Any]) -> str:
        scores = ", ".join(f"{name} {results[f'eval_{name}']:.2f}" for name in list_shown_metrics(self, results))
        rows = f"{results['eval_samples']} questions, {results['eval_windows']} windows"
        return f"{self.name} dev ({rows}): {scores}; "

    def _make_windows(
        self, questions: list[squad_data.Question], for_training: bool = False
    ) -> list[squad_data.Window]:
        """Split the contexts of questions into windows."""
        lengths = self.settings.max_length, self.stride, self.settings.max_query_length
        token_types = getattr(self.config, "type_vocab_size", 0) > 1
        return squad_data.make_windows(questions, self.tokenizer, *lengths, token_types, for_training)

    def _make_question_set(self, name: str) -> QuestionSet:
        """Create the windows and batches of a split."""
        rows = self._make_windows(self.splits[name])
        batches = self.make_eval_batches(rows, [len(window.input_ids) for window in rows])
        return QuestionSet(name, self.splits[name], rows, batches)

    def _format_prediction_files(self, split: str, predictions: list[squad_data.Prediction]) -> dict[str, str]:
        """Format the JSON files of a split: the predictions, the n-best answers and, for v2.0, the null odds.

        Returns:
            A dictionary from file names to contents.
        """
        threshold = self.settings.threshold
        files: dict[str, dict[str, Any]] = {
            split: {p.id: p.answer(threshold) for p in predictions},
            f"nbest_{split}": {p.id: squad_data.make_nbest_entries(p, threshold is not None) for p in predictions},
        }
        if threshold is not None:
            files[f"null_odds_{split}"] = {p.id: p.null_odds for p in predictions}
        return {
            f"{name}.json": json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()
        }
