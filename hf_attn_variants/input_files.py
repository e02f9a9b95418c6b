"""Opening the text files of users, plain or .gz, and splitting them into lines."""

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
MOST_BYTES = 2**31  # of a file that is read whole
MOST_LINE_BYTES = 2**28
# Text shrinks 3 to 20 times; zeros, or one line again and again, 1000 times.
MOST_GROWTH, GROWTH_BEGINS = 100, 2**22
# Of a .gz, looked at when it is opened: line by line, what one megabyte becomes would take minutes.
LOOKED_AT_BYTES = 2**25
BUFFER_BYTES = 2**20


def check_ordinary(path: Path) -> None:
    """Raise OSError unless a path is that of an ordinary file."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(mode) and not os.path.samefile(path, os.devnull):  # that one is an empty file, and ends
        raise OSError(f"{path} is no ordinary file but a pipe, a socket or a device: give a file")


def open_file(path: Path) -> BinaryIO:
    """Open a file of lines, plain or .gz, and give its bytes, uncompressed.

    Raises:
        OSError: if there is none, or it is no ordinary file; now or while it is read, for a .gz that grows beyond all
            text.
        ValueError: while it is read, for a line that does not end.
    """
    check_ordinary(path)
    if path.suffix == COMPRESSED_SUFFIX:
        # What is no whole .gz is said by whoever reads it, with the line.
        with _Lines(path) as file, suppress(EOFError, gzip.BadGzipFile, zlib.error):
            buffer = bytearray(BUFFER_BYTES)
            while file.tell() < LOOKED_AT_BYTES and file.readinto(memoryview(buffer)):
                pass
    return io.BufferedReader(_Lines(path), BUFFER_BYTES)


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return all bytes of a file, plain or .gz, uncompressed.

    Raises:
        OSError: if there is none, it is no ordinary file, or longer than `most` bytes.
    """
    check_ordinary(path)
    blocks, size = [], os.path.getsize(path)
    if size <= most:
        with _Lines(path, most) as file:
            size = 0
            while size <= most and (block := file.read(BUFFER_BYTES)):
                blocks.append(block)
                size += len(block)
    if size > most:
        raise OSError(f"{path} is longer than {most:,} bytes, which is no file of its kind")
    return b"".join(blocks)


class _Lines(io.RawIOBase):
    """The bytes of a file, uncompressed, with an eye on how many there are."""

    def __init__(self, path: Path, longest_line: int = MOST_LINE_BYTES):
        self.path, self.longest_line = path, longest_line
        self.stored = open(path, "rb")
        self.file = gzip.open(self.stored) if path.suffix == COMPRESSED_SUFFIX else self.stored
        self.line = 0  # bytes since the last end of one

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.line = 0
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        found = self.file.read1(len(buffer))
        buffer[: len(found)] = found
        end = found.rfind(b"\n")
        self.line = self.line + len(found) if end < 0 else len(found) - end - 1
        if self.line > self.longest_line:
            raise ValueError(f"{self.path} has a line of more than {self.longest_line:,} bytes: it is no text")
        if self.file is not self.stored:
            size = self.file.tell()
            if size > GROWTH_BEGINS + MOST_GROWTH * self.stored.tell():
                raise OSError(f"{self.path} is {size // self.stored.tell()} times as long uncompressed: it is no text")
        return len(found)

    def close(self) -> None:
        self.file.close()
        self.stored.close()
        super().close()


# Any other white space, a no-break space as well, is text: somebody wrote it into a cell.
BLANKS = string.whitespace
# The bytes at the beginning of a file that decide how its lines end.
INSPECTED_BYTES = 2**18
# Carriage returns that no line feed follows.
LONE_RETURN = re.compile(rb"\r+(?![\r\n])")


def is_blank(text: str) -> bool:
    """Say whether a text holds nothing but ASCII's white space."""
    return not text.strip(BLANKS)


def is_unicode(text: str) -> bool:
    """Say whether a text can be written as UTF-8: half a surrogate pair, as JSON can spell it, cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def suffix_of(path: Path) -> str:
    """Return the end of a file's name in small letters, that of what is in a .gz."""
    return (Path(path.stem).suffix if path.suffix == COMPRESSED_SUFFIX else path.suffix).lower()


def lines_of(path: Path) -> Iterator[str]:
    """Yield a file's lines without their ends; the rule and the errors are those of `whole_lines`."""
    for line in whole_lines(path):
        yield line.rstrip("\r\n")


def whole_lines(path: Path) -> Iterator[str]:
    """Yield a file's lines with their ends.

    Lines end in a line feed. A carriage return inside such a line is text, because crawled text has some and its
    translation has none; the log names the first one. Lines end in carriage returns if `ends_by_returns` is true of
    the file. No other character ends a line.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not text; the message names the line.
    """
    with _open_file(path) as binary:
        by_returns = ends_by_returns(binary)
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="" if by_returns else "\n")
        number, is_warned = 0, by_returns or suffix_of(path) in (".csv", ".tsv", ".json", ".jsonl")
        try:
            for number, line in enumerate(file, start=1):
                if "\0" in line:
                    raise ValueError(f"{path}, line {number}, holds a null character: it is no text")
                if not is_warned and "\r" in line.rstrip("\r\n"):
                    is_warned = True
                    message = "%s, line %d: the line contains a carriage return, which is read as text, not as its end"
                    logger.warning(message, path, number)
                yield line
        except UnicodeDecodeError as error:
            # The lines before were all taken before this part of the file was read.
            number += 1 + error.object[: error.start].count(b"\r" if by_returns else b"\n")
            raise ValueError(f"{path}, line {number}, is not UTF-8 text ({error.reason})") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise OSError(f"{path} is no whole gzip file ({error})") from error


def ends_by_returns(file: BinaryIO) -> bool:
    """Return whether a file's lines end in carriage returns, as those of old Mac programs do.

    Its first bytes decide: they contain more carriage returns without a line feed than line feeds. The file is
    positioned at its beginning afterwards.
    """
    try:
        head = file.read(INSPECTED_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error):  # the reader reports it with the line
        head = b""
    file.seek(0)
    return len(LONE_RETURN.findall(head)) > head.count(b"\n")


def _open_file(path: Path) -> BinaryIO:
    path = path.expanduser()
    if path.is_dir():
        raise OSError(f"{path} is a folder, not a file")
    if not path.exists():
        raise OSError(f"{path}: no such file")
    return open_file(path)
