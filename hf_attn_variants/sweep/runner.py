"""Runs the commands of one run of a sweep, and continues where an earlier call ended."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import TerminatedError
from ..files import CONFIG_NAME, RESULTS_NAME, atomic_write, load_json, make_folders
from ..training.engine.checkpoints import FolderInUseError, held_folder, list_checkpoints
from .plan import CONVERTED, TRAINED, Run

__all__ = ["LOG_NAME", "RunFolder"]

# In the folder of a run: its commands with, once it is finished, its results; and the output of its commands.
RECORD_NAME, LOG_NAME = "run.json", "output.log"


class RunFolder:
    """One run and its folder in the folder of the sweep, which may hold results of an earlier call."""

    def __init__(self, run: Run, sweep_dir: Path):
        self.run, self.path = run, sweep_dir / run.folder
        self.record: dict[str, Any] = {"launch": run.launch, "train": run.train, "convert": run.convert}
        self.results: dict[str, Any] | None = None
        self.failure: str | None = None  # the reason why the run failed in this call
        self.read()

    def read(self) -> None:
        """Read the results, which another call may have written.

        Raises:
            ValueError, OSError: if the folder holds another run, or its record cannot be read.
        """
        stored = load_json(self.path / RECORD_NAME) if (self.path / RECORD_NAME).is_file() else self.record
        if changed := [name for name, words in self.record.items() if stored[name] != words]:
            was, now = stored[changed[0]], self.record[changed[0]]
            raise ValueError(
                f"{self.path} has a run with other flags. Give a new --output_dir. It had {was}, not {now}."
            )
        self.results = stored.get("results")

    @property
    def is_converted(self) -> bool:
        """Whether its conversion is finished."""
        return self.run.convert is not None and (self.path / CONVERTED / CONFIG_NAME).is_file()

    def execute(self) -> None:
        """Run the commands that are left, unless another call of the sweep runs them.

        Raises:
            KeyboardInterrupt, TerminatedError: on Ctrl-C or SIGTERM, after the running training saved a checkpoint.
            OSError: if a program is not installed, or the record cannot be written.
        """
        make_folders(self.path)
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            with suppress(FolderInUseError), held_folder(str(self.path), 0):
                self.read()
                if self.results is None:
                    self._execute()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _execute(self) -> None:
        self._write()
        for words in self._commands_left():
            if status := _call(words, self.path / LOG_NAME):
                self.failure = f"status {status}: {_last_line(self.path / LOG_NAME)}"
                return
        self.results = load_json(self.path / TRAINED / RESULTS_NAME)
        self._write()

    def _write(self) -> None:
        atomic_write(self.path / RECORD_NAME, json.dumps({**self.record, "results": self.results}, indent=2) + "\n")

    def _commands_left(self) -> list[list[str]]:
        """Return the commands that are left: a training continues from its last checkpoint, if it has one."""
        *conversion, training = self.run.commands(self.path)
        for leftover in self.path.glob(f".{CONVERTED}.partial-*"):  # of a conversion that was killed
            shutil.rmtree(leftover)
        trained, program = self.path / TRAINED, ["-m", "attn_variants"]
        if list_checkpoints(trained):
            training += ["--resume_from_checkpoint", "latest"]
        elif trained.is_dir() and any(trained.iterdir()):
            training += ["--overwrite_output_dir"]
        commands = [] if self.is_converted else [[sys.executable, *program, *words] for words in conversion]
        return [*commands, [*(self.run.launch or [sys.executable]), *program, *training]]


def _call(words: list[str], log: Path) -> int:
    """Run a command with its output in the log, and return its exit status."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    with open(log, "ab") as output:
        output.write(f"\n$ {shlex.join(words)}\n".encode())
        output.flush()
        # With a process group of its own, a signal reaches each process of a launcher.
        options: Any = {"stdin": subprocess.DEVNULL, "env": os.environ | {"PATH": path}, "process_group": 0}
        process = subprocess.Popen(words, stdout=output, stderr=output, **options)
        try:
            return process.wait()
        except BaseException:  # Ctrl-C or SIGTERM: a training saves a checkpoint before it ends
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


def _terminate(number: int, frame: Any) -> None:
    raise TerminatedError("stopped by SIGTERM; the same command continues")


def _last_line(log: Path) -> str:
    """Return the line of a log that tells why its last command failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2].split("\n")
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-2]).removeprefix("error: ")
