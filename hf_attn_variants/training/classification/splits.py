"""The rows of a split that a classifier reads: texts or pairs of them, their labels, and how they become tokens."""

import hashlib
import json
import logging
import uuid
from dataclasses import dataclass, replace
from typing import Self

from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from ...table_files import row_place

__all__ = ["ClassificationSplit", "hash_rows", "make_rows", "tokenize_split"]

logger = logging.getLogger(__name__)


@dataclass
class ClassificationSplit:
    """The rows of one split."""

    name: str  # the Hub's: "train", "validation_matched", "test", ...
    # Columns `text1`, `text2` (pairs only), `label` (where there is one) and `index`: the row's number, in GLUE the
    # submission's. Rows of a user's tables have their `file` and `line` as well.
    data: Dataset

    def __len__(self) -> int:
        return len(self.data)

    def first(self, count: int | None) -> Self:
        """Return the split's first `count` rows, with None all of them."""
        return self if count is None else replace(self, data=self.data.take(min(count, len(self.data))))

    def where(self, number: int) -> str:
        """Say where a row, counted from 0, comes from."""
        names = [name for name in ("file", "line", "index") if name in self.data.column_names]
        row = self.data.select_columns(names)[number]
        return row_place(row.get("file", self.name), row.get("line"), row.get("index", number))


def make_rows(columns: dict[str, list]) -> Dataset:
    """Make rows in memory, of columns of one length.

    Given no fingerprint, as by `Dataset.from_dict`, datasets hashes the table by dill, which fails where pyarrow lies
    in a folder that is not named site-packages.
    """
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=uuid.uuid4().hex)


def hash_rows(split: ClassificationSplit, chunk: int = 10_000) -> str:
    """Return a short hash of a split's texts and labels, in their order."""
    columns = [name for name in ("text1", "text2", "label") if name in split.data.column_names]
    data = split.data.select_columns(columns)
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(data), chunk):
        rows = data[start : start + chunk]
        digest.update(json.dumps([rows[name] for name in columns]).encode())
    return digest.hexdigest()


def tokenize_split(split: ClassificationSplit, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenise a split without padding; that is done per batch. The longer text of a pair is cut first.

    Return the tokenizer's columns (lists of ints), `label` where there is one, and `length` (tokens).
    """
    pair = "text2" in split.data.column_names

    def encode(rows: dict) -> dict:
        texts = (rows["text1"], rows["text2"]) if pair else (rows["text1"],)
        encoded = dict(tokenizer(*texts, truncation=True, max_length=max_length, padding=False))
        encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
        return encoded

    unused = [name for name in split.data.column_names if name != "label"]
    # A longer name than this leaves no room for the bar in 80 columns.
    shown = f"{split.name.replace('validation', 'dev')} tokens"
    data = split.data.map(encode, batched=True, remove_columns=unused, desc=shown)
    if full := sum(length == max_length for length in data["length"]):
        message = "%s: %d of %d examples fill --max_length %d and may have been cut"
        logger.info(message, split.name, full, len(data), max_length)
    return data
