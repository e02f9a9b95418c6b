"""Streams text from files or a `datasets` source, tokenizes it, and packs it into blocks."""

import hashlib
import itertools
import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from ...files import check_regular_file, has_carriage_return_line_endings, is_blank, iterate_lines, open_file
from ...text_files import is_table, read_table_rows
from ..engine.dataloaders import IGNORED_LABEL
from ..engine.dataset_splits import find_split_files

logger = logging.getLogger(__name__)

# The maximum size of an article. Longer articles are split at the next line end, and longer lines are split between
# words, so that files without empty lines or line ends can also be streamed.
MAX_ARTICLE_BYTES = 2**18
# The number of bytes that are hashed at the start and at the end of a file, instead of the whole file.
HASHED_BYTES = 2**16


@dataclass(frozen=True)
class TextFile:
    """A UTF-8 text file (plain text or .gz) whose articles are separated by empty lines.

    Offsets are in bytes of the uncompressed text.
    """

    path: Path
    keeps_whitespace: bool = False

    @property
    def name(self) -> str:
        """The name of the file in error messages."""
        return str(self.path)

    def read_articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the offset and the text of each article, starting with the article at `offset`.

        Raises:
            OSError: If the file cannot be read, is an incomplete gzip file, or is not UTF-8. The message names the
                file and the position within its text.
            ValueError: If the file contains a null character, which means that it is not a text file.
        """
        begin, lines, size = offset, [], 0
        try:
            with open_file(self.path) as file:
                uses_carriage_returns = has_carriage_return_line_endings(file)
                file.seek(offset)
                # The empty line at the end ends the last article.
                for line in itertools.chain(_read_lines(file, uses_carriage_returns), [b""]):
                    if b"\0" in line:
                        raise ValueError(
                            f"{self.path} must be UTF-8 text, but contains a null character. Convert it to UTF-8."
                        )
                    if line.strip():
                        lines.append(line)
                    size += len(line)
                    if not line.strip() or size >= MAX_ARTICLE_BYTES:
                        if lines:
                            yield begin, b"".join(lines).decode("utf-8" if begin else "utf-8-sig")
                        begin, lines, size = begin + size, [], 0
        except UnicodeDecodeError as error:
            problem = f"{error.reason} in the article at byte {begin}"
            raise OSError(f"{self.path} must be UTF-8 text, got {problem}. Convert it to UTF-8.") from error
        except OSError as error:
            raise OSError(f"{self.path} cannot be read after byte {begin + size} of its text ({error}).") from error


def _read_lines(file: BinaryIO, has_carriage_returns: bool) -> Iterator[bytes]:
    """Yield the lines of a file. Lines that exceed the maximum article size are split, between words if possible."""
    remaining_bytes = b""
    while line := file.readline(MAX_ARTICLE_BYTES - len(remaining_bytes)):
        line, remaining_bytes = remaining_bytes + line, b""
        if has_carriage_returns:
            *complete_lines, line = line.splitlines(keepends=True)
            yield from complete_lines
            if not line.endswith(b"\n") and len(line) < MAX_ARTICLE_BYTES:
                remaining_bytes = line
                continue
        if len(line) == MAX_ARTICLE_BYTES and not line.endswith(b"\n"):
            split_position = line.rfind(b" ") + 1 or _find_last_character_start(line) or len(line)
            line, remaining_bytes = line[:split_position], line[split_position:]
        yield line
    if remaining_bytes:
        yield remaining_bytes


def _find_last_character_start(line: bytes) -> int:
    """Return the index at which the last UTF-8 character of a line starts. The character may be incomplete."""
    begin = len(line) - 1
    while begin and line[begin] & 0xC0 == 0x80:
        begin -= 1
    return begin


@dataclass(frozen=True)
class DatasetShard:
    """A shard of a streamed split from a `datasets` source, with one article per row. Offsets are row numbers."""

    name: str
    rows: datasets.IterableDataset
    column: str = "text"
    shard: int = 0
    keeps_whitespace: bool = False

    def read_articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of each row, starting with row `offset`. Missing values are skipped.

        Raises:
            OSError: If the shard cannot be read. The message names the last row that was read. For formats that are
                read in blocks, this is the last row before the damaged block.
            ValueError: If a row lacks the column or contains a value that is not text.
        """
        rows = iter(self.rows.shard(self.rows.num_shards, self.shard).skip(offset))
        for number in itertools.count(offset):
            try:
                row = next(rows, None)
            except Exception as error:  # each file format raises different exception types
                # Arrow counts rows from the start of the current block, so its row number is misleading.
                reason = re.sub(r" in row \d+$", "", f"{type(error).__name__}: {error}")
                raise OSError(f"{self.name} cannot be read after row {number} ({reason}).") from error
            if row is None:
                return
            text = row.get(self.column)
            if isinstance(text, str):
                yield number, text
            elif self.column not in row or text is not None:
                raise _make_missing_text_error(self.name, number, self.column, row)


@dataclass(frozen=True)
class LocalFileShard:
    """A table, or a .txt file with one article per line, in a local folder. Offsets are row numbers."""

    name: str
    path: Path
    column: str = "text"
    keeps_whitespace: bool = False

    def read_articles(self, offset: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of each row, starting with row `offset`. Blank texts are skipped.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If a row does not match the header, or if it has no text in the column. The message names the
                row.
        """
        if is_table(self.path):
            rows = (record.values for record in read_table_rows(self.path))
        else:
            rows = ({"text": line} for line in iterate_lines(self.path))
        for number, row in itertools.islice(enumerate(rows), offset, None):
            text = row.get(self.column)
            if not isinstance(text, str):
                raise _make_missing_text_error(self.name, number, self.column, row)
            if not is_blank(text):
                yield number, text


# A shard of text that can be read from any article. Its name is shown in error messages. If `keeps_whitespace` is
# False, each run of whitespace becomes a single space.
TextSource = TextFile | DatasetShard | LocalFileShard


def _make_missing_text_error(name: str, number: int, column: str, row: dict[str, Any]) -> ValueError:
    """Create the error for a row without text."""
    advice = f"The columns are {', '.join(row)}. Set --text_column to another column."
    return ValueError(f"{name}, row {number}: There is no text in the column {column!r}. {advice}")


def check_text_files(paths: Iterable[str | Path], keeps_whitespace: bool = False) -> list[TextFile]:
    """Open text files, and check that each file contains text that can be read.

    Raises:
        OSError: If a file does not exist or cannot be read.
        ValueError: If a file is a table or contains no text.
    """
    files = [TextFile(Path(path), keeps_whitespace) for path in paths]
    for file in files:
        if is_table(file.path):
            raise ValueError(
                f"{file.path} must be a text file, but is a table. Write its texts to a .txt file, or set "
                "--dataset_name to the folder of the table and --text_column to the column that contains the texts."
            )
        # A file that contains only a byte-order mark has one empty article.
        if not any(text.strip() for _, text in file.read_articles()):
            raise ValueError(f"{file.path} must contain text, but is empty.")
    return files


def hash_files(files: Iterable[TextFile]) -> str:
    """Hash the names, sizes, first bytes and last bytes of files, because hashing the whole content would be slow."""
    digest = hashlib.sha256()
    for file in files:
        size = file.path.stat().st_size
        check_regular_file(file.path)
        with file.path.open("rb") as stream:
            ends = stream.read(HASHED_BYTES)
            stream.seek(max(0, size - HASHED_BYTES))
            ends += stream.read()
        digest.update(f"{file.path.name}:{size}:".encode() + hashlib.sha256(ends).digest())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class PretrainingText:
    """The text of a pretraining run.

    Attributes:
        train: The shards for training.
        dev: The shards for evaluation. Empty if there is no held-out text.
        train_fingerprint: Values that identify the training text.
        dev_fingerprint: Values that identify the evaluation text.
    """

    train: Sequence[TextSource]
    dev: Sequence[TextSource]
    train_fingerprint: dict[str, Any]
    dev_fingerprint: dict[str, Any]


def open_text_splits(settings: Any) -> PretrainingText:
    """Open the text for training and evaluation, from files or from the splits of a dataset.

    Args:
        settings: Settings with the fields of `TextSettings`.

    Raises:
        OSError, ValueError: If a file or a dataset cannot be read or contains no text.
    """
    keeps = settings.keep_whitespace
    files = check_text_files(settings.validation_file or [], keeps)
    dev: Sequence[TextSource] = files
    train: Sequence[TextSource]
    dev_hash, names = hash_files(files), {}
    if settings.dataset_name is None:
        train = train_files = check_text_files(settings.train_file or [], keeps)
        train_hash = hash_files(train_files)
    else:
        # `datasets` can stream JSON, but would read CSV files with pandas, which guesses the column types.
        local = find_split_files(settings, (".csv", ".tsv", ".txt"))
        split_files, splits = (local, None) if local is not None else _open_dataset(settings)
        available = split_files if splits is None else splits
        if "train" not in available:
            raise ValueError(
                f"--dataset_name must have a 'train' split, but {settings.dataset_name} only has "
                f"{', '.join(available)}."
            )
        if not dev and "validation" in available:
            dev = _open_dataset_shards(settings, splits, split_files, "validation")
            dev_hash = _hash_dataset(split_files.get("validation", ()))
        train = _open_dataset_shards(settings, splits, split_files, "train")
        train_hash = _hash_dataset(split_files.get("train", ()))
        names = {name: getattr(settings, name) for name in ("dataset_name", "dataset_config_name", "text_column")}
    names |= {"keep_whitespace": keeps}
    fingerprints = names | {"hash of the training text": train_hash}, {"hash of the held-out text": dev_hash}
    return PretrainingText(train, dev, *fingerprints)


def _open_dataset(settings: Any) -> tuple[Mapping[str, Any], IterableDatasetDict]:
    """Open a `datasets` source for streaming.

    Returns:
        The paths or URLs of the files in each split (empty if they are unknown), and the streamed splits.
    """
    named = (settings.dataset_name, settings.dataset_config_name)
    try:
        files = datasets.load_dataset_builder(*named).config.data_files or {}
        return files, datasets.load_dataset(*named, streaming=True)
    except Exception as error:  # `datasets`, the Hub and each file format raise different exception types
        # `datasets` raises StopIteration when it looks for the columns of an empty file.
        reason = "a file without rows" if isinstance(error, StopIteration) else f"{type(error).__name__}: {error}"
        kind = OSError if isinstance(error, OSError | EOFError) else ValueError
        raise kind(f"--dataset_name {settings.dataset_name} could not be opened ({reason}).") from error


def _open_dataset_shards(
    settings: Any, splits: IterableDatasetDict | None, files: Mapping[str, Sequence[str]], split: str
) -> Sequence[TextSource]:
    """Open the shards of a split, and check that at least one row contains text."""
    shards: Sequence[TextSource]
    place, column, keeps = f"{settings.dataset_name} ({split})", settings.text_column, settings.keep_whitespace
    paths = [Path(file) for file in files.get(split, ())]
    if splits is None:
        shards = [LocalFileShard(f"{place}, {path.name}", path, column, keeps) for path in paths]
    else:
        rows, names = splits[split], [path.name for path in paths]
        if len(names) != rows.num_shards:
            names = [f"shard {i}" for i in range(rows.num_shards)]
        shards = [DatasetShard(f"{place}, {name}", rows, column, i, keeps) for i, name in enumerate(names)]
    # One article is read so that an error is raised early if the column is wrong.
    if all(next(shard.read_articles(), None) is None for shard in shards):
        raise ValueError(f"{place} must contain at least one row, but is empty.")
    return shards


def _hash_dataset(files: Sequence[str]) -> str:
    """Hash the files of a split. For files on the Hub, only the URLs are hashed."""
    paths = [Path(file) for file in files]
    if all(path.is_file() for path in paths):
        return hash_files(TextFile(path) for path in paths)
    # URLs on the Hub contain the revision.
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]


# The number of texts per call of the tokenizer.
TEXTS_PER_CALL = 32
# The keys of the random generators in this module. No other generators use these keys (see `dataloaders`).
SHARD_ORDER, WINDOW_ORDER = 0, 1


class TextPosition(NamedTuple):
    """The position in the text at which a block starts.

    Attributes:
        shard: The index of the shard, in the order of the epoch.
        offset: The offset of the article within the shard.
        token: The index of the block's first token within the article.
    """

    shard: int = 0
    offset: int = 0
    token: int = 0


TEXT_START = TextPosition()


def pack_blocks(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    separator_id: int,
    start: TextPosition = TEXT_START,
) -> Iterator[tuple[np.ndarray, TextPosition]]:
    """Split the tokens of all articles into blocks of equal length. The last block may be shorter.

    Args:
        sources: The shards of text.
        tokenizer: A fast tokenizer. No special tokens are added, and special tokens that occur in the text are
            removed.
        length: The length of a block in tokens.
        separator_id: The id of the token that ends each article.
        start: The position of the first block.

    Yields:
        The token ids of each block [length], and the position at which the block starts.
    """
    reserved = _get_reserved_ids(tokenizer)
    remaining_tokens = np.empty(0, dtype=np.int64)
    # The index in `remaining_tokens` and the position of each article that starts in `remaining_tokens`.
    article_starts: list[tuple[int, TextPosition]] = []
    for shard, source in itertools.islice(enumerate(sources), start.shard, None):
        first = start.offset if shard == start.shard else 0
        for offset, tokens in _tokenize_articles(source, tokenizer, first, separator_id, reserved):
            skipped = start.token if (shard, offset) == start[:2] else 0
            article_starts.append((len(remaining_tokens), TextPosition(shard, offset, skipped)))
            remaining_tokens = np.concatenate([remaining_tokens, tokens[skipped:]])
            num_blocks = len(remaining_tokens) // length
            for i in range(num_blocks):
                yield remaining_tokens[i * length : (i + 1) * length], _get_text_position(article_starts, i * length)
            if num_blocks:
                article_starts = _shift_article_starts(article_starts, num_blocks * length)
                remaining_tokens = remaining_tokens[num_blocks * length :]
    if len(remaining_tokens):
        yield remaining_tokens, _get_text_position(article_starts, 0)


def _tokenize_articles(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, offset: int, separator_id: int, reserved_ids: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the offset and the token ids of each article in a shard. Articles without tokens are skipped."""
    articles = source.read_articles(offset)
    while batch := list(itertools.islice(articles, TEXTS_PER_CALL)):
        encoded = tokenizer(
            [text.strip("\r\n") if source.keeps_whitespace else " ".join(text.split()) for _, text in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # do not warn about articles that are longer than the model's maximum input
        )["input_ids"]
        for (begin, _), ids in zip(batch, encoded, strict=True):
            tokens = np.asarray(ids, dtype=np.int64)
            tokens = tokens[~np.isin(tokens, reserved_ids)]
            if len(tokens):
                yield begin, np.append(tokens, separator_id)


def _get_reserved_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the ids of the tokens to remove from texts: sentinels, and special tokens except the unknown token.

    `all_special_ids` is not used because it includes punctuation for some tokenizers.
    """
    ids = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad", "bos", "eos")}
    ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= {i for token, i in tokenizer.get_vocab().items() if "<extra_id_" in token}
    return np.array(sorted(ids - {None, tokenizer.unk_token_id}), dtype=np.int64)


def _get_text_position(article_starts: list[tuple[int, TextPosition]], index: int) -> TextPosition:
    """Return the text position of the token at an index of `remaining_tokens` (see `pack_blocks`)."""
    begin, place = article_starts[bisect_right(article_starts, index, key=lambda item: item[0]) - 1]
    return place._replace(token=place.token + index - begin)


def _shift_article_starts(
    article_starts: list[tuple[int, TextPosition]], num_removed: int
) -> list[tuple[int, TextPosition]]:
    """Return the article starts after the first `num_removed` tokens are removed (see `pack_blocks`)."""
    # The remaining part of the article that contains the cut starts at index 0.
    later_starts = [(begin - num_removed, place) for begin, place in article_starts if begin > num_removed]
    return [(0, _get_text_position(article_starts, num_removed)), *later_starts]


def read_blocks(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    separator_id: int,
    limit: int | None = None,
) -> list[np.ndarray]:
    """Read the first `limit` blocks of a text into memory, or all blocks if `limit` is None (see `pack_blocks`).

    Raises:
        ValueError: If the text contains no tokens.
    """
    blocks = [block for block, _ in itertools.islice(pack_blocks(sources, tokenizer, length, separator_id), limit)]
    if not blocks:
        more = f" (and {len(sources) - 1} more)" if len(sources) > 1 else ""
        raise ValueError(f"{sources[0].name}{more} must contain text, but the tokenizer returned no tokens.")
    return blocks


class BlockPreparer(Protocol):
    """Interface of objects that prepare an example from a block of tokens.

    Attributes:
        block_length: The length of a block in tokens.
        separator: The id of the token that ends each article.
    """

    block_length: int
    separator: int

    def __call__(
        self, block: np.ndarray, key: tuple[int, ...], other_block: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Prepare an example as a dictionary of arrays, which have the same shapes for every block.

        The arguments are the block, its key, and another block of the text or None. Random choices must depend only on
        `key` and on the seed of the run.
        """


class TextStream(IterableDataset):
    """A stream of prepared batches, whose content does not depend on the number of processes or on interruptions.

    Every process reads the whole text and prepares its share of the rows in each batch. If the last batch has fewer
    rows than processes, the remaining processes receive a row without labels. `TrainingLoop` calls `start_epoch` and
    `seek` before iterating.

    Args:
        sources: The shards of text.
        tokenizer: The tokenizer.
        prepare: Prepares examples from blocks and their keys. A key consists of the epoch and the block number within
            the epoch. Another block from the same window is also passed, or None if the window contains only one
            block.
        batch_size: The number of rows per process.
        seed: The random seed of the run.
        window: The number of blocks to hold in memory and shuffle together.
        process_index: The index of this process.
        num_processes: The number of processes.
    """

    def __init__(
        self,
        sources: Sequence[TextSource],
        tokenizer: PreTrainedTokenizerBase,
        prepare: BlockPreparer,
        batch_size: int,
        seed: int,
        window: int = 4096,
        process_index: int = 0,
        num_processes: int = 1,
    ):
        self.sources, self.tokenizer = list(sources), tokenizer
        self.prepare, self.batch_size, self.seed, self.window = prepare, batch_size, seed, window
        self.process_index, self.num_processes = process_index, num_processes
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch that `__iter__` yields, starting with the first batch of the epoch."""
        self.epoch, self._used, self._position = epoch, 0, [0, 0, *TEXT_START]

    def seek(self, num_batches: int, position: list[int]) -> None:
        """Skip the first `num_batches` batches of the epoch.

        Args:
            num_batches: The number of batches to skip.
            position: The value of "position" in the last skipped batch.
        """
        self._used, self._position = num_batches * self.batch_size * self.num_processes, position

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches with the prepared tensors [b, ...], "position" (for `seek`) and "examples" (b or 0)."""
        rows = self._iterate_numbered_blocks()
        while batch := list(itertools.islice(rows, self.batch_size * self.num_processes)):
            share = np.array_split(np.arange(len(batch)), self.num_processes)[self.process_index]
            # Every process must take part in the step, so a process without a row receives a copy of the last row.
            own_blocks = [batch[i] for i in share] or batch[-1:]
            prepared = [
                self.prepare(block, (self.epoch, number), other_block) for number, block, _, other_block in own_blocks
            ]
            if not len(share):
                row = prepared[0]
                prepared = [row | {key: np.full_like(row[key], IGNORED_LABEL) for key in row if "label" in key}]
            counts = {"position": torch.tensor(batch[-1][2]), "examples": torch.tensor(len(share))}
            yield stack_examples(prepared) | counts

    def _iterate_numbered_blocks(self) -> Iterator[tuple[int, np.ndarray, list[int], np.ndarray | None]]:
        """Yield the number, the token ids, the window position and the other block (or None) for each block."""
        order = np.random.default_rng((self.seed, SHARD_ORDER, self.epoch)).permutation(len(self.sources))
        sources = [self.sources[i] for i in order]
        window, number, *place = self._position
        block_form = self.prepare.block_length, self.prepare.separator
        blocks = pack_blocks(sources, self.tokenizer, *block_form, TextPosition(*place))
        while window_blocks := list(itertools.islice(blocks, self.window)):
            position = [window, number, *window_blocks[0][1]]
            generator = np.random.default_rng((self.seed, WINDOW_ORDER, self.epoch, window))
            shuffled = generator.permutation(len(window_blocks))
            for i, following in zip(shuffled, np.roll(shuffled, -1), strict=True):
                other_block = window_blocks[following][0] if len(window_blocks) > 1 else None
                if number >= self._used:
                    yield number, window_blocks[i][0], position, other_block
                number += 1
            window += 1


def stack_examples(examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack prepared blocks into a batch of tensors [b, ...]."""
    return {key: torch.from_numpy(np.stack([row[key] for row in examples])) for key in examples[0]}
