"""The lines of a file of text, plain or .gz, and what is blank."""

import gzip
import io
import logging
import re
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .open_files import COMPRESSED_SUFFIX, open_file

__all__ = [
    "BLANKS",
    "LONE_RETURN",
    "ends_by_returns",
    "is_blank",
    "is_unicode",
    "lines_of",
    "suffix_of",
    "whole_lines",
]

logger = logging.getLogger(__name__)

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
