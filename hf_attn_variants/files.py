"""The files of a model's folder: what they are called, and writing that leaves nothing half done."""

import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "BEST_MODEL_FILE",
    "CARD_NAME",
    "CONFIG_NAME",
    "CURVES_FILE",
    "HISTORY_NAME",
    "INDEX_NAME",
    "LOG_FILE",
    "PICKLE_INDEX_NAME",
    "PICKLE_SUFFIXES",
    "PICKLE_WEIGHTS_NAME",
    "REPORT_NAME",
    "RESULTS_NAME",
    "RESULT_FILES",
    "SENTENCE_MODULES_NAME",
    "STATE_FILE",
    "TRACKER_FOLDERS",
    "TRAINING_LEFTOVERS",
    "WEIGHTS_NAME",
    "atomic_write",
    "check_disk_space",
    "check_output_dir",
    "load_json",
    "make_folders",
    "remove_empty_folders",
    "staged_folder",
]

# A checkpoint, as transformers and sentence-transformers name its files.
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_WEIGHTS_NAME = "pytorch_model.bin"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SENTENCE_MODULES_NAME = "modules.json"
# What this package writes beside it.
CARD_NAME = "README.md"
HISTORY_NAME = "model_history.json"
REPORT_NAME = "conversion_report.json"
RESULTS_NAME = "all_results.json"
LOG_FILE = "train_log.jsonl"
CURVES_FILE = "training_curves.png"
BEST_MODEL_FILE = "best_model.safetensors"
# Of a training checkpoint.
STATE_FILE = "train_state.json"
# What a training run leaves beside its model that is for the one who trained it alone, and its trackers' folders.
TRAINING_LEFTOVERS = ("predictions_*", "bad_batch-*", "events.out.tfevents.*")
TRACKER_FOLDERS = ("hf_attn_variants", "runs")
# What a training run or a conversion wrote about the model that it made: it is not true of what is made of that.
RESULT_FILES = (RESULTS_NAME, LOG_FILE, CURVES_FILE, REPORT_NAME, *TRAINING_LEFTOVERS)

# Beyond the tensors: configuration, code, file-system overhead.
SPARE_BYTES = 16 * 2**20


def load_json(path: Path, encoding: str = "utf-8") -> Any:
    """Return the value that a JSON file holds.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding=encoding))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file through a temporary one beside it, so that readers see the old content or the new.

    Raises:
        OSError: if it cannot be written; nothing half written is left.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"could not write {path} ({type(error).__name__}: {error})") from error


def check_output_dir(output_dir: str | os.PathLike, source: str | os.PathLike | None = None) -> Path:
    """Return where `output_dir` really is if it can be made: it must not exist or be empty, nor lie inside `source`.

    Raises:
        OSError: where it cannot be.
    """
    path = Path(os.path.realpath(os.path.expanduser(output_dir)))
    if path.is_symlink():
        raise OSError(f"the output {str(path)!r} is a link to itself; give a new folder.")
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"the output {str(path)!r} is a file; give a new folder.")
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"the output folder {str(path)!r} is not empty; give a new one or empty it.")
    parent = _existing_ancestor(path)
    if not parent.is_dir():
        raise NotADirectoryError(f"the output folder {str(path)!r} would lie in {str(parent)!r}, which is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"the output folder {str(path)!r} cannot be made: {str(parent)!r} is not writable.")
    if source is not None and Path(source).resolve() in path.parents:
        raise ValueError(f"the output folder {str(path)!r} lies inside the source {str(source)!r}; give another one.")
    return path


def check_disk_space(output_dir: Path, needed: int) -> None:
    """Raise OSError unless the file system of `output_dir` has room for `needed` bytes."""
    needed += SPARE_BYTES
    free = shutil.disk_usage(_existing_ancestor(output_dir)).free
    if free < needed:
        raise OSError(
            f"not enough disk space for {str(output_dir)!r}: {needed / 2**20:,.0f} MiB are needed, "
            f"{free / 2**20:,.0f} MiB are free."
        )


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that were not there, the innermost first.

    Raises:
        OSError: if one cannot be made.
    """
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty_folders(missing)
        raise
    return missing


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove what `make_folders` made, for work that came to nothing; a folder that holds something stays."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def staged_folder(output_dir: Path) -> Iterator[Path]:
    """Give a folder to fill; what it holds is `output_dir` at the end, or vanishes on an error, Ctrl-C or SIGTERM.

    A new folder is filled beside its place and renamed. An existing empty one may be a mount point or somebody's
    working directory, or lie where nothing else may be written: it stays, a hidden folder inside it is filled, and the
    files are moved up at the end.
    """
    exists = output_dir.is_dir()
    created = [] if exists else make_folders(output_dir.parent)
    stage = None
    try:
        parent = output_dir if exists else output_dir.parent
        stage = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.partial-", dir=parent))
        umask = os.umask(0)
        os.umask(umask)
        stage.chmod(0o777 & ~umask)  # mkdtemp's folders are private; the result is an ordinary one
        with _sigterm_unwinds():
            yield stage
            if exists:
                _move_up(stage, output_dir)
            else:
                _take_its_place(stage, output_dir)
    except BaseException:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        remove_empty_folders(created)
        raise


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM, which batch schedulers send, unwind the stack as Ctrl-C does, unless somebody handles it."""
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)  # what a shell says of a process that a signal ended

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _take_its_place(stage: Path, folder: Path) -> None:
    try:
        if folder.is_dir():
            folder.rmdir()  # only an empty one: what came in the meantime is not lost
        os.rename(stage, folder)
    except OSError as error:
        if folder.exists():
            raise FileExistsError(
                f"another process made {str(folder)!r} in the meantime; give a new folder."
            ) from error
        raise


def _move_up(stage: Path, folder: Path) -> None:
    """Move what `stage` holds into `folder`, its parent, which is empty otherwise; all of it or nothing."""
    if any(path != stage for path in folder.iterdir()):
        raise FileExistsError(f"files came into the output folder {str(folder)!r} in the meantime; give a new one.")
    # Without a config.json it is no checkpoint yet.
    paths = sorted(stage.iterdir(), key=lambda path: (path.name == CONFIG_NAME, path.name))
    try:
        for path in paths:
            os.rename(path, folder / path.name)
        stage.rmdir()
    except BaseException:
        for path in paths:
            if (folder / path.name).exists():
                os.rename(folder / path.name, path)
        raise


def _existing_ancestor(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
