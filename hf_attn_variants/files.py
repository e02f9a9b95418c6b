"""File names in model folders, and functions that read text files and write files and folders atomically."""

import gzip
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import stat
import string
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

COMPRESSED_SUFFIX = ".gz"
MAX_BYTES = 2**31  # the limit for a file that is read into memory as a whole
MAX_LINE_BYTES = 2**28
# Text is compressed by a factor of 3 to 20, but zeros and repeated lines are compressed by a factor of 1000. After the
# first `GROWTH_CHECK_START` bytes, a factor above `MAX_GROWTH` is an error.
MAX_GROWTH, GROWTH_CHECK_START = 100, 2**22
# The number of uncompressed bytes that are checked when a .gz file is opened. Reading a megabyte of invalid data line
# by line takes minutes.
CHECKED_BYTES = 2**25
BUFFER_BYTES = 2**20


def check_regular_file(path: Path) -> None:
    """Raise OSError if a path is not a regular file."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} must be a file, but it is a folder.")
    if not stat.S_ISREG(mode) and not os.path.samefile(path, os.devnull):  # the null device acts like an empty file
        raise OSError(f"{path} must be a regular file, but it is a pipe, a socket or a device.")


def open_file(path: Path) -> BinaryIO:
    """Open a plain or gzip-compressed text file and return a reader of its uncompressed bytes.

    Raises:
        OSError: if the file does not exist or is not a regular file, or if the compression ratio of a .gz file is
            too high for text. The ratio may also be checked later, when the result is read.
        ValueError: if a line is too long. This may also be checked later, when the result is read.
    """
    check_regular_file(path)
    if path.suffix == COMPRESSED_SUFFIX:
        # Damaged .gz data is reported later, when the file is read.
        with _LimitedFile(path) as file, suppress(gzip.BadGzipFile):
            buffer = bytearray(BUFFER_BYTES)
            while file.tell() < CHECKED_BYTES and file.readinto(memoryview(buffer)):
                pass
    return io.BufferedReader(_LimitedFile(path), BUFFER_BYTES)


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the uncompressed bytes of a plain or gzip-compressed file.

    Args:
        path: the file.
        max_bytes: the largest allowed number of bytes.

    Raises:
        OSError: if the file does not exist, is not a regular file, or contains more than `max_bytes` bytes.
    """
    check_regular_file(path)
    blocks, size = [], os.path.getsize(path)
    if size <= max_bytes:
        with _LimitedFile(path, max_bytes) as file:
            size = 0
            while size <= max_bytes and (block := file.read(BUFFER_BYTES)):
                blocks.append(block)
                size += len(block)
    if size > max_bytes:
        raise OSError(f"{path} must not contain more than {max_bytes:,} bytes. Check that it is the right file.")
    return b"".join(blocks)


class _LimitedFile(io.RawIOBase):
    """Raw stream of the uncompressed bytes of a file, with limits on the line length and the compression factor."""

    def __init__(self, path: Path, max_line_bytes: int = MAX_LINE_BYTES):
        self.path, self.max_line_bytes = path, max_line_bytes
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
        try:
            data = self.file.read1(len(buffer))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            message = f"{self.path} is not a complete gzip file ({error}). Copy or compress it again."
            raise gzip.BadGzipFile(message) from error
        buffer[: len(data)] = data
        end = data.rfind(b"\n")
        self.line_bytes = self.line_bytes + len(data) if end < 0 else len(data) - end - 1
        if self.line_bytes > self.max_line_bytes:
            raise ValueError(
                f"{self.path} is not a text file: a line contains more than {self.max_line_bytes:,} bytes. "
                "Check that it is the right file."
            )
        if self.file is not self.stored:
            size = self.file.tell()
            if size > GROWTH_CHECK_START + MAX_GROWTH * self.stored.tell():
                growth = size // self.stored.tell()
                raise OSError(
                    f"{self.path} is not a text file: its uncompressed content is {growth} times larger. "
                    "Check that it is the right file."
                )
        return len(data)

    def close(self) -> None:
        self.file.close()
        self.stored.close()
        super().close()


# Other whitespace, such as a no-break space, counts as text, because it was probably written on purpose.
WHITESPACE = string.whitespace
# The number of bytes at the beginning of a file from which its line endings are detected.
INSPECTED_BYTES = 2**18
# Carriage returns that are not followed by a line feed.
LONE_RETURN = re.compile(rb"\r+(?![\r\n])")


def is_blank(text: str) -> bool:
    """Return whether a text contains only ASCII whitespace."""
    return not text.strip(WHITESPACE)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. JSON can contain unpaired surrogates, which cannot be encoded."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def get_suffix(path: Path) -> str:
    """Return the lowercase suffix of a file name. For a .gz file, return the suffix before .gz.

    Example:
        >>> get_suffix(Path("train.CSV.gz"))
        '.csv'
    """
    return (Path(path.stem).suffix if path.suffix == COMPRESSED_SUFFIX else path.suffix).lower()


def iterate_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without their endings. Raises the errors of `iterate_lines_with_endings`."""
    for line in iterate_lines_with_endings(path):
        yield line.rstrip("\r\n")


def iterate_lines_with_endings(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line endings.

    Lines end with a line feed, or with a carriage return if `has_carriage_return_line_endings` is true for the file.
    No other character ends a line. In a file with line feeds, carriage returns are treated as text, because crawled
    texts may contain carriage returns that are missing from their translations. A warning is logged for the first of
    them.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text. The message contains the line number.
    """
    with open_file(path.expanduser()) as binary:
        uses_carriage_returns = has_carriage_return_line_endings(binary)
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="" if uses_carriage_returns else "\n")
        number, is_warned = 0, uses_carriage_returns or get_suffix(path) in (".csv", ".tsv", ".json", ".jsonl")
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
            # All complete lines before the chunk that contains the error were already yielded.
            number += 1 + error.object[: error.start].count(b"\r" if uses_carriage_returns else b"\n")
            raise ValueError(
                f"{path}, line {number}, must be UTF-8 text ({error.reason}). Save the file as UTF-8."
            ) from error


def has_carriage_return_line_endings(file: BinaryIO) -> bool:
    """Return whether the lines of a file end with carriage returns, as written by old Mac programs.

    This is the case if the beginning of the file contains more lone carriage returns than line feeds. The function
    moves the file position back to the beginning of the file.
    """
    try:
        head = file.read(INSPECTED_BYTES)
    except gzip.BadGzipFile:  # reported by the code that reads the file
        head = b""
    file.seek(0)
    return len(LONE_RETURN.findall(head)) > head.count(b"\n")


# The files in a checkpoint, as named by Transformers and sentence-transformers.
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_WEIGHTS_NAME = "pytorch_model.bin"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SENTENCE_MODULES_NAME = "modules.json"
# The files that this package adds to a checkpoint.
CARD_NAME = "README.md"
# The last line of a generated model card begins with this text.
GENERATED_CARD = "<!-- generated by hf_attn_variants "
HISTORY_NAME = "model_history.json"
REPORT_NAME = "conversion_report.json"
RESULTS_NAME = "all_results.json"
LOG_FILE = "train_log.jsonl"
CURVES_FILE = "training_curves.png"
CONFUSION_FILE = "confusion_matrix.png"  # for the dev rows; the file for the test rows ends in _test.png
BEST_MODEL_FILE = "best_model.safetensors"
# While a model is written to an existing folder, its config.json begins with this text, so that it cannot be loaded.
PLACEHOLDER_PREFIX = b"This is not a model: "
# A file in training checkpoints.
STATE_FILE = "train_state.json"
# Files from a training run that users of the model do not need. Earlier releases wrote "bad_batch-*".
TRAINING_LEFTOVERS = ("predictions_*", "bad_batch-*", "events.out.tfevents.*")
# Log files, which may contain the names of machines, users and folders, and the folders of experiment trackers.
LOG_PATTERNS = ("*.log", "nohup.out", "slurm-*.out", "*.stdout", "*.stderr")
TRACKER_FOLDERS = ("hf_attn_variants", "runs", "wandb", "mlruns")
# Files written by the Transformers Trainer, its example scripts and DeepSpeed, except pickle files.
TRAINER_FILES = tuple(
    """trainer_state.json train_results.json eval_results.json test_results.json predict_results*
    eval_predictions.json eval_nbest_predictions.json eval_null_odds.json generated_predictions.txt zero_to_fp32.py
    latest""".split()
)
# Results of training or conversion. They do not describe models that are created from this one.
PLOT_FILES = (CURVES_FILE, CONFUSION_FILE, CONFUSION_FILE.replace(".", "_test."))
RESULT_FILES = (RESULTS_NAME, LOG_FILE, *PLOT_FILES, REPORT_NAME, *TRAINING_LEFTOVERS, *TRAINER_FILES)
# The maximum nesting depth of lists and objects in a JSON file. Every Python version can read this depth.
MAX_NESTING = 200

MAX_JSON_BYTES = 2**28
TORCH_WRITE_ERROR = re.compile(r"unexpected pos|file write failed|PytorchStreamWriter failed|iostream error")
# The disk space required in addition to the tensors, for the configuration, the code and the file system.
SPARE_BYTES = 16 * 2**20


def load_json(path: Path, max_bytes: int = MAX_JSON_BYTES, unique_keys: bool = False) -> Any:
    """Read a JSON file (UTF-8, UTF-16 or UTF-32, with or without a byte order mark) and return its value.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file does not contain valid JSON, or if `unique_keys` is True and a key is repeated.
    """
    try:
        return parse_json(read_file(path, max_bytes), unique_keys)
    except ValueError as error:
        message = str(error).rstrip(".")
        raise ValueError(f"{path} must be a JSON file: {message}.") from error


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Parse JSON and return its value.

    Args:
        text: the JSON.
        unique_keys: whether a repeated key in an object is an error. If False, the last value is used, as in the
            `json` module.

    Raises:
        ValueError: if the text is not valid JSON, a key is repeated, or lists and objects are nested more than
            `MAX_NESTING` levels deep. (The limit in the `json` module depends on the Python version.)

    Example:
        >>> parse_json('{"num_key_value_heads": 4}')
        {'num_key_value_heads': 4}
    """
    try:
        value = json.loads(text, object_pairs_hook=_make_object if unique_keys else None)
    except RecursionError as error:
        raise ValueError(f"Lists and objects must not be nested this deeply ({error}).") from error
    containers = [value]
    for _ in range(MAX_NESTING):
        children = (
            container.values() if isinstance(container, dict) else container
            for container in containers
            if isinstance(container, dict | list)
        )
        containers = [child for values in children for child in values if isinstance(child, dict | list)]
        if not containers:
            return value
    raise ValueError(f"Lists and objects must not be nested more than {MAX_NESTING} levels deep.")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, or raise ValueError if a key is repeated."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"The key {key!r:.60} occurs twice in an object. Rename or remove one of the two.")
    return values


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically, so that readers see either the old or the new content.

    Raises:
        OSError: if the file cannot be written. The old file is left unchanged, and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({type(error).__name__}: {error}).") from error


def describe_write_error(error: Exception) -> str:
    """Return an explanation of a failed write, in parentheses, for use in an error message.

    The zip writer in torch raises a RuntimeError if the disk is full ("unexpected pos 64 vs 0", "file write failed",
    "iostream error"). This function replaces such a message with one that mentions the disk.
    """
    if isinstance(error, RuntimeError) and TORCH_WRITE_ERROR.search(str(error)):
        return "(only part of the file was written: the disk is probably full or a quota is used up; free some space)"
    return f"({type(error).__name__}: {error})"


def check_output_dir(output_dir: str | os.PathLike, source: str | os.PathLike | None = None) -> Path:
    """Check that an output folder can be created, and return its absolute path with all links resolved.

    The folder must be new or empty, and it must not be inside `source`.

    Raises:
        OSError: if the folder cannot be created or is not empty.
        ValueError: if the folder is inside `source`.
    """
    path = Path(os.path.realpath(os.path.expanduser(output_dir)))
    if (path.exists() or path.is_symlink()) and any(path.iterdir()):
        raise FileExistsError(f"The output folder {str(path)!r} is not empty. Choose a new folder, or empty this one.")
    parent = _find_existing_ancestor(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"The output folder {str(path)!r} cannot be created, because {str(parent)!r} is not a writable folder. "
            "Choose another folder."
        )
    if source is not None and Path(source).resolve() in path.parents:
        raise ValueError(
            f"The output folder {str(path)!r} must not be inside the original model {str(source)!r}. "
            "Choose another folder."
        )
    return path


def check_disk_space(output_dir: Path, needed: int) -> None:
    """Raise OSError unless the file system of `output_dir` has at least `needed` free bytes."""
    needed += SPARE_BYTES
    free_bytes = shutil.disk_usage(_find_existing_ancestor(output_dir)).free
    if free_bytes < needed:
        raise OSError(
            f"{str(output_dir)!r} needs {needed / 2**20:,.0f} MiB of disk space, but only "
            f"{free_bytes / 2**20:,.0f} MiB are free. Free some space, or choose a folder on another disk."
        )


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents, and return the created folders, starting with the innermost.

    Raises:
        OSError: if a folder cannot be created.
    """
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty_folders(missing)
        raise
    return missing


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Clean up after an error by removing those folders created by `make_folders` that are still empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def staged_folder(output_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `output_dir` at the end of the `with` block.

    The temporary folder is removed after an error, Ctrl-C or SIGTERM. A new `output_dir` is written under a temporary
    name in the same parent folder and then renamed. An existing empty `output_dir` is not replaced, because it may be
    a mount point, a working directory, or the only writable folder. In this case, the files are written to a hidden
    folder inside it and moved up at the end.

    Raises:
        FileExistsError: if another process created `output_dir`, or files in it, in the meantime.
    """
    exists = output_dir.is_dir()
    created = [] if exists else make_folders(output_dir.parent)
    stage = None
    try:
        parent = output_dir if exists else output_dir.parent
        stage = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.partial-", dir=parent))
        umask = os.umask(0)
        os.umask(umask)
        stage.chmod(0o777 & ~umask)  # mkdtemp creates a private folder, but the result must have default permissions
        with _unwind_on_sigterm():
            yield stage
            if exists:
                _move_files_to_parent(stage, output_dir)
            else:
                _rename_to(stage, output_dir)
    except BaseException:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        remove_empty_folders(created)
        raise


@contextmanager
def _unwind_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the stack like Ctrl-C, unless a handler for SIGTERM is already installed.

    Batch schedulers send this signal.
    """
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)  # the exit status that a shell reports for a process killed by a signal

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _rename_to(stage: Path, folder: Path) -> None:
    try:
        if folder.is_dir():
            folder.rmdir()  # fails if another process wrote files in the meantime
        os.rename(stage, folder)
    except OSError as error:
        if folder.exists():
            raise FileExistsError(
                f"Another process created {str(folder)!r} in the meantime. Choose a new folder."
            ) from error
        raise


def _move_files_to_parent(stage: Path, folder: Path) -> None:
    """Move all files from `stage` to its otherwise empty parent `folder`, or move none of them if one move fails."""
    if any(path != stage for path in folder.iterdir()):
        raise FileExistsError(
            f"Another process wrote files into the output folder {str(folder)!r} in the meantime. Choose a new folder."
        )
    paths = sorted(stage.iterdir(), key=lambda path: (path.name == CONFIG_NAME, path.name))
    config = folder / CONFIG_NAME
    if paths and paths[-1].name == CONFIG_NAME:
        # Without config.json, a class would load the weights with default settings. Therefore, config.json is moved
        # last. Until then, it contains a notice.
        atomic_write(
            config, PLACEHOLDER_PREFIX + b"the run that wrote it was killed. Empty this folder and repeat the run.\n"
        )
    try:
        for path in paths:
            os.replace(path, folder / path.name)
        stage.rmdir()
    except BaseException:
        for path in paths:
            if not path.exists():
                os.replace(folder / path.name, path)
        if is_placeholder_config(config):
            config.unlink()
        raise


def is_placeholder_config(config: Path) -> bool:
    """Return whether a config.json contains only the notice that replaces it while a model is written."""
    if not config.is_file():
        return False
    with open(config, "rb") as file:
        return file.read(len(PLACEHOLDER_PREFIX)) == PLACEHOLDER_PREFIX


def is_generated_card(path: Path) -> bool:
    """Return whether a file is a model card generated by this package, even if it was edited later."""
    return path.is_file() and GENERATED_CARD in path.read_text(encoding="utf-8", errors="replace")


def _find_existing_ancestor(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def save_plot(path: Path, make_figure: Callable[[], Any], **options: Any) -> bool:
    """Save a plot as a PNG file, or log a warning if it cannot be rendered.

    Args:
        path: the file.
        make_figure: a function that returns a Matplotlib figure.
        options: keyword arguments for `savefig`.

    Returns:
        True if the plot was saved, and False otherwise.

    Raises:
        OSError: if the file cannot be written.
    """
    image = io.BytesIO()
    try:
        make_figure().savefig(image, format="png", **options)
    except Exception as error:  # from Matplotlib's parsers or fonts, or because of a lack of memory
        reason = " ".join(str(error).split())[:200]
        logger.warning("Could not save %s (%s: %s). All other files were written.", path, type(error).__name__, reason)
        return False
    atomic_write(path, image.getvalue())
    return True
