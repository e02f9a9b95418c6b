"""All or nothing: a folder that is filled under another name beside its place and moved there when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_disk_space", "check_output_dir", "staged_folder"]

# Beyond the tensors: configuration, code, file-system overhead.
SPARE_BYTES = 16 * 2**20


def check_output_dir(output_dir: str | os.PathLike, source: str | os.PathLike | None = None) -> Path:
    """Return `output_dir` as a path if it can be made: it must not exist or be empty, nor lie inside `source`.

    Raises:
        OSError: where it cannot be.
    """
    path = Path(output_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"the output {str(path)!r} is a file; give a new folder.")
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"the output folder {str(path)!r} is not empty; give a new one or empty it.")
    parent = _existing_ancestor(path)
    if not parent.is_dir():
        raise NotADirectoryError(f"the output folder {str(path)!r} would lie in {str(parent)!r}, which is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"the output folder {str(path)!r} cannot be made: {str(parent)!r} is not writable.")
    if source is not None and Path(source).resolve() in path.resolve().parents:
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


@contextmanager
def staged_folder(output_dir: Path) -> Iterator[Path]:
    """Give a folder beside `output_dir` to fill; it takes that place at the end, or vanishes on an error or Ctrl-C."""
    created = _make_parents(output_dir.parent)
    stage = None
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.partial-", dir=output_dir.parent))
        umask = os.umask(0)
        os.umask(umask)
        stage.chmod(0o777 & ~umask)  # mkdtemp's folders are private; the result is an ordinary one
        yield stage
        if output_dir.is_dir():
            output_dir.rmdir()  # only an empty one: what came in the meantime is not lost
        os.rename(stage, output_dir)
    except BaseException:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        for folder in created:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _existing_ancestor(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _make_parents(folder: Path) -> list[Path]:
    missing = []
    for ancestor in (folder, *folder.parents):
        if ancestor.exists():
            break
        missing.append(ancestor)
    folder.mkdir(parents=True, exist_ok=True)
    return missing
