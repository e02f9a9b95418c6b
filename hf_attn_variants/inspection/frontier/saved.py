"""A frontier's rows in a file that grows with each of them, from which a second call goes on."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...conversion.calibration_settings import Calibration
from ...files import atomic_write, check_output_dir, load_json, make_folders
from .measure import Frontier, FrontierRow

__all__ = ["SavedFrontier", "hash_examples"]

UNFINISHED = "unfinished"


def hash_examples(calibration: Calibration) -> str:
    """Return a short hash of texts and targets, or of the files of audio.

    Raises:
        OSError: if a file cannot be read.
    """
    content = hashlib.blake2b(digest_size=8)
    for path in calibration.audio or ():
        content.update(hashlib.blake2b(Path(path).read_bytes()).digest())
    if calibration.audio is None:
        content.update(json.dumps([calibration.texts, calibration.target_texts]).encode())
    return content.hexdigest()


class SavedFrontier:
    """The file of one call's rows; that of a call which was stopped says so, and what it was asked.

    Args:
        path: the file; its folder is new or empty, or has that of the same call.

    Raises:
        ValueError, OSError: where the folder holds something else.
    """

    def __init__(self, path: Path):
        self.path, self._stored = path, {}
        temporary = path.with_name(f".tmp-{path.name}")
        if temporary.is_file() and [*path.parent.iterdir()] == [temporary]:
            temporary.unlink()  # of a call that was killed in its first write
        if path.is_file():
            stored = load_json(path)
            if isinstance(stored, dict) and UNFINISHED in stored:
                self._stored = stored
                return
        check_output_dir(path.parent)

    def rows(self, call: Mapping[str, Any]) -> list[FrontierRow]:
        """Return the rows that are there, measured by the same call.

        Raises:
            ValueError: if the file is of another call, or damaged.
        """
        self._call = json.loads(json.dumps(call))
        if not self._stored:
            return []
        try:
            before = self._stored[UNFINISHED]["call"]
            changed = sorted(name for name in self._call if before.get(name) != self._call[name])
            found = [FrontierRow(**row) for row in self._stored["rows"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): delete it, or give a new folder") from error
        if changed:
            raise ValueError(
                f"{self.path} has the rows of another call, with another {', '.join(changed)}: repeat that call to go "
                "on, or give a new folder"
            )
        return found

    def save(self, frontier: Frontier, left: int) -> None:
        """Write the rows there are, of a call that has so many variants left.

        Raises:
            OSError: if the file cannot be written; it stays as it was.
        """
        self._write(frontier.to_dict() | {UNFINISHED: {"variants_left": left, "call": self._call}})

    def finish(self, found: Mapping[str, Any]) -> None:
        """Write what is found in the end.

        Raises:
            OSError: as for `save`.
        """
        self._write(found)

    def _write(self, found: Mapping[str, Any]) -> None:
        make_folders(self.path.parent)
        atomic_write(self.path, json.dumps(found, indent=2) + "\n")
