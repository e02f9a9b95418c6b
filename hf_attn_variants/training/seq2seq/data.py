"""Pairs of texts for an encoder-decoder, and GLUE tasks in T5's text-to-text form."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...glue_tasks import GlueTask, get_task
from ...input_files import is_blank
from ...text_files import (
    PlacedRows,
    check_unused,
    column_names,
    column_value,
    filled_rows,
    has_texts,
    read_lines,
    read_placed_columns,
    read_placed_pairs,
    read_records,
    row_place,
)
from ..classification.data import ClassificationSplit
from ..engine.tables import apply_recorded_columns, find_split_files, load_splits
from ..engine.tokenizers import check_max_length, warn_about_truncation
from ..glue.data import load_glue
from ..glue.task import compute_metrics
from ..squad.data import Question, load_squad
from ..squad.metrics import score_answer
from ..squad.settings import METRIC_NAMES
from .metrics import choose_tokenizer, log_tokenizer, score_texts, text_metric
from .settings import COLUMNS, SPLITS, SQUAD, Seq2SeqSettings

__all__ = [
    "Seq2SeqData",
    "Seq2SeqSplit",
    "check_encoder_decoder",
    "check_seq2seq_lengths",
    "format_glue",
    "format_label",
    "format_squad",
    "load_seq2seq_data",
    "load_task",
    "parse_texts",
    "warn_of_long_texts",
    "with_recorded_texts",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seq2SeqSplit:
    """The rows of one split.

    Attributes:
        sources: what the encoder reads, prefix included.
        references: the texts that are right for each source, the first of them the one to train on; None: unknown.
        keys: what predictions call each row, such as {"row": 3}; empty for training.
    """

    name: str
    sources: list[str]
    references: list[tuple[str, ...]] | None
    keys: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sources)

    def first(self, count: int | None) -> "Seq2SeqSplit":
        """Return the split's first `count` rows, with None all of them."""
        references = self.references[:count] if self.references is not None else None
        return Seq2SeqSplit(self.name, self.sources[:count], references, self.keys[:count])

    def pairs(self) -> list[tuple[str, str]]:
        """Return (source, target) of each row, the target empty where none is known."""
        if self.references is None:
            return [(source, "") for source in self.sources]
        return [(source, row[0]) for source, row in zip(self.sources, self.references, strict=True)]


@dataclass(frozen=True)
class Seq2SeqData:
    """What is trained on, evaluated and predicted.

    Attributes:
        splits: by name, those that there are of "train", "dev" and "test".
        score: (predictions, references) -> metrics of a split, by `metric_names`.
        main_metric: the one that the best weights are told by.
        results: further entries of the results.
    """

    splits: dict[str, Seq2SeqSplit]
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]]
    metric_names: tuple[str, ...]
    main_metric: str
    results: dict[str, Any] = field(default_factory=dict)


def load_seq2seq_data(settings: Seq2SeqSettings) -> Seq2SeqData:
    """Read what the flags name: parallel text, tables, or a `datasets` source.

    Args:
        settings: of the run, by `with_recorded_texts`.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if it holds something else, has no row, or lacks a column.
    """
    metrics, names = _metrics(settings)  # first: others' code may fail
    splits = {}
    for name, prefix in (("train", ""), ("dev", "validation_"), ("test", "test_")):
        if (name == "train" and settings.only_evaluates) or (name == "test" and settings.skip_predict):
            continue
        rows = _read_split(settings, name, prefix)
        if rows is not None:
            sources = [(settings.source_prefix or "") + row[0] for row in rows.texts]
            references = [row[1:] for row in rows.texts] if len(rows.texts[0]) > 1 else None
            splits[name] = Seq2SeqSplit(name, sources, references, [] if name == "train" else _keys(rows))
    if "test" in splits and splits["test"].references is None and settings.test_source_file is None:
        logger.warning("test: there is no text in column %r: it is not scored", _columns(settings)[1])
    reads_columns = settings.dataset_name is not None or any(getattr(settings, f"{name}_file") for name in SPLITS)
    results: dict[str, Any] = dict(zip(COLUMNS, _columns(settings), strict=True)) if reads_columns else {}
    if settings.source_prefix:
        results["source_prefix"] = settings.source_prefix
    tokenize = settings.tokenize
    if "bleu" in metrics:
        known = (row for split in reversed(splits.values()) for row in split.references or ())
        tokenize = tokenize or choose_tokenizer((text for row in known for text in row), settings.target_lang)
        log_tokenizer(tokenize, settings.tokenize is not None)
        results["bleu_tokenizer"] = tokenize
    score = partial(score_texts, metrics, trust_remote_code=settings.trust_remote_code, tokenize=tokenize)
    return Seq2SeqData(splits, score, names, names[0], results)


def _keys(rows: PlacedRows) -> list[dict[str, Any]]:
    """Return the row of each, from 1, and its file where there are several, as `classify` names them."""
    if len({*rows.files}) == 1:
        return [{"row": number} for number in rows.numbers]
    return [{"file": file, "row": number} for file, number in zip(rows.files, rows.numbers, strict=True)]


def _metrics(settings: Seq2SeqSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the metrics, and what their values are called.

    Raises:
        ValueError: if one cannot be computed, or two values have one name.
    """
    given: Any = settings.metrics  # which have a default by now
    metrics: tuple[str, ...] = tuple(given)
    names = tuple(value for name in metrics for value in text_metric(name).names)
    for name in ("loss", *names):
        if ("loss", *names).count(name) > 1:
            raise ValueError(f"--metrics {' '.join(metrics)}: two values would be called {name!r}; give one of them")
    return metrics, names


def with_recorded_texts(settings: Seq2SeqSettings) -> Seq2SeqSettings:
    """Return the settings of a run that only evaluates with the columns and the prefix of the model's training.

    Those that are given stay, as do all of another run.
    """
    if not settings.only_evaluates:
        return settings
    return apply_recorded_columns(settings, _first_row(settings), dict.fromkeys(COLUMNS, ()), ("source_prefix",))


def _first_row(settings: Seq2SeqSettings) -> dict[str, Any] | None:
    """Return a row that is read; None where no column is."""
    if settings.task_name is not None:
        return None
    files = find_split_files(settings)
    if settings.dataset_name is not None and files is None:
        return next((split[0] for split in load_splits(settings).values() if len(split)), None)
    tables = settings.validation_file or settings.test_file
    if files is not None:
        tables = files.get("validation") or files.get("test")
    record = next(read_records(Path(tables[0])), None) if tables else None
    return None if record is None else record.values


def _columns(settings: Seq2SeqSettings) -> tuple[str, str]:
    """Return the columns of sources and of targets."""
    source, target = (getattr(settings, name) or default for name, default in COLUMNS.items())
    return source, target


def _read_split(settings: Seq2SeqSettings, name: str, prefix: str) -> PlacedRows | None:
    source, target = getattr(settings, f"{prefix}source_file"), getattr(settings, f"{prefix}target_file")
    table = getattr(settings, f"{prefix or 'train_'}file")
    if (files := find_split_files(settings)) is not None:
        table = files.get({"dev": "validation"}.get(name, name))
        if table is None:
            return None
    columns: tuple[str, ...] = _columns(settings)
    if source is not None and target is not None:
        return read_placed_pairs(source, target)
    # Where there are only sources, predictions stay beside them: a blank one is a row too.
    if source is not None:
        lines: list[tuple[str, ...]] = [(line,) for line in read_lines([source], keep_blank=True)]
        return PlacedRows(lines, [source] * len(lines), [*range(1, len(lines) + 1)])
    if table is not None:
        flags = "--source_column and --target_column"
        if name == "test" and not has_texts(_table_rows(table), columns[1]):
            return read_placed_columns(table, columns[:1], flags, keep_blank=True, unused=columns[1])
        return read_placed_columns(table, columns, flags)
    return _read_dataset(settings, name, columns) if settings.dataset_name is not None else None


def _read_dataset(settings: Seq2SeqSettings, name: str, columns: tuple[str, ...]) -> PlacedRows | None:
    splits = load_splits(settings)
    split = {"dev": "validation"}.get(name, name)
    if split not in splits:
        return None
    unused = None
    if name == "test" and not has_texts(splits[split], columns[1]):
        columns, unused = columns[:1], columns[1]  # its targets are not public, as those of many test splits
    rows = []
    for number, row in enumerate(splits[split], start=1):
        check_unused(row, unused, row_place(f"{settings.dataset_name} ({split})", None, number))
        texts = tuple(column_value(row, column) for column in columns)
        if not all(isinstance(text, str) for text in texts):
            missing = next(c for c, text in zip(columns, texts, strict=True) if not isinstance(text, str))
            raise ValueError(
                f"{settings.dataset_name} ({split}), row {number}: no text in column {missing!r}; its columns are "
                f"{', '.join(column_names(row))}: give others with --source_column and --target_column"
            )
        rows.append(texts)
    place, kept = f"{settings.dataset_name} ({split})", [*range(len(rows))]
    if len(columns) > 1:
        kept = filled_rows(place, "row", rows, lambda i: row_place(place, None, i + 1))
    texts_kept = [rows[i] for i in kept]
    if all(is_blank(text) for texts in texts_kept for text in texts):
        raise ValueError(f"{place} has no row of text")
    return PlacedRows(texts_kept, [place] * len(kept), [i + 1 for i in kept])


def _table_rows(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    return (record.values for path in paths for record in read_records(Path(path)))


def check_encoder_decoder(settings: Seq2SeqSettings, config: PreTrainedConfig) -> None:
    """Raise ValueError unless the model is an encoder-decoder."""
    if not config.is_encoder_decoder:
        raise ValueError(
            f"{settings.model_name_or_path} ({config.model_type}) is an encoder; text to text needs an encoder-decoder"
        )


def check_seq2seq_lengths(
    settings: Seq2SeqSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that sources and targets of the lengths asked for fit the model, and leave room for text.

    Raises:
        ValueError: if a length is too long or too short, or the model's decoder cannot begin.
    """
    if config.decoder_start_token_id is None:
        raise ValueError(f"{settings.model_name_or_path} has no decoder_start_token_id: its decoder could not begin")
    for name in ("max_length", "max_target_length"):
        check_max_length(getattr(settings, name), config, tokenizer, flag=name, multiple=settings.pad_to_multiple_of)


def warn_of_long_texts(
    split: Seq2SeqSplit, tokenizer: PreTrainedTokenizerBase, max_length: int, max_target_length: int
) -> dict[str, int]:
    """Warn of sources and targets that have more tokens than they may.

    Return how many of the split's first 10,000 rows are cut: "sources" and "targets".
    """
    sources, targets = map(list, zip(*split.pairs(), strict=True))
    sides = {
        "sources": ({"text": sources}, "max_length", max_length),
        "targets": ({"text_target": targets}, "max_target_length", max_target_length),
    }
    return {side: warn_about_truncation(tokenizer, split.name, side, *limited) for side, limited in sides.items()}


# What T5 calls a task's texts, in its order (the second text first in MNLI); elsewhere the column's name.
WORDS: dict[str, tuple[tuple[int, str], ...]] = {
    "mnli": ((1, "hypothesis"), (0, "premise")),
    "mrpc": ((0, "sentence1"), (1, "sentence2")),
}
# T5 rounds scores to fifths, so that they are texts which occur often enough to be learned.
SCORE_STEPS = 5


def format_glue(task: GlueTask, texts: Sequence[str]) -> str:
    """Word an example: "qnli question: ... sentence: ..."."""
    words = WORDS.get(task.name) or tuple((i, names[0]) for i, names in enumerate(task.text_columns))
    return " ".join([task.name, *(f"{word}: {texts[i]}" for i, word in words)])


def format_label(task: GlueTask, label: float) -> str:
    """Word a label: a class name, or a score rounded to 0.2."""
    if task.labels is None:
        return f"{round(label * SCORE_STEPS) / SCORE_STEPS:.1f}"
    return task.labels[int(label)]


def parse_texts(task: GlueTask, texts: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Read generated texts as class ids, or scores (-1 where a text is no number).

    A text that is no class name counts as another class than the true one, of `labels`.
    """
    if task.labels is None:
        return np.array([_parse_score(text) for text in texts])
    names = {name: i for i, name in enumerate(task.labels)}
    wrong = (np.asarray(labels) + 1) % len(names)
    return np.array([names.get(text.strip(), other) for text, other in zip(texts, wrong, strict=True)])


def _parse_score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def format_squad(question: Question) -> str:
    """Word an example: "question: ... context: ..."."""
    return f"question: {question.question} context: {question.context}"


def load_task(settings: Seq2SeqSettings) -> Seq2SeqData:
    """Read the task that `--task_name` names.

    Raises:
        OSError: if a file or the Hub's dataset cannot be read.
        ValueError: if there is no such task, or a file is wrong.
    """
    files = {f"{name}_file": _one_file(settings, name) for name in ("train", "validation", "test")}
    data = _load_squad(settings, files) if (settings.task_name or "").lower() == SQUAD else _load_glue(settings, files)
    if settings.source_prefix:
        data.results["source_prefix"] = settings.source_prefix
        for name, split in data.splits.items():
            data.splits[name] = replace(split, sources=[settings.source_prefix + source for source in split.sources])
    return data


def _one_file(settings: Seq2SeqSettings, name: str) -> str | None:
    given = getattr(settings, f"{name}_file")
    if given is not None and len(given) > 1:
        raise ValueError(f"--{name}_file: --task_name {settings.task_name} has one file, got {len(given)}")
    return given[0] if given else None


def _load_glue(settings: Seq2SeqSettings, files: dict[str, str | None]) -> Seq2SeqData:
    task = get_task(settings.task_name or "")
    loaded = load_glue(task, settings.data_dir, files, with_train=not settings.only_evaluates)
    dev, test = next(iter(task.eval_splits)), next(iter(task.test_splits))
    sources = {"train": "train", "dev": dev, "test": test}
    splits = {name: _glue_split(task, name, loaded[split]) for name, split in sources.items() if split in loaded}
    labels = np.asarray(loaded[dev].data["label"])

    def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        # A score's own value, and not the one it is worded as, is what it is compared with.
        true = labels[: len(texts)]
        return compute_metrics(task.metrics, parse_texts(task, texts, true), true)

    names = (*task.metrics, *(["combined_score"] if len(task.metrics) > 1 else []))
    return Seq2SeqData(splits, score, names, task.main_metric, {"task_name": task.name})


def _glue_split(task: GlueTask, name: str, split: ClassificationSplit) -> Seq2SeqSplit:
    columns = [split.data[f"text{i + 1}"] for i in range(len(task.text_columns))]
    sources = [format_glue(task, texts) for texts in zip(*columns, strict=True)]
    keys = [] if name == "train" else [{"index": index} for index in split.data["index"]]
    if "label" not in split.data.column_names:
        return Seq2SeqSplit(name, sources, None, keys)
    return Seq2SeqSplit(name, sources, [(format_label(task, label),) for label in split.data["label"]], keys)


def _load_squad(settings: Seq2SeqSettings, files: dict[str, str | None]) -> Seq2SeqData:
    if settings.data_dir is not None:
        raise ValueError("--data_dir is for GLUE; --task_name squad reads --train_file and --validation_file")
    splits = {}
    found = load_squad(files, from_hub=not any(files.values()), with_train=not settings.only_evaluates)
    for name, questions in found.items():
        sources = list(map(format_squad, questions))
        answers = [tuple(answer.text for answer in question.answers) for question in questions]
        keys = [] if name == "train" else [{"id": question.id} for question in questions]
        splits[name] = Seq2SeqSplit(name, sources, answers if name != "test" else None, keys)

    def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        scores = np.array([score_answer(text, row) for text, row in zip(texts, references, strict=True)])
        return dict(zip(METRIC_NAMES[False], (100 * scores.mean(0)).tolist(), strict=True))

    return Seq2SeqData(splits, score, METRIC_NAMES[False], "f1", {"task_name": SQUAD})
