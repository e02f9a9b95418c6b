"""A refreshed repository written: as a new folder, or in its place by whole files, old or new and never a mixture.

In place, the new files and copies of the old ones are complete in a hidden folder before anything changes. Then
config.json is replaced by a line that is no JSON, the others are swapped, and the new config.json comes last: whoever
is killed between leaves a folder that no class loads, and the next refresh ends what was begun.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files import (
    CARD_NAME,
    CONFIG_NAME,
    REFRESH_PREFIX,
    UNFINISHED_REFRESH,
    check_disk_space,
    load_json,
    staged_folder,
)
from .refresh_plan import KINDS, RefreshPlan, plan_json

__all__ = ["end_interrupted", "held", "write_folder", "write_in_place"]

PARTIAL = f"{REFRESH_PREFIX}partial-"
BACKUP = f"{REFRESH_PREFIX}backup-"
JOURNAL = "refresh.json"
# In config.json's place meanwhile. Without any config.json a class that is named loads with its default sizes.
PLACEHOLDER = "placeholder"
NO_CONFIG = "A refresh of this repository was interrupted: `attn-variants refresh` of this folder ends it.\n"


def write_folder(plan: RefreshPlan, output: Path) -> None:
    """Write a repository with today's code as a new folder, which appears when it is complete.

    Raises:
        OSError: if it cannot be written; nothing is left then.
    """
    source, changes = plan.repository.folder, {each.name: each.content for each in plan.changes}
    kept = [name for name in plan.repository.files if name not in changes]
    sizes = sum(plan.repository.files[name] for name in kept)
    check_disk_space(output, sizes + sum(len(content or b"") for content in changes.values()))
    with staged_folder(output) as stage:
        for name in kept:
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, stage / name)
        for name, content in changes.items():
            if content is not None:
                (stage / name).write_bytes(content)


def write_in_place(plan: RefreshPlan) -> str:
    """Swap the files that change; return the name of the hidden folder that keeps the old ones.

    Raises:
        OSError: if it cannot be done; the message says whether the repository is as it was.
    """
    folder = plan.repository.folder
    _remove_partial(folder)
    size = sum(len(each.content or b"") + plan.repository.files.get(each.name, 0) for each in plan.changes)
    check_disk_space(folder, size)
    stage = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
    try:
        backup = _fill(plan, stage)
        os.rename(stage, folder / UNFINISHED_REFRESH)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _swap(folder)
    return backup


def end_interrupted(folder: Path) -> bool:
    """End a refresh that was killed in the middle, if there is one; return whether there was.

    Raises:
        OSError: if it cannot be ended.
        ValueError: if what lies there was not left by a refresh.
    """
    if not (folder / UNFINISHED_REFRESH).is_dir():
        return False
    _swap(folder)
    return True


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a repository for this process.

    Raises:
        OSError: if another refresh holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{folder}: another process is refreshing it; wait until it ends.") from None
        except OSError:
            pass  # a file system, some over a network, that holds no folder
        yield
    finally:
        os.close(descriptor)


def _fill(plan: RefreshPlan, stage: Path) -> str:
    """Write what a swap needs into a folder; return the name that the backup gets."""
    folder = plan.repository.folder
    for name in ("new", "old"):
        (stage / name).mkdir()
    contents = {each.name: each.content for each in plan.changes}
    # It is away while files are swapped, whether it changes or not.
    contents.setdefault(CONFIG_NAME, (folder / CONFIG_NAME).read_bytes())
    if links := [name for name in contents if (folder / name).is_symlink()]:
        raise OSError(f"{folder}: {links[0]} is a link; put the file itself there, or write to a new --output_dir.")
    for name, content in contents.items():
        if (folder / name).exists():
            shutil.copy2(folder / name, stage / "old" / name)
        if content is not None:
            (stage / "new" / name).write_bytes(content)
            with suppress(OSError):
                shutil.copymode(folder / name, stage / "new" / name)
    backup = _free_name(folder, f"{BACKUP}{re.sub(r'[^0-9A-Za-z.]', '-', plan.repository.version or 'old')}")
    journal = {
        "backup": backup,
        "code_before": plan.repository.version,
        **{kind: [each.name for each in plan.changes if each.kind == kind] for kind in KINDS},
    }
    (stage / JOURNAL).write_text(plan_json(journal), encoding="utf-8")
    (stage / PLACEHOLDER).write_text(NO_CONFIG, encoding="utf-8")
    return backup


def _swap(folder: Path) -> None:
    """Do, or go on with, what the hidden folder says; every step may have been done before."""
    unfinished = folder / UNFINISHED_REFRESH
    backup, removed = _checked_journal(unfinished)
    new, old = unfinished / "new", unfinished / "old"
    try:
        if (new / CONFIG_NAME).is_file():
            if (unfinished / PLACEHOLDER).is_file():
                os.replace(unfinished / PLACEHOLDER, folder / CONFIG_NAME)
            for path in sorted(new.iterdir()):
                if path.name != CONFIG_NAME:
                    os.replace(path, folder / path.name)
            for name in removed:
                (folder / name).unlink(missing_ok=True)
            os.replace(new / CONFIG_NAME, folder / CONFIG_NAME)
        if old.is_dir():
            with suppress(FileNotFoundError):
                os.replace(unfinished / JOURNAL, old / JOURNAL)
            os.rename(old, folder / _free_name(folder, backup))
        shutil.rmtree(unfinished)
    except OSError as error:
        raise OSError(
            f"{folder}: its refresh stopped half-way ({error}). No file is lost; put that right and repeat the "
            f"command, which ends it. Until then the folder does not load."
        ) from error


def _checked_journal(unfinished: Path) -> tuple[str, list[str]]:
    """Return the backup's name and the files to remove; all names are of files beside config.json."""
    if unfinished.is_symlink():
        raise ValueError(f"{unfinished} is a link: no refresh left it. Remove it.")
    places = [unfinished / JOURNAL, unfinished / "old" / JOURNAL]
    journal: Any = next((load_json(path) for path in places if path.is_file() and not path.is_symlink()), {})
    journal = journal if isinstance(journal, dict) else {"backup": None}
    backup, removed = journal.get("backup", f"{BACKUP}old"), journal.get("removed", [])
    found = [path for part in ("new", "old") for path in (unfinished / part).glob("*")]
    is_right = isinstance(backup, str) and re.fullmatch(rf"{re.escape(BACKUP)}[\w.-]+", backup) is not None
    is_right &= isinstance(removed, list) and all(isinstance(name, str) and _is_code(name) for name in removed)
    of_a_refresh = (_is_code(path.name) or path.name in (CONFIG_NAME, CARD_NAME, JOURNAL) for path in found)
    parts = [unfinished / part for part in ("new", "old", PLACEHOLDER)]
    if not is_right or not all(of_a_refresh) or any(path.is_symlink() for path in (*found, *parts)):
        raise ValueError(f"{unfinished} was left by no refresh of this package. Look at it, and remove it.")
    return backup, removed


def _is_code(name: str) -> bool:
    return re.fullmatch(r"\w+\.py", name) is not None


def _free_name(folder: Path, name: str) -> str:
    number, found = 1, name
    while (folder / found).exists():
        number += 1
        found = f"{name}-{number}"
    return found


def _remove_partial(folder: Path) -> None:
    """Remove what a refresh left that was killed before it changed anything."""
    for path in folder.glob(f"{PARTIAL}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
