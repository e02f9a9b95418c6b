"""The shards that text to pretrain on comes in: files, and those of a streamed `datasets` source."""

import hashlib
import itertools
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import datasets

from ...open_files import check_ordinary, open_file
from ...table_files import read_records
from ...text_files import is_table
from ...text_lines import ends_by_returns, is_blank, lines_of

__all__ = ["DatasetRows", "FolderFile", "TextFile", "TextSource", "check_text_files", "hash_files"]

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
