"""All or nothing: a folder that is filled under another name and takes its place when it is complete."""

import itertools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Moved last: without it a folder is no checkpoint.
CONFIG_NAME = "config.json"

__all__ = ["check_disk_space", "check_output_dir", "make_folders", "remove_empty_folders", "staged_folder"]

# Beyond the tensors: configuration, code, file-system overhead.
SPARE_BYTES = 16 * 2**20


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
