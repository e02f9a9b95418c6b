"""Fine-tunes encoder-decoder models on text pairs, including GLUE and SQuAD as text, and evaluates generated texts."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from ... import text_files
from ...glue_tasks import GlueTask, get_task
from ...model_properties import get_decoder_start_token
from ..classification.data import ClassificationSplit
from ..engine import models, optimization
from ..engine.dataloaders import TextDataset, hash_texts, make_source_target_collator
from ..engine.dataset_splits import fill_in_training_columns, find_split_files, load_dataset_splits, read_dataset_rows
from ..engine.finetune import FineTuningTask
from ..engine.loop import TrainingLoop
from ..engine.session import show_progress
from ..engine.settings import SPLITS, check_dev_settings, check_metric_for_best_model, is_greater_better
from ..glue.task import compute_glue_metrics, load_glue
from ..squad import METRIC_NAMES
from ..squad.data import choose_normalization, load_squad, score_answer
from . import DEFAULT_COLUMNS, SQUAD, Seq2SeqSettings
from .metrics import TEXT_METRICS, get_text_metric, resolve_bleu_tokenizer, score_texts

logger = logging.getLogger(__name__)
COLUMN_FLAGS = "--source_column and --target_column"


@dataclass(frozen=True)
class Seq2SeqSplit:
    """The rows of one split.

    Attributes:
        name: The name of the split: "train", "dev" or "test".
        sources: The texts that the encoder reads, including the prefix.
        references: The correct texts for each source, or None if they are unknown. The first text of each row is the
            training target.
        keys: The entries that identify each row in the predictions, such as {"row": 3}. Empty for training rows.
    """

    name: str
    sources: list[str]
    references: list[tuple[str, ...]] | None
    keys: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, count: int | None) -> "Seq2SeqSplit":
        """Return a split that contains the first `count` rows, or all rows if `count` is None."""
        references = self.references[:count] if self.references is not None else None
        return Seq2SeqSplit(self.name, self.sources[:count], references, self.keys[:count])

    def pairs(self) -> list[tuple[str, str]]:
        """Return the source and the target of each row. If the targets are unknown, they are empty strings."""
        if self.references is None:
            return [(source, "") for source in self.sources]
        return [(source, row[0]) for source, row in zip(self.sources, self.references, strict=True)]


@dataclass(frozen=True)
class Seq2SeqData:
    """The splits of a run and the metrics to compute.

    Attributes:
        splits: Maps "train", "dev" and "test" to the splits. Splits that do not exist are omitted.
        score: A function that computes the metrics from predictions and references.
        metric_names: The names of the metrics.
        main_metric: The metric that selects the best weights by default.
        results: Additional entries for the results.
    """

    splits: dict[str, Seq2SeqSplit]
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]]
    metric_names: tuple[str, ...]
    main_metric: str
    results: dict[str, Any] = field(default_factory=dict)


def load_seq2seq_data(settings: Seq2SeqSettings) -> Seq2SeqData:
    """Read the splits from parallel text, tables or a `datasets` source, as specified by the flags.

    Args:
        settings: The settings of the run, after `fill_in_training_text_settings`.

    Raises:
        OSError: If a file or a Hub dataset cannot be read.
        ValueError: If a file has invalid content, has no rows, or lacks a column.
    """
    # Metrics are loaded first because a custom metric may fail.
    metrics = tuple(settings.metrics or ())  # `Seq2SeqSettings.__post_init__` has set the default
    names = tuple(value for name in metrics for value in get_text_metric(name).names)
    if len({"loss", *names}) <= len(names):
        raise ValueError(
            f"--metrics must return distinct names other than 'loss', got {', '.join(names)}. Remove one."
        )
    splits = {}
    for name, prefix in (("train", ""), ("dev", "validation_"), ("test", "test_")):
        if (name == "train" and settings.only_evaluates) or (name == "test" and settings.skip_predict):
            continue
        rows = _read_split(settings, name, prefix)
        if rows is not None:
            sources = [(settings.source_prefix or "") + row[0] for row in rows.texts]
            references = [row[1:] for row in rows.texts] if len(rows.texts[0]) > 1 else None
            splits[name] = Seq2SeqSplit(name, sources, references, [] if name == "train" else _make_row_keys(rows))
    if "test" in splits and splits["test"].references is None and settings.test_source_file is None:
        message = "Column %r of the test split contains no text, so the split is predicted but not scored."
        logger.warning(message, _get_columns(settings)[1])
    reads_columns = settings.dataset_name is not None or any(getattr(settings, f"{name}_file") for name in SPLITS)
    results: dict[str, Any] = dict(zip(DEFAULT_COLUMNS, _get_columns(settings), strict=True)) if reads_columns else {}
    if settings.source_prefix:
        results["source_prefix"] = settings.source_prefix
    tokenize = settings.tokenize
    if "bleu" in metrics:
        references_by_row = (row for split in reversed(splits.values()) for row in split.references or ())
        texts = (text for row in references_by_row for text in row)
        tokenize = results["bleu_tokenizer"] = resolve_bleu_tokenizer(settings, texts)
    score = partial(score_texts, metrics, trust_remote_code=settings.trust_remote_code, tokenize=tokenize)
    return Seq2SeqData(splits, score, names, names[0], results)


def _make_row_keys(rows: text_files.LocatedRows) -> list[dict[str, Any]]:
    """Return the entries that identify rows in the predictions: the row number, and the file if there are several."""
    if len({*rows.files}) == 1:
        return [{"row": number} for number in rows.numbers]
    return [{"file": file, "row": number} for file, number in zip(rows.files, rows.numbers, strict=True)]


def fill_in_training_text_settings(settings: Seq2SeqSettings) -> Seq2SeqSettings:
    """Fill in the columns and the prefix that were used to train the model if the run only evaluates.

    Settings that are already set are left unchanged. If the run trains the model, nothing is filled in.
    """
    if not settings.only_evaluates:
        return settings
    return fill_in_training_columns(
        settings, _read_first_row(settings), dict.fromkeys(DEFAULT_COLUMNS, ()), ("source_prefix",)
    )


def _read_first_row(settings: Seq2SeqSettings) -> dict[str, Any] | None:
    """Return the first row of the evaluation data, or None if the data has no columns."""
    if settings.task_name is not None:
        return None
    files = find_split_files(settings)
    if settings.dataset_name is not None and files is None:
        splits = load_dataset_splits(settings.dataset_name, settings.dataset_config_name)
        return next((split[0] for split in splits.values() if len(split)), None)
    tables = settings.validation_file or settings.test_file
    if files is not None:
        tables = files.get("validation") or files.get("test")
    record = next(text_files.read_table_rows(Path(tables[0])), None) if tables else None
    return None if record is None else record.values


def _get_columns(settings: Seq2SeqSettings) -> tuple[str, str]:
    """Return the source column and the target column."""
    source, target = (getattr(settings, name) or default for name, default in DEFAULT_COLUMNS.items())
    return source, target


def _read_split(settings: Seq2SeqSettings, name: str, prefix: str) -> text_files.LocatedRows | None:
    """Read a split, or return None if it does not exist.

    Args:
        settings: The settings of the run.
        name: "train", "dev" or "test".
        prefix: The prefix of the split's flags.
    """
    source, target = getattr(settings, f"{prefix}source_file"), getattr(settings, f"{prefix}target_file")
    table = getattr(settings, f"{prefix or 'train_'}file")
    if (files := find_split_files(settings)) is not None:
        table = files.get({"dev": "validation"}.get(name, name))
        if table is None:
            return None
    columns: tuple[str, ...] = _get_columns(settings)
    if source is not None and target is not None:
        return text_files.read_pairs(source, target)
    # Blank sources without targets also count as rows, so that the predictions have the same row numbers.
    if source is not None:
        lines: list[tuple[str, ...]] = [(line,) for line in text_files.read_lines([source], keep_blank=True)]
        return text_files.LocatedRows(lines, [source] * len(lines), [*range(1, len(lines) + 1)])
    if table is not None:
        rows = (record.values for path in table for record in text_files.read_table_rows(Path(path)))
        if name == "test" and not text_files.has_texts(rows, columns[1]):
            return text_files.read_columns(table, columns[:1], COLUMN_FLAGS, keep_blank=True, unused=columns[1])
        return text_files.read_columns(table, columns, COLUMN_FLAGS)
    return _read_dataset(settings, name, columns) if settings.dataset_name is not None else None


def _read_dataset(settings: Seq2SeqSettings, name: str, columns: tuple[str, ...]) -> text_files.LocatedRows | None:
    """Read a split of a `datasets` source, or return None if the split does not exist."""
    split_name = {"dev": "validation"}.get(name, name)
    split = load_dataset_splits(settings.dataset_name or "", settings.dataset_config_name).get(split_name)
    if split is None:
        return None
    place = f"{settings.dataset_name} ({split_name})"
    records = read_dataset_rows(place, split)
    if name == "test" and not text_files.has_texts(split, columns[1]):  # many test splits have no public targets
        return text_files.select_columns(place, records, columns[:1], COLUMN_FLAGS, True, columns[1])
    return text_files.select_columns(place, records, columns, COLUMN_FLAGS)


# The index and the name of each text in T5's format (in MNLI, the second text comes first). For other tasks, T5 uses
# the column names.
T5_TEXT_NAMES: dict[str, tuple[tuple[int, str], ...]] = {
    "mnli": ((1, "hypothesis"), (0, "premise")),
    "mrpc": ((0, "sentence1"), (1, "sentence2")),
}
# T5 rounds scores to fifths, so that each score occurs often enough to be learned as text.
SCORE_STEPS = 5


def format_glue_example(task: GlueTask, texts: Sequence[str]) -> str:
    """Format a GLUE example as text, such as "qnli question: ... sentence: ..."."""
    words = T5_TEXT_NAMES.get(task.name) or tuple((i, names[0]) for i, names in enumerate(task.text_columns))
    return " ".join([task.name, *(f"{word}: {texts[i]}" for i, word in words)])


def format_glue_label(task: GlueTask, label: float) -> str:
    """Format a label as text, which is a class name or a score rounded to a multiple of 0.2."""
    if task.labels is None:
        return f"{round(label * SCORE_STEPS) / SCORE_STEPS:.1f}"
    return task.labels[int(label)]


def parse_glue_predictions(task: GlueTask, texts: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Parse generated texts as class ids or scores.

    Args:
        task: The GLUE task.
        texts: The generated texts.
        labels: The true class ids. A text that is not a class name is parsed as a wrong class.

    Returns:
        The class ids or scores [rows]. For texts that are not numbers, the score is -1.
    """
    if task.labels is None:
        return np.array([_parse_score(text) for text in texts])
    names = {name: i for i, name in enumerate(task.labels)}
    wrong_labels = (np.asarray(labels) + 1) % len(names)
    return np.array(
        [names.get(text.strip(), wrong_label) for text, wrong_label in zip(texts, wrong_labels, strict=True)]
    )


def _parse_score(text: str) -> float:
    """Parse a score, or return -1 if the text is not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def load_text_task(settings: Seq2SeqSettings) -> Seq2SeqData:
    """Read the data of the task that `task_name` specifies, formatted as text.

    Raises:
        OSError: If a file or a Hub dataset cannot be read.
        ValueError: If the task does not exist, or if a file has invalid content.
    """
    files: dict[str, str | None] = {}
    for name in SPLITS:
        file, *other_files = getattr(settings, f"{name}_file") or [None]
        files[f"{name}_file"] = file
        if other_files:
            raise ValueError(f"--{name}_file must be a single file with --task_name, got {1 + len(other_files)}.")
    data = _load_squad(settings, files) if (settings.task_name or "").lower() == SQUAD else _load_glue(settings, files)
    if settings.source_prefix:
        data.results["source_prefix"] = settings.source_prefix
        for name, split in data.splits.items():
            data.splits[name] = replace(split, sources=[settings.source_prefix + source for source in split.sources])
    return data


def _load_glue(settings: Seq2SeqSettings, files: dict[str, str | None]) -> Seq2SeqData:
    """Read a GLUE task as text."""
    task = get_task(settings.task_name or "")
    loaded = load_glue(task, settings.data_dir, files, with_train=not settings.only_evaluates)
    dev, test = next(iter(task.eval_splits)), next(iter(task.test_splits))
    sources = {"train": "train", "dev": dev, "test": test}
    splits = {
        name: _format_glue_split(task, name, loaded[split]) for name, split in sources.items() if split in loaded
    }
    labels = np.asarray(loaded[dev].data["label"])

    def compute_scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        # Predictions are compared with the exact scores instead of the rounded scores in the text.
        true = labels[: len(texts)]
        return compute_glue_metrics(task.metrics, parse_glue_predictions(task, texts, true), true)

    return Seq2SeqData(splits, compute_scores, task.metric_names, task.main_metric, {"task_name": task.name})


def _format_glue_split(task: GlueTask, name: str, split: ClassificationSplit) -> Seq2SeqSplit:
    """Format a split of a GLUE task as text."""
    columns = [split.data[f"text{i + 1}"] for i in range(len(task.text_columns))]
    sources = [format_glue_example(task, texts) for texts in zip(*columns, strict=True)]
    keys = [] if name == "train" else [{"index": index} for index in split.data["index"]]
    if "label" not in split.data.column_names:
        return Seq2SeqSplit(name, sources, None, keys)
    return Seq2SeqSplit(name, sources, [(format_glue_label(task, label),) for label in split.data["label"]], keys)


def _load_squad(settings: Seq2SeqSettings, files: dict[str, str | None]) -> Seq2SeqData:
    """Read SQuAD v1.1 as text."""
    splits = {}
    questions_by_split = load_squad(files, from_hub=not any(files.values()), with_train=not settings.only_evaluates)
    for name, questions in questions_by_split.items():
        sources = [f"question: {question.question} context: {question.context}" for question in questions]
        answers = [tuple(answer.text for answer in question.answers) for question in questions]
        keys = [] if name == "train" else [{"id": question.id} for question in questions]
        splits[name] = Seq2SeqSplit(name, sources, answers if name != "test" else None, keys)

    def compute_scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        normalize = choose_normalization(text for row in references for text in row)
        scores = np.array(
            [score_answer(text, row, normalize=normalize) for text, row in zip(texts, references, strict=True)]
        )
        return dict(zip(METRIC_NAMES[False], (100 * scores.mean(0)).tolist(), strict=True))

    return Seq2SeqData(splits, compute_scores, METRIC_NAMES[False], "f1", {"task_name": SQUAD})


def _count_text_tokens(ids: Tensor, eos_token_id: int | Sequence[int] | None) -> Tensor:
    """Count the tokens [b] up to and including the first end-of-sequence token in each row of `ids` [b, n]."""
    ends = torch.isin(
        ids, torch.as_tensor([] if eos_token_id is None else eos_token_id, device=ids.device).view(-1).to(ids.dtype)
    )
    is_before_end = ends.cumsum(-1) == 0
    return is_before_end.sum(-1) + ends.any(-1)


def get_beam_suffix(position: int, num_beams: int) -> str:
    """Return the suffix of metric names for a number of beams, which is empty for the first number in the list."""
    return f"_beam{num_beams}" if position else ""


class Seq2SeqFineTuning(FineTuningTask[Seq2SeqSettings]):
    """Fine-tuning for text-to-text tasks: translation, summarization, user-provided tables, and GLUE or SQuAD as text.

    The model is loaded from a checkpoint or, with `model_type`, trained from scratch. The results contain `eval_loss`
    (in nats per target token), `eval_<metric>` and `eval_decode_tokens_per_second`. For additional numbers of beams,
    the names have the suffix `_beam<number>`. For a test split, the names have the prefix `test_`.

    Example:
        ```python
        settings = Seq2SeqSettings(
            model_name_or_path="t5-gqa4", train_file=("train.csv",), validation_file=("dev.csv",), output_dir="out"
        )
        results = fine_tune(Seq2SeqFineTuning, settings)
        ```
    """

    rows: TextDataset

    name = "text to text"

    def __init__(self, settings: Seq2SeqSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config, self.tokenizer = models.load_or_make_config(settings, seq2seq=True)
        if not self.config.is_encoder_decoder:
            raise ValueError(f"--model_name_or_path must be an encoder-decoder, got {self.config.model_type}.")
        self.target_start = models.set_target_language(settings, self.tokenizer, self.config)
        models.check_appends_eos_token(settings, self.tokenizer)
        start = get_decoder_start_token(self.config)
        if start is None:
            raise ValueError(f"{settings.model_name_or_path} must have a decoder_start_token_id, but has none.")
        # `max_target_length` is always set, but the type checker does not know this.
        target_length, multiple = settings.max_target_length or settings.max_length, settings.pad_to_multiple_of
        for flag, length in (("max_length", settings.max_length), ("max_target_length", target_length)):
            models.check_max_length(length, self.config, self.tokenizer, flag=flag, pad_to_multiple_of=multiple)
        texts = fill_in_training_text_settings(settings)
        self.data = load_text_task(texts) if settings.task_name is not None else load_seq2seq_data(texts)
        self._limit_splits()
        metrics = () if settings.eval_loss_only else self.data.metric_names
        check_metric_for_best_model(settings.metric_for_best_model, ("loss", *metrics))
        check_dev_settings(settings, "dev" in self.data.splits)
        for split in self.data.splits.values():
            sources, targets = map(list, zip(*split.pairs(), strict=True))
            warn = partial(models.warn_about_truncation, self.tokenizer, split.name)
            warn("sources", {"text": sources}, "max_length", settings.max_length)
            warn("targets", {"text_target": targets}, "max_target_length", target_length)
        self.collate = make_source_target_collator(self.tokenizer, settings.max_length, multiple, target_length, start)
        self.rows = TextDataset(self.data.splits["train"].pairs() if "train" in self.data.splits else [])
        self.main_metric = "loss" if settings.eval_loss_only else self.data.main_metric
        self.shown_metrics = metrics
        self._warn_about_metric_direction()

    def _limit_splits(self) -> None:
        """Limit the splits to the maximum numbers of samples, and check that the required splits exist."""
        settings, splits = self.settings, self.data.splits
        limits = {"train": settings.max_train_samples, "dev": settings.max_eval_samples}
        splits.update({name: split.take(limits.get(name)) for name, split in splits.items()})
        if settings.skip_predict:
            splits.pop("test", None)
        if "train" not in splits and not settings.only_evaluates:
            raise ValueError("There is no training split. Add one, or set --num_train_epochs 0 to only evaluate.")
        if settings.only_evaluates and not splits.keys() & {"dev", "test"}:
            raise ValueError("There is neither a dev nor a test split to evaluate. Add one of them.")

    def _warn_about_metric_direction(self) -> None:
        """Warn whether higher or lower values are assumed to be better if a custom metric selects the best weights."""
        settings = self.settings
        metric = (settings.metric_for_best_model or self.main_metric).removeprefix("eval_")
        known_metrics = {"loss", *(name for metric in TEXT_METRICS.values() for name in metric.names)}
        if settings.task_name is not None or metric in known_metrics:
            return
        if settings.keeps_best_weights and settings.greater_is_better is None:
            rises = is_greater_better(metric)
            logger.warning(
                "The best weights are those with the %s %s. If the %s values are better, set --%sgreater_is_better.",
                "highest" if rises else "lowest", metric, "lowest" if rises else "highest", "no-" if rises else "",
            )  # fmt: skip

    def load_model(self) -> PreTrainedModel:
        model = models.load_or_make_model(self.settings, self.config, AutoModelForSeq2SeqLM)
        if self.target_start is not None:
            self.target_start.apply_to(model)
        return model

    def make_objective(self) -> optimization.Objective:
        return optimization.make_cross_entropy_objective(
            optimization.compute_target_logits, self.settings.label_smoothing_factor
        )

    def prepare_evaluation(self) -> bool:
        self.batches = {
            name: self.make_eval_batches(TextDataset(split.pairs()), list(map(len, split.sources)))
            for name, split in self.data.splits.items()
            if name != "train"
        }
        return "dev" in self.batches

    def evaluate(self) -> dict[str, float]:
        """Compute the loss and, unless `eval_loss_only` is set, the metrics for the first number of beams."""
        self.dev_texts: dict[int, list[str]] = {}
        beams = () if self.settings.eval_loss_only else self.settings.num_beams[:1]
        return {"loss": self.compute_loss(), **self._generate_dev_texts(beams)}

    def evaluate_final_weights(self, loop: TrainingLoop) -> None:
        """Evaluate the final weights, and also generate texts with the other numbers of beams."""
        super().evaluate_final_weights(loop)
        start = time.perf_counter()
        self.metrics |= self._generate_dev_texts(self.settings.num_beams)
        self.eval_seconds += time.perf_counter() - start

    def _generate_dev_texts(self, beams: Sequence[int]) -> dict[str, float]:
        """Generate dev texts for each number of beams that is not in `dev_texts` yet, and return the metrics."""
        metrics: dict[str, float] = {}
        for i, num_beams in enumerate(beams):
            if num_beams not in self.dev_texts:
                values, self.dev_texts[num_beams] = self._generate_and_score("dev", num_beams)
                metrics |= {f"{key}{get_beam_suffix(i, num_beams)}": value for key, value in values.items()}
        return metrics

    def compute_loss(self) -> float:
        """Compute the mean cross-entropy in nats over the target tokens of the dev split, without label smoothing."""

        def compute_outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            term = optimization.compute_token_cross_entropy(
                optimization.compute_target_logits(self.model, batch), batch["labels"]
            )
            return (torch.stack([part.float() for part in term], dim=-1),)  # [b, 2]

        batches = self.batches["dev"]
        rows = self.run_model_on_rows(batches, compute_outputs, "dev loss")[0]
        # The losses are summed in batch order because floating-point sums depend on the order.
        total, tokens = torch.from_numpy(rows[list(batches[1])]).double().sum(0).tolist()
        return total / max(tokens, 1)

    @torch.no_grad()
    def decode(self, split: str, num_beams: int) -> tuple[list[str], dict[str, float]]:
        """Generate one text for each row of a split, with beam search if there is more than one beam.

        Returns:
            The texts, and a dictionary with "decode_tokens" (on all processes, including end-of-sequence tokens but
            not padding), "decode_seconds" (spent in `generate` on the slowest process) and "decode_tokens_per_second".
        """
        accelerator, tokenizer = self.accelerator, self.tokenizer
        model = accelerator.unwrap_model(self.model).eval()
        options: dict[str, Any] = {}
        if self.settings.no_repeat_ngram_size is not None:
            options["no_repeat_ngram_size"] = self.settings.no_repeat_ngram_size
        if num_beams > 1:
            options["length_penalty"] = self.settings.length_penalty
        texts, tokens, seconds = [], 0, 0.0
        name = f"Decoding {split}" + (f" with {num_beams} beams" if num_beams > 1 else "")
        loader, order = self.batches[split]
        for batch in show_progress(accelerator, loader, name):
            start = time.perf_counter()
            # `generate` calls the encoder directly, so the autocast of the prepared model does not apply to this call.
            with accelerator.autocast():
                ids = models.generate_ids(model, batch, self.settings.max_target_length, num_beams, **options)
            ids = ids[:, 1:]  # without the decoder start token
            lengths = _count_text_tokens(ids, model.generation_config.eos_token_id)
            seconds += time.perf_counter() - start
            ids = accelerator.pad_across_processes(ids, dim=1, pad_index=tokenizer.pad_token_id)
            # `gather_for_metrics` drops the rows that were repeated to fill the last batch on each process.
            ids, lengths = accelerator.gather_for_metrics((ids, lengths))
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
            tokens += int(lengths.sum())
        slowest = float(accelerator.gather(torch.tensor([seconds], device=accelerator.device)).max())
        ordered_texts = [text for _, text in sorted(zip(order, texts, strict=True))]
        return ordered_texts, {
            "decode_tokens": tokens,
            "decode_seconds": round(slowest, 3),
            "decode_tokens_per_second": round(tokens / max(slowest, 1e-9), 1),
        }

    def _generate_and_score(self, split: str, num_beams: int) -> tuple[dict[str, float], list[str]]:
        """Generate texts for a split, and return the metrics and the texts.

        Without references, the metrics contain only the timings.
        """
        texts, times = self.decode(split, num_beams)
        references = self.data.splits[split].references
        scores = {} if references is None else self.data.score(texts, references)
        return {**scores, **times}, texts

    def get_fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.rows), "hash of the training data": hash_texts(self.rows.texts)}

    def get_dev_fingerprint(self) -> dict[str, Any]:
        dev = self.data.splits.get("dev")
        rows = []
        if dev is not None and dev.references is not None:
            rows = [(source, *right) for source, right in zip(dev.sources, dev.references, strict=True)]
        # Evaluations during training use the first number of beams.
        return {"hash of the dev data": hash_texts(rows), "num_beams": self.settings.num_beams[0]}

    def get_dev_results(self) -> dict[str, Any]:
        return {"eval_samples": len(self.data.splits["dev"])}

    def get_results(self) -> dict[str, Any]:
        return self.data.results

    def get_prediction_files(self) -> dict[str, str]:
        return dict([_format_predictions(self.data.splits["dev"], self.dev_texts)])

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if (test := self.data.splits.get("test")) is None:
            return {}, {}
        results: dict[str, Any] = {}
        texts = {}
        for i, num_beams in enumerate(self.settings.num_beams):
            metrics, texts[num_beams] = self._generate_and_score("test", num_beams)
            results |= {f"test_{key}{get_beam_suffix(i, num_beams)}": value for key, value in metrics.items()}
        return {**results, "test_samples": len(test)}, dict([_format_predictions(test, texts)])

    def format_summary(self, results: dict[str, Any]) -> str:
        lines = [
            f"{split} ({results[f'{prefix}samples']} rows): {self._format_scores(results, prefix)}\n"
            for prefix, split in (("eval_", "dev"), ("test_", "test"))
            if f"{prefix}samples" in results
        ]
        return "".join(lines)

    def _format_scores(self, results: dict[str, Any], prefix: str) -> str:
        """Format the metrics of a split for the summary."""
        parts = [f"loss {results['eval_loss']:.4f}"] if prefix == "eval_" else []
        for i, num_beams in enumerate(self.settings.num_beams):
            suffix = get_beam_suffix(i, num_beams)
            names = [name for name in self.data.metric_names if f"{prefix}{name}{suffix}" in results]
            values = [f"{name} {results[f'{prefix}{name}{suffix}']:.2f}" for name in names]
            speed = f"{results[f'{prefix}decode_tokens_per_second{suffix}']:.0f} tokens/s"
            parts.append(f"{'greedy' if num_beams == 1 else f'{num_beams} beams'}: {', '.join([*values, speed])}")
        return "; ".join(parts)


def _format_predictions(split: Seq2SeqSplit, texts: dict[int, list[str]]) -> tuple[str, str]:
    """Return the name and the content of a JSONL file with predictions.

    Each line contains the row's `keys`, the source, the references (if known) and the predictions.
    """
    lines = []
    for row, source in enumerate(split.sources):
        record: dict[str, Any] = {**split.keys[row], "source": source}
        if split.references is not None:
            record["references"] = list(split.references[row])
        for i, (num_beams, predictions) in enumerate(texts.items()):
            record[f"prediction{get_beam_suffix(i, num_beams)}"] = predictions[row]
        lines.append(json.dumps(record, ensure_ascii=False))
    return f"{split.name}.jsonl", "\n".join(lines) + "\n"
