"""Files of others, opened: ordinary ones alone, for a pipe never ends, and compressed ones as far as they are text."""

import gzip
import io
import os
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["COMPRESSED_SUFFIX", "check_ordinary", "open_file", "read_file"]

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
