"""Lines of text and pairs of texts to uptrain on: reading, holding out, and batches of token ids."""

import argparse
import csv
import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_attn_variants.training.masked_lm import MaskedLMPreparation

__all__ = [
    "IGNORED_LABEL",
    "Collator",
    "TextRows",
    "UptrainingData",
    "hash_texts",
    "hold_out",
    "is_table",
    "load_uptraining_data",
    "masked_text_collator",
    "pair_collator",
    "read_columns",
    "read_lines",
    "read_pairs",
    "text_collator",
]

# (epoch, index): what, with the run's seed, decides everything random about a row.
RowKey = tuple[int, int]
Row = str | tuple[str, ...]
Collator = Callable[[list[tuple[Any, RowKey]]], dict[str, Tensor]]
IGNORED_LABEL = -100
COMPRESSED_SUFFIX = ".gz"
MAX_FIELD = 2**27  # characters of a CSV's field: a document, not a file whose quotes do not end
TABLE_SUFFIXES = (".csv", ".json", ".jsonl")
# Held out of the training text where no validation file is given: this share, and no more than that many.
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 512


@dataclass
class TextRows(Dataset):
    """Texts by index, each with its key of this epoch.

    Attributes:
        texts: One text, or one (source, target) pair, a row.
        epoch: The epoch that the keys are for.
    """

    texts: list[Any]
    epoch: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Selects the epoch (from 0) whose keys the rows come with."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, RowKey]:
        return self.texts[index], (self.epoch, index)

    def lengths(self) -> list[int]:
        """Characters of each row (a pair's are added up): what rows are grouped by length with."""
        return [sum(map(len, row)) if isinstance(row, tuple) else len(row) for row in self.texts]

    def longest_first(self) -> "TextRows":
        """The same rows, longest first: little padding, and a batch that does not fit into memory fails at once."""
        lengths = self.lengths()
        order = sorted(range(len(self.texts)), key=lambda i: -lengths[i])
        return TextRows([self.texts[i] for i in order])


def _open_text(path: Path, newline: str) -> TextIO:
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    opened = gzip.open if path.suffix == COMPRESSED_SUFFIX else open
    return opened(path, "rt", encoding="utf-8-sig", newline=newline)


def _lines(path: Path) -> Iterator[str]:
    # A carriage return inside a line, as crawled text has, ends no line: its twin in the other language has none.
    for line in _whole_lines(path, newline="\n"):
        yield line.rstrip("\r\n")


def _whole_lines(path: Path, newline: str) -> Iterator[str]:
    with _open_text(path, newline) as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise OSError(f"{path} is no whole gzip file ({error})") from error


def read_lines(paths: Sequence[str | Path]) -> list[str]:
    """Reads the lines of text files that are not blank, in the files' order.

    Args:
        paths: UTF-8 text, plain or .gz.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not text, or has no line that is not blank.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        found = [line for line in _lines(path) if line.strip()]
        if not found:
            raise ValueError(f"{path} is empty: it has no line of text")
        texts += found
    return texts


def read_pairs(source_file: str | Path, target_file: str | Path) -> list[tuple[str, ...]]:
    """Reads parallel text: line i of one file belongs to line i of the other; pairs with a blank side are left out.

    Args:
        source_file, target_file: UTF-8 text, plain or .gz.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not text, they have unequal numbers of lines, or no pair.
    """
    sources, targets = (list(_lines(Path(path))) for path in (source_file, target_file))
    if len(sources) != len(targets):
        raise ValueError(
            f"{source_file} has {len(sources)} lines and {target_file} has {len(targets)}: parallel text has as many"
        )
    pairs: list[tuple[str, ...]] = [(s, t) for s, t in zip(sources, targets, strict=True) if s.strip() and t.strip()]
    if not pairs:
        raise ValueError(f"{source_file} and {target_file} are empty: they have no pair of lines")
    return pairs


def read_columns(paths: Sequence[str | Path], columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Reads text columns of tables; rows with a blank one are left out.

    Args:
        paths: .csv with a header, .json (a list of objects, or one object a line) or .jsonl, each also as .gz.
        columns: Their names.

    Raises:
        OSError: A file cannot be read.
        ValueError: It is no such table, lacks a column, or has no row.
    """
    rows: list[tuple[str, ...]] = []
    for path in map(Path, paths):
        found = []
        for number, record in enumerate(_records(path), start=1):
            missing = [name for name in columns if not isinstance(record.get(name), str)]
            if missing:
                has = ", ".join(str(name) for name in record) or "none"
                raise ValueError(f"{path}, row {number}: no text in column {missing[0]!r}; its columns are {has}")
            if all(record[name].strip() for name in columns):
                found.append(tuple(record[name] for name in columns))
        if not found:
            raise ValueError(f"{path} is empty: it has no row of text")
        rows += found
    return rows


def is_table(path: str | Path) -> bool:
    """Whether a file's name is that of a table: .csv, .json or .jsonl, or those .gz."""
    return _suffix(Path(path)) in TABLE_SUFFIXES


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == COMPRESSED_SUFFIX else path.suffix


def _records(path: Path) -> Iterator[dict[str, Any]]:
    suffix = _suffix(path)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(
            f"{path}: parallel text in one file must be one of {', '.join(TABLE_SUFFIXES)} (or those .gz)"
        )
    if suffix == ".csv":
        csv.field_size_limit(MAX_FIELD)
        reader = csv.DictReader(_whole_lines(path, newline=""))
        try:
            yield from reader
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        return
    lines = (line for line in _lines(path) if line.strip())
    first = next(lines, "")
    try:
        if first.lstrip().startswith("["):
            records = json.loads("\n".join([first, *lines]))
        else:
            records = [json.loads(line) for line in itertools.chain([first] if first else [], lines)]
    except ValueError as error:
        raise ValueError(f"{path} is neither a JSON list nor one JSON object a line: {error}") from error
    for record in records:
        if not isinstance(record, dict):
            raise ValueError(f"{path} must hold JSON objects, got {type(record).__name__}")
        yield record


def hold_out(texts: list[Any], max_rows: int | None = None) -> tuple[list[Any], list[Any]]:
    """Splits off the last rows for evaluation (lines beside each other often come from one article).

    Args:
        texts: All rows.
        max_rows: Of the 5 % that are held out, no more than this; None: 512.

    Returns:
        Rows to train on, rows held out.

    Raises:
        ValueError: There are fewer than two.
    """
    if len(texts) < 2:
        raise ValueError("the training text has one row, so none can be held out: give a validation file")
    count = min(max_rows or MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(texts))))
    return texts[:-count], texts[-count:]


def hash_texts(texts: list[Any]) -> str:
    """Hash of all rows, by which a resumed run knows that they are the same."""
    digest = hashlib.sha256()
    for row in texts:
        for text in row if isinstance(row, tuple) else (row,):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def text_collator(tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None) -> Collator:
    """Makes the function from `TextRows` rows, texts or pairs of them, to a batch of the tokenizer's inputs [b, n]."""

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        return _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)

    return collate


def masked_text_collator(
    tokenizer: PreTrainedTokenizerBase, max_length: int, pad_to_multiple_of: int | None, probability: float, seed: int
) -> Collator:
    """Makes the function from rows to a batch of masked language modelling, with "labels" [b, n].

    Args:
        tokenizer: Has a mask token.
        max_length, pad_to_multiple_of: As the flags of these names.
        probability: Chance of each token to be predicted.
        seed: With a row's key it alone decides which are, so that a resumed run masks the same ones.

    Raises:
        ValueError: The tokenizer lacks a token that masking needs.
    """
    prepare = MaskedLMPreparation(tokenizer, max_length, probability, seed)

    def collate(rows: list[tuple[Row, RowKey]]) -> dict[str, Tensor]:
        batch = _tokenize(tokenizer, [text for text, _ in rows], max_length, pad_to_multiple_of)
        masked = [
            prepare.mask(ids, np.random.default_rng((seed, *key)))
            for ids, (_, key) in zip(batch["input_ids"].numpy(), rows, strict=True)
        ]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*masked, strict=True))
        return {**batch, "input_ids": inputs, "labels": labels}

    return collate


def pair_collator(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    pad_to_multiple_of: int | None,
    max_target_length: int,
    decoder_start_token_id: int,
    source_prefix: str = "",
) -> Collator:
    """Makes the function from (source, target) rows to a batch of teacher forcing.

    Its batches hold the tokenizer's inputs of the sources [b, m], "labels" [b, n] and "decoder_input_ids" [b, n]: the
    labels moved one to the right.
    """

    def collate(rows: list[tuple[tuple[str, str], RowKey]]) -> dict[str, Tensor]:
        batch = _tokenize(
            tokenizer, [source_prefix + source for (source, _), _ in rows], max_length, pad_to_multiple_of
        )
        targets = tokenizer(
            text_target=[target for (_, target), _ in rows],
            padding=True,
            truncation=True,
            max_length=max_target_length,
            pad_to_multiple_of=pad_to_multiple_of,
            return_tensors="pt",
        )
        ids = targets["input_ids"]
        shifted = torch.cat([torch.full_like(ids[:, :1], decoder_start_token_id), ids[:, :-1]], dim=1)
        labels = ids.masked_fill(targets["attention_mask"] == 0, IGNORED_LABEL)
        return {**batch, "decoder_input_ids": shifted, "labels": labels}

    return collate


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Row], max_length: int, pad_to_multiple_of: int | None
) -> dict[str, Tensor]:
    # Pairs in one sequence, as the tokenizer joins them; the longer of the two is cut.
    columns = [list(column) for column in zip(*texts, strict=True)] if isinstance(texts[0], tuple) else [texts]
    encoded = tokenizer(
        *columns,
        padding=True,
        truncation=True,
        max_length=max_length,
        pad_to_multiple_of=pad_to_multiple_of,
        return_tensors="pt",
    )
    return dict(encoded)


@dataclass(frozen=True)
class UptrainingData:
    """Rows to train on, rows to evaluate, and how they become batches."""

    train: TextRows
    held_out: TextRows
    collate: Collator


def load_uptraining_data(
    args: argparse.Namespace, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> UptrainingData:
    """Reads what the flags of `scripts/uptrain.py` name: texts or pairs for an encoder, pairs for an encoder-decoder.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file holds something else, or a flag is missing.
    """
    collate = _collator(args, config, tokenizer)
    train_pair, eval_pair = _parallel(args, ""), _parallel(args, "validation_")
    if (train_pair is None) == (args.train_file is None):
        needs, table = ("an encoder-decoder", " a table as") if config.is_encoder_decoder else ("an encoder", "")
        raise ValueError(f"{needs} needs --source_file and --target_file, or else{table} --train_file")
    train = _read_rows(args, config, args.train_file, train_pair)
    held_out = _read_rows(args, config, args.validation_file, eval_pair)
    if held_out and isinstance(train[0], tuple) != isinstance(held_out[0], tuple):
        raise ValueError("of the training and the validation text, one is pairs and the other is single texts")
    if not held_out:
        train, held_out = hold_out(train, args.max_eval_samples)
    return UptrainingData(
        TextRows(train[: args.max_train_samples]), TextRows(held_out[: args.max_eval_samples]).longest_first(), collate
    )


def _parallel(args: argparse.Namespace, which: str) -> tuple[str, str] | None:
    names = [f"{which}source_file", f"{which}target_file"]
    source, target = (getattr(args, name) for name in names)
    if (source is None) != (target is None):
        raise ValueError(f"--{names[0]} and --{names[1]} belong together")
    return (source, target) if source else None


def _read_rows(
    args: argparse.Namespace, config: PreTrainedConfig, files: Sequence[str] | None, parallel: tuple[str, str] | None
) -> list[Any]:
    if parallel is not None:
        return read_pairs(*parallel)
    files = files or []
    source, target = args.source_column, args.target_column
    if config.is_encoder_decoder:
        return read_columns(files, (source or "source", target or "target"))
    tables = [path for path in files if is_table(path)]
    if not tables:
        return read_lines(files)
    if len(tables) < len(files):
        other = next(path for path in files if path not in tables)
        raise ValueError(f"{tables[0]} is a table and {other} is not: give files of one kind")
    rows = read_columns(files, [source or "text", *([target] if target else [])])
    return rows if target else [text for (text,) in rows]


def _collator(args: argparse.Namespace, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Collator:
    shape = args.max_length, args.pad_to_multiple_of
    if args.objective == "mlm":
        return masked_text_collator(tokenizer, *shape, args.mlm_probability, args.seed)
    if not config.is_encoder_decoder:
        return text_collator(tokenizer, *shape)
    start = config.decoder_start_token_id
    if start is None:
        raise ValueError(f"{args.model_name_or_path} has no decoder_start_token_id: its decoder could not begin")
    return pair_collator(tokenizer, *shape, args.max_target_length or args.max_length, start, args.source_prefix)
