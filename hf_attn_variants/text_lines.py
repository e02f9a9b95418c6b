"""The lines of a file of text, plain or .gz, and what is blank."""

import gzip
import io
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .open_files import COMPRESSED_SUFFIX, open_file

__all__ = ["BLANKS", "is_blank", "is_unicode", "lines_of", "suffix_of", "whole_lines"]

# Any other white space, a no-break space as well, is text: somebody wrote it into a cell.
BLANKS = string.whitespace


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
    """Yield a file's lines without their ends.

    A carriage return inside a line, as crawled text has, ends no line: its twin in the other language has none.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not text; the message names the line.
    """
    for line in whole_lines(path):
        yield line.rstrip("\r\n")


def whole_lines(path: Path) -> Iterator[str]:
    """Yield a file's lines with their ends; errors as for `lines_of`."""
    with _open_text(path) as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if "\0" in line:
                    raise ValueError(f"{path}, line {number}, holds a null character: it is no text")
                yield line
        except UnicodeDecodeError as error:
            # The lines before were all taken before this part of the file was read.
            number += 1 + error.object[: error.start].count(b"\n")
            raise ValueError(f"{path}, line {number}, is not UTF-8 text ({error.reason})") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise OSError(f"{path} is no whole gzip file ({error})") from error


def _open_text(path: Path) -> TextIO:
    path = path.expanduser()
    if path.is_dir():
        raise OSError(f"{path} is a folder, not a file")
    if not path.exists():
        raise OSError(f"{path}: no such file")
    return io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="\n")
