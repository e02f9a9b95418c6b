"""A stream of text from files or a `datasets` source, tokenized and packed into blocks."""

import hashlib
import itertools
import logging
import os
import re
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import datasets
import numpy as np
import torch
from datasets import IterableDatasetDict
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from ...input_files import check_ordinary, ends_by_returns, is_blank, lines_of, open_file
from ...text_files import is_table, read_records
from ..engine.dataloaders import IGNORED_LABEL
from ..engine.tables import find_split_files
from .settings import PretrainingSettings, TextSettings, check_evaluated

__all__ = [
    "DatasetRows",
    "FolderFile",
    "Place",
    "PretrainingText",
    "TextFile",
    "TextSource",
    "TextStream",
    "check_text_files",
    "hash_files",
    "open_text",
    "open_text_sources",
    "pack_blocks",
    "read_blocks",
    "stack_rows",
]

logger = logging.getLogger(__name__)

# Longer articles are cut at the next line end, and longer lines between words, so that a file without empty lines, or
# without lines, is a stream as well.
MAX_ARTICLE_BYTES = 2**18
# Bytes at either end of a file that stand for its content.
HASHED_BYTES = 2**16


class TextSource(Protocol):
    """A shard of text that can be read from the middle."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def keeps_whitespace(self) -> bool:
        """Whether its line ends, tabs and runs of spaces are to be read; else each is one space."""

    def articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield each article from `offset` on, with the offset that it begins at."""


@dataclass(frozen=True)
class TextFile:
    """A UTF-8 text file, plain or .gz, articles separated by empty lines; offsets are in bytes of text."""

    path: Path
    keeps_whitespace: bool = False

    @property
    def name(self) -> str:
        return str(self.path)

    def articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield each article from `offset` on, with the offset that it begins at.

        Raises:
            OSError: if the file cannot be read, is no whole gzip file or is not UTF-8; the message names the file and
                where in its text.
            ValueError: if it has a null character, which no text has.
        """
        begin, lines, size = offset, [], 0
        try:
            with self._open() as file:
                by_returns = ends_by_returns(file)
                file.seek(offset)
                for line in itertools.chain(_lines(file, by_returns), [b""]):  # the end of the file ends an article
                    if b"\0" in line:
                        raise ValueError(f"{self.path} holds a null character: it is no text, or not in UTF-8")
                    if line.strip():
                        lines.append(line)
                    size += len(line)
                    if not line.strip() or size >= MAX_ARTICLE_BYTES:
                        if lines:
                            yield begin, b"".join(lines).decode("utf-8" if begin else "utf-8-sig")
                        begin, lines, size = begin + size, [], 0
        except UnicodeDecodeError as error:
            raise OSError(f"{self.path}: not UTF-8 text ({error.reason} in the article at byte {begin})") from error
        except (OSError, EOFError, zlib.error) as error:
            raise OSError(f"{self.path}: cannot be read beyond byte {begin + size} of its text ({error})") from error

    def _open(self) -> BinaryIO:
        return open_file(self.path)


def _lines(file: BinaryIO, by_returns: bool) -> Iterator[bytes]:
    """Yield a file's lines; of a longer one than an article may be parts, cut between words where there are any."""
    rest = b""
    while line := file.readline(MAX_ARTICLE_BYTES - len(rest)):
        line, rest = rest + line, b""
        if by_returns:
            *whole, line = line.splitlines(keepends=True)
            yield from whole
            if not line.endswith(b"\n") and len(line) < MAX_ARTICLE_BYTES:
                rest = line
                continue
        if len(line) == MAX_ARTICLE_BYTES and not line.endswith(b"\n"):
            cut = line.rfind(b" ") + 1 or _last_character(line) or len(line)
            line, rest = line[:cut], line[cut:]
        yield line
    if rest:
        yield rest


def _last_character(line: bytes) -> int:
    """Return where the last character of UTF-8 begins, which may not be whole."""
    begin = len(line) - 1
    while begin and line[begin] & 0xC0 == 0x80:
        begin -= 1
    return begin


@dataclass(frozen=True)
class DatasetRows:
    """A shard of a streamed split of a `datasets` source, one article a row; offsets are row numbers in the shard."""

    name: str
    rows: datasets.IterableDataset
    column: str = "text"
    shard: int = 0
    keeps_whitespace: bool = False

    def articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield each row's text from `offset` on, with the row's number.

        Raises:
            OSError: if the shard cannot be read; the message says beyond which row. Formats that are read in blocks
                fail before the first row of the block.
            ValueError: if a row has no such column, or something else than text in it. A row without a value is left
                out, as a blank one.
        """
        rows = iter(self.rows.shard(self.rows.num_shards, self.shard).skip(offset))
        for number in itertools.count(offset):
            try:
                row = next(rows, None)
            except Exception as error:  # every file format has errors of its own
                # Arrow counts rows from the block that it reads.
                reason = re.sub(r" in row \d+$", "", f"{type(error).__name__}: {error}")
                raise OSError(f"{self.name}: cannot be read beyond row {number} ({reason})") from error
            if row is None:
                return
            text = row.get(self.column)
            if isinstance(text, str):
                yield number, text
            elif self.column in row and text is None:
                _warn_of_nothing(self.name, self.column, number)
            else:
                raise _no_text(self.name, number, self.column, row)


@dataclass(frozen=True)
class FolderFile:
    """A table, or a .txt file with an article per line, of a local folder; offsets are row numbers."""

    name: str
    path: Path
    column: str = "text"
    keeps_whitespace: bool = False

    def articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield each row's text from `offset` on, with the row's number; rows without a text are left out.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if a row does not fit the header or has no text in the column; the message names the row.
        """
        if is_table(self.path):
            rows = (record.values for record in read_records(self.path))
        else:
            rows = ({"text": line} for line in lines_of(self.path))
        for number, row in itertools.islice(enumerate(rows), offset, None):
            text = row.get(self.column)
            if not isinstance(text, str):
                raise _no_text(self.name, number, self.column, row)
            if not is_blank(text):
                yield number, text


def _no_text(name: str, number: int, column: str, row: dict[str, Any]) -> ValueError:
    return ValueError(
        f"{name}, row {number}: no text in the column {column!r}; the columns are {', '.join(row)}: give another "
        "--text_column"
    )


_warned: set[tuple[str, str]] = set()


def _warn_of_nothing(name: str, column: str, number: int) -> None:
    if (name, column) not in _warned:  # a shard is read in each epoch, and from many places
        _warned.add((name, column))
        logger.warning("%s: rows without a value in the column %r are left out; row %d is one", name, column, number)


def check_text_files(paths: Iterable[str | Path], keeps_whitespace: bool = False) -> list[TextFile]:
    """Open text files and read the first article of each.

    Raises:
        OSError: if one is not there, or cannot be read.
        ValueError: if one is a table, or holds no text.
    """
    files = [TextFile(Path(path), keeps_whitespace) for path in paths]
    for file in files:
        if not file.path.exists():
            raise FileNotFoundError(f"there is no file {file.path}")
        if file.path.is_dir():
            raise OSError(f"{file.path} is a folder; give its files, {file.path}/*.txt.gz for example")
        if is_table(file.path):
            raise ValueError(
                f"{file.path} is a table, and would be read as text, names of columns with it: write its texts into a "
                ".txt file, or give the table's folder by --dataset_name, with the column of the texts"
            )
        # A byte-order mark alone is an article without a character.
        if not any(text.strip() for _, text in file.articles()):
            raise ValueError(f"{file.path} holds no text")
    return files


def hash_files(files: Iterable[TextFile]) -> str:
    """Hash the files' names, sizes, beginnings and ends: a corpus is too large to be read for it."""
    digest = hashlib.sha256()
    for file in files:
        size = file.path.stat().st_size
        check_ordinary(file.path)
        with file.path.open("rb") as stream:
            ends = stream.read(HASHED_BYTES)
            stream.seek(max(0, size - HASHED_BYTES))
            ends += stream.read()
        digest.update(f"{file.path.name}:{size}:".encode() + hashlib.sha256(ends).digest())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class PretrainingText:
    """The shards to train on, those held out (none: no evaluation), and what tells either from other text."""

    train: Sequence[TextSource]
    dev: Sequence[TextSource]
    train_fingerprint: dict[str, Any]
    dev_fingerprint: dict[str, Any]


def open_text_sources(settings: PretrainingSettings) -> PretrainingText:
    """Open the text of a pretraining.

    Raises:
        OSError, ValueError: as `open_text`, or if there is no text to evaluate on, and a flag needs it.
    """
    text = open_text(settings)
    if not text.dev and settings.dataset_name is not None:
        check_evaluated(settings, f": {settings.dataset_name} has no split 'validation'")
    return text


def open_text(settings: TextSettings) -> PretrainingText:
    """Open the text to train on, and that to evaluate on: files, or the splits of a dataset.

    Raises:
        OSError, ValueError: if a file or dataset cannot be read, or holds no text.
    """
    keeps = settings.keep_whitespace
    files = check_text_files(settings.validation_file or [], keeps)
    dev: Sequence[TextSource] = files
    train: Sequence[TextSource]
    dev_hash, names = hash_files(files), {}
    if settings.dataset_name is None:
        train = given = check_text_files(settings.train_file or [], keeps)
        train_hash = hash_files(given)
    else:
        # `datasets` reads JSON as it is written, and streams it; CSV by the guesses of pandas.
        local = find_split_files(settings, (".csv", ".tsv", ".txt"))
        split_files: Mapping[str, Sequence[str]]
        split_files, splits = (local, None) if local is not None else _open_dataset(settings)
        there: Mapping[str, Any] = split_files if splits is None else splits
        if "train" not in there:
            raise ValueError(f"--dataset_name {settings.dataset_name} has no split 'train', only {', '.join(there)}")
        if not dev and "validation" in there:
            dev = _dataset_shards(settings, splits, split_files, "validation")
            dev_hash = _hash_dataset(split_files.get("validation", ()))
        train = _dataset_shards(settings, splits, split_files, "train")
        train_hash = _hash_dataset(split_files.get("train", ()))
        names = {name: getattr(settings, name) for name in ("dataset_name", "dataset_config_name", "text_column")}
    # None where there is nothing to say, as in the checkpoints of earlier versions.
    names |= {"keep_whitespace": keeps or None}
    fingerprints = names | {"hash of the training text": train_hash}, {"hash of the held-out text": dev_hash}
    return PretrainingText(train, dev, *fingerprints)


def _open_dataset(settings: TextSettings) -> tuple[Mapping[str, Sequence[str]], IterableDatasetDict]:
    """Find the splits of `--dataset_name`: the paths or addresses of each one's files, where known, and its rows."""
    named = (settings.dataset_name, settings.dataset_config_name)
    files: Mapping[str, Sequence[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        # A stream needs a cache only while it is opened.
        cache = None if _is_writable(Path(datasets.config.HF_DATASETS_CACHE)) else temporary
        try:
            files = datasets.load_dataset_builder(*named, cache_dir=cache).config.data_files or {}
            return files, datasets.load_dataset(*named, streaming=True, cache_dir=cache)
        except Exception as error:  # `datasets`, the Hub's client and each file format have errors of their own
            raise _opening_error(f"{settings.dataset_name}", files, error) from error


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _opening_error(name: str, files: Mapping[str, Sequence[str]], error: Exception) -> Exception:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):  # where `datasets` looks for columns
        reason = "a file without a row"
    advice = ""
    if isinstance(error, PermissionError):
        advice = "; if this is the cache, HF_HOME names another folder for it"
    elif files:
        advice = f"; look at its first file, {next(iter(files.values()))[0]}"
    kind = OSError if isinstance(error, OSError | EOFError) else ValueError
    return kind(f"--dataset_name {name}: cannot be opened ({reason}){advice}")


def _dataset_shards(
    settings: TextSettings, splits: IterableDatasetDict | None, files: Mapping[str, Sequence[str]], split: str
) -> Sequence[TextSource]:
    shards: Sequence[TextSource]
    names, options = [Path(file).name for file in files.get(split, ())], (settings.text_column,)
    if splits is None:
        shards = [
            FolderFile(f"{settings.dataset_name} ({split}), {name}", Path(file), *options, settings.keep_whitespace)
            for name, file in zip(names, files[split], strict=True)
        ]
    else:
        rows = splits[split]
        if len(names) != rows.num_shards:
            names = [f"shard {i}" for i in range(rows.num_shards)]
        shards = [
            DatasetRows(f"{settings.dataset_name} ({split}), {name}", rows, *options, i, settings.keep_whitespace)
            for i, name in enumerate(names)
        ]
    # A wrong column is an error now.
    if all(next(shard.articles(), None) is None for shard in shards):
        raise ValueError(f"{settings.dataset_name} ({split}) holds no row")
    return shards


def _hash_dataset(files: Sequence[str]) -> str:
    paths = [Path(file) for file in files]
    if all(path.is_file() for path in paths):
        return hash_files(TextFile(path) for path in paths)
    # An address on the Hub holds the revision.
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]


# Texts handed to the tokenizer at a time.
TOKENIZER_BATCH = 32
# What random numbers are for, so that no two uses share them.
SHARD_ORDER, WINDOW_ORDER = 0, 1


class Place(NamedTuple):
    """Where a block begins: in which shard of the epoch's order, at which article, after how many of its tokens."""

    shard: int = 0
    offset: int = 0
    token: int = 0


TEXT_BEGIN = Place()


def pack_blocks(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    separator: int,
    start: Place = TEXT_BEGIN,
) -> Iterator[tuple[np.ndarray, Place]]:
    """Cut the tokens of all articles into blocks of one length; the last one is shorter.

    Args:
        tokenizer: a fast tokenizer; no special tokens are added, and those that the text spells out are left out.
        separator: the token that ends each article.
        start: where the first block begins.

    Yields:
        A block's token ids [length], and the place where it begins.
    """
    reserved = _reserved_ids(tokenizer)
    rest = np.empty(0, dtype=np.int64)
    # Where in `rest` each article begins, and which place of the text that is.
    begins: list[tuple[int, Place]] = []
    for shard, source in itertools.islice(enumerate(sources), start.shard, None):
        first = start.offset if shard == start.shard else 0
        for offset, tokens in _tokenized(source, tokenizer, first, separator, reserved):
            skipped = start.token if (shard, offset) == start[:2] else 0
            begins.append((len(rest), Place(shard, offset, skipped)))
            rest = np.concatenate([rest, tokens[skipped:]])
            whole = len(rest) // length
            for i in range(whole):
                yield rest[i * length : (i + 1) * length], _place_at(begins, i * length)
            if whole:
                begins = _without(begins, whole * length)
                rest = rest[whole * length :]
    if len(rest):
        yield rest, _place_at(begins, 0)


def _tokenized(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, offset: int, separator: int, reserved: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    articles = source.articles(offset)
    while batch := list(itertools.islice(articles, TOKENIZER_BATCH)):
        encoded = tokenizer(
            [text.strip("\r\n") if source.keeps_whitespace else " ".join(text.split()) for _, text in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # articles are longer than the model: no warning
        )["input_ids"]
        for (begin, _), ids in zip(batch, encoded, strict=True):
            tokens = np.asarray(ids, dtype=np.int64)
            tokens = tokens[~np.isin(tokens, reserved)]
            if len(tokens):
                yield begin, np.append(tokens, separator)


def _reserved_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the token ids that text may not hold: special tokens, but the unknown one, and sentinels.

    Not `all_special_ids`: some tokenizers count punctuation among them.
    """
    ids = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad", "bos", "eos")}
    ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= {i for token, i in tokenizer.get_vocab().items() if "<extra_id_" in token}
    return np.array(sorted(ids - {None, tokenizer.unk_token_id}), dtype=np.int64)


def _place_at(begins: list[tuple[int, Place]], index: int) -> Place:
    begin, place = begins[bisect_right(begins, index, key=lambda item: item[0]) - 1]
    return place._replace(token=place.token + index - begin)


def _without(begins: list[tuple[int, Place]], cut: int) -> list[tuple[int, Place]]:
    # The article that the cut falls into goes on at index 0.
    later = [(begin - cut, place) for begin, place in begins if begin > cut]
    return [(0, _place_at(begins, cut)), *later]


def read_blocks(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    separator: int,
    limit: int | None = None,
) -> list[np.ndarray]:
    """Read the first `limit` blocks of a text (None: all) into memory, in order; see `pack_blocks`.

    Raises:
        ValueError: if the tokenizer makes no token of the text.
    """
    blocks = [block for block, _ in itertools.islice(pack_blocks(sources, tokenizer, length, separator), limit)]
    if not blocks:
        more = f" (and {len(sources) - 1} more)" if len(sources) > 1 else ""
        raise ValueError(f"{sources[0].name}{more} holds no text that the tokenizer makes a token of")
    return blocks


class TextStream(IterableDataset):
    """Batches of prepared blocks, the same on any number of processes and from wherever a run resumes.

    Every process reads all of the text and prepares its own rows of each batch; one that a last batch is too small
    for gets a row with nothing to predict. `start_epoch` and `seek` come before iteration, as `TrainingLoop` calls
    them.

    Args:
        length, separator: tokens a block, and the one that ends each article; see `pack_blocks`.
        prepare: (token ids, (epoch, number of the block in it)) -> arrays of one shape for every block; anything
            random in it must be drawn from those two numbers.
        window: blocks that are shuffled among themselves; they are held in memory.
        with_other: hand `prepare` another block of the same window as well; None where the window has one alone.
    """

    def __init__(
        self,
        sources: Sequence[TextSource],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        separator: int,
        prepare: Callable[[np.ndarray, tuple[int, int]], dict[str, np.ndarray]],
        batch_size: int,
        seed: int,
        window: int = 4096,
        process_index: int = 0,
        num_processes: int = 1,
        with_other: bool = False,
    ):
        self.with_other = with_other
        self.sources, self.tokenizer, self.length, self.separator = list(sources), tokenizer, length, separator
        self.prepare, self.batch_size, self.seed, self.window = prepare, batch_size, seed, window
        self.process_index, self.num_processes = process_index, num_processes
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch that `__iter__` yields, from its beginning."""
        self.epoch, self._used, self._position = epoch, 0, [0, 0, *TEXT_BEGIN]

    def seek(self, batches: int, position: list[int]) -> None:
        """Go to the batch after the first `batches` ones of the epoch; `position` is the last one's."""
        self._used, self._position = batches * self.batch_size * self.num_processes, position

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield tensors [b, ...] of what `prepare` makes; "position", which `seek` takes; and "examples", b or 0."""
        rows = self._numbered_blocks()
        while batch := list(itertools.islice(rows, self.batch_size * self.num_processes)):
            share = np.array_split(np.arange(len(batch)), self.num_processes)[self.process_index]
            # Every process must take the step: without a row of its own, with a copy of the last one.
            taken = [batch[i] for i in share] or batch[-1:]
            prepared = [self.prepare(block, (self.epoch, number), *other) for number, block, _, other in taken]
            if not len(share):
                row = prepared[0]
                prepared = [row | {key: np.full_like(row[key], IGNORED_LABEL) for key in row if "label" in key}]
            counts = {"position": torch.tensor(batch[-1][2]), "examples": torch.tensor(len(share))}
            yield stack_rows(prepared) | counts

    def _numbered_blocks(self) -> Iterator[tuple[int, np.ndarray, list[int], tuple[np.ndarray | None, ...]]]:
        order = np.random.default_rng((self.seed, SHARD_ORDER, self.epoch)).permutation(len(self.sources))
        sources = [self.sources[i] for i in order]
        window, number, *place = self._position
        blocks = pack_blocks(sources, self.tokenizer, self.length, self.separator, Place(*place))
        while found := list(itertools.islice(blocks, self.window)):
            position = [window, number, *found[0][1]]
            shuffled = np.random.default_rng((self.seed, WINDOW_ORDER, self.epoch, window)).permutation(len(found))
            for i, following in zip(shuffled, np.roll(shuffled, -1), strict=True):
                other = found[following][0] if len(found) > 1 else None
                if number >= self._used:
                    yield number, found[i][0], position, (other,) if self.with_other else ()
                number += 1
            window += 1


def stack_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack prepared blocks into a batch of tensors [b, ...]."""
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
