"""Reading text files of users, plain or compressed with gzip, with limits against damaged and malicious files."""

import gzip
import io
import logging
import os
import re
import stat
import string
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "BLANKS",
    "COMPRESSED_SUFFIX",
    "LONE_RETURN",
    "check_ordinary",
    "ends_by_returns",
    "is_blank",
    "is_unicode",
    "lines_of",
    "open_file",
    "read_file",
    "suffix_of",
    "whole_lines",
]

logger = logging.getLogger(__name__)

COMPRESSED_SUFFIX = ".gz"
MOST_BYTES = 2**31  # the limit for a file that is read at once
MOST_LINE_BYTES = 2**28
# Text compresses 3 to 20 times. Zeros or repetitions of one line compress 1000 times. More than `MOST_GROWTH` times is
# an error after the first `GROWTH_BEGINS` bytes.
MOST_GROWTH, GROWTH_BEGINS = 100, 2**22
# The bytes of a .gz file that are checked when it is opened. Reading a megabyte of bad data line by line takes
# minutes.
CHECKED_BYTES = 2**25
BUFFER_BYTES = 2**20


def check_ordinary(path: Path) -> None:
    """Raise OSError unless a path is an ordinary file."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} must be a file, but it is a folder.")
    if not stat.S_ISREG(mode) and not os.path.samefile(path, os.devnull):  # the null device acts as an empty file
        raise OSError(f"{path} must be an ordinary file, but it is a pipe, a socket or a device.")


def open_file(path: Path) -> BinaryIO:
    """Open a plain or gzip-compressed text file and return a reader of its uncompressed bytes.

    Raises:
        OSError: if the file does not exist or is not an ordinary file. While the file is read, too, if a .gz file
            grows more than text can.
        ValueError: while the file is read, if a line is too long.
    """
    check_ordinary(path)
    if path.suffix == COMPRESSED_SUFFIX:
        # The code that reads the file reports damaged .gz data together with the line.
        with _LimitedFile(path) as file, suppress(EOFError, gzip.BadGzipFile, zlib.error):
            buffer = bytearray(BUFFER_BYTES)
            while file.tell() < CHECKED_BYTES and file.readinto(memoryview(buffer)):
                pass
    return io.BufferedReader(_LimitedFile(path), BUFFER_BYTES)


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the uncompressed bytes of a plain or gzip-compressed file.

    Args:
        path: the file.
        most: the largest number of bytes.

    Raises:
        OSError: if the file does not exist, is not an ordinary file, or has more than `most` bytes.
    """
    check_ordinary(path)
    blocks, size = [], os.path.getsize(path)
    if size <= most:
        with _LimitedFile(path, most) as file:
            size = 0
            while size <= most and (block := file.read(BUFFER_BYTES)):
                blocks.append(block)
                size += len(block)
    if size > most:
        raise OSError(f"{path} must have at most {most:,} bytes. Check that it is the right file.")
    return b"".join(blocks)


class _LimitedFile(io.RawIOBase):
    """Uncompressed bytes of a file. Reading fails if a line is too long or the file grows more than text can."""

    def __init__(self, path: Path, longest_line: int = MOST_LINE_BYTES):
        self.path, self.longest_line = path, longest_line
        self.stored = open(path, "rb")
        self.file = gzip.open(self.stored) if path.suffix == COMPRESSED_SUFFIX else self.stored
        self.line_bytes = 0  # since the last line feed

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.line_bytes = 0
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        data = self.file.read1(len(buffer))
        buffer[: len(data)] = data
        end = data.rfind(b"\n")
        self.line_bytes = self.line_bytes + len(data) if end < 0 else len(data) - end - 1
        if self.line_bytes > self.longest_line:
            raise ValueError(
                f"{self.path} is not a text file: a line has more than {self.longest_line:,} bytes. "
                "Check that it is the right file."
            )
        if self.file is not self.stored:
            size = self.file.tell()
            if size > GROWTH_BEGINS + MOST_GROWTH * self.stored.tell():
                growth = size // self.stored.tell()
                raise OSError(
                    f"{self.path} is not a text file: its uncompressed content is {growth} times as large. "
                    "Check that it is the right file."
                )
        return len(data)

    def close(self) -> None:
        self.file.close()
        self.stored.close()
        super().close()


# Other white space, such as a no-break space, counts as text, because somebody wrote it on purpose.
BLANKS = string.whitespace
# The number of bytes at the beginning of a file that decide how its lines end.
INSPECTED_BYTES = 2**18
# Carriage returns without a line feed after them.
LONE_RETURN = re.compile(rb"\r+(?![\r\n])")


def is_blank(text: str) -> bool:
    """Return whether a text contains only ASCII white space."""
    return not text.strip(BLANKS)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. Half a surrogate pair, which JSON can contain, cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def suffix_of(path: Path) -> str:
    """Return the suffix of a file name in lowercase. For a .gz file, return the suffix before .gz.

    Example:
        >>> suffix_of(Path("train.CSV.gz"))
        '.csv'
    """
    return (Path(path.stem).suffix if path.suffix == COMPRESSED_SUFFIX else path.suffix).lower()


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file without their line ends, with the rules and errors of `whole_lines`."""
    for line in whole_lines(path):
        yield line.rstrip("\r\n")


def whole_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends.

    A line ends with a line feed. A carriage return inside such a line is text, because crawled texts contain some that
    their translations do not have. The first one is logged. If `ends_by_returns` is true, lines end with carriage
    returns. No other character ends a line.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text. The message names the line.
    """
    with _open_existing_file(path) as binary:
        by_returns = ends_by_returns(binary)
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="" if by_returns else "\n")
        number, is_warned = 0, by_returns or suffix_of(path) in (".csv", ".tsv", ".json", ".jsonl")
        try:
            for number, line in enumerate(file, start=1):
                if "\0" in line:
                    raise ValueError(
                        f"{path}, line {number}, contains a null character. Check that the file is a text file."
                    )
                if not is_warned and "\r" in line.rstrip("\r\n"):
                    is_warned = True
                    message = "%s, line %d: the line contains a carriage return, which is read as text."
                    logger.warning(message, path, number)
                yield line
        except UnicodeDecodeError as error:
            # All complete lines before the part with the error were already yielded.
            number += 1 + error.object[: error.start].count(b"\r" if by_returns else b"\n")
            raise ValueError(
                f"{path}, line {number}, must be UTF-8 text ({error.reason}). Save the file as UTF-8."
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise OSError(f"{path} is not a complete gzip file ({error}). Copy or compress it again.") from error


def ends_by_returns(file: BinaryIO) -> bool:
    """Return whether the lines of a file end with carriage returns, as old Mac programs write them.

    This is the case if the first bytes contain more carriage returns without a line feed than line feeds. Afterwards,
    the file position is the beginning of the file.
    """
    try:
        head = file.read(INSPECTED_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error):  # the code that reads the file reports the error with the line
        head = b""
    file.seek(0)
    return len(LONE_RETURN.findall(head)) > head.count(b"\n")


def _open_existing_file(path: Path) -> BinaryIO:
    path = path.expanduser()
    if path.is_dir():
        raise OSError(f"{path} must be a file, but it is a folder.")
    if not path.exists():
        raise OSError(f"{path} does not exist.")
    return open_file(path)
