"""Runs a sweep: one command after another, in a folder each, from wherever an earlier call ended."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import TerminatedError
from ..files import CONFIG_NAME, RESULTS_NAME, atomic_write, load_json, make_folders
from ..interrupts import INTERRUPTED
from ..training.engine import folder_lock
from ..training.engine.checkpoints import list_checkpoints
from ..training.engine.stop_signals import StopSignals
from .plan import CONVERTED, TRAINED, Run

__all__ = ["LOG_NAME", "RunFolder", "SweepRunner", "check_launcher"]

# Of a run: its commands and, once it is finished, its results or why it failed; and what its commands printed.
RECORD_NAME, LOG_NAME = "run.json", "output.log"
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """A command's exit status, the line that said why, and when: in seconds since 1970."""

    status: int
    message: str
    time: float

    def __str__(self) -> str:
        return f"status {self.status}: {self.message}"


class RunFolder:
    """What one run has in a sweep's folder.

    Args:
        run: it.
        sweep_dir: the sweep's folder.

    Raises:
        ValueError, OSError: if the folder has a run of other commands, or its record cannot be read.
    """

    def __init__(self, run: Run, sweep_dir: Path):
        self.run, self.path = run, sweep_dir / run.folder
        self.results: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.read()
        self._failure_before = self.failure

    def read(self) -> None:
        """Read what the run has come to, in this call of the sweep or in another one.

        Raises:
            ValueError, OSError: see the class.
        """
        record = self.path / RECORD_NAME
        if not record.is_file():
            return
        stored = load_json(record)
        if not isinstance(stored, dict) or "commands" not in stored:
            raise ValueError(f"{record} is no record of a run: delete {self.path}")
        if stored["commands"] != self.run.record():
            changed = _difference(stored["commands"], self.run.record())
            raise ValueError(
                f"{self.path} has a run of other commands ({changed}): give a new --output_dir, or delete that folder "
                "to run it again"
            )
        self.results = stored.get("results")
        self.failure = Failure(**stored["failure"]) if "failure" in stored else None

    @property
    def has_failed(self) -> bool:
        """Whether it failed since this object was made, in this call of the sweep or in another one."""
        return self.failure not in (None, self._failure_before)

    @property
    def is_converted(self) -> bool:
        """Whether its conversion is done."""
        return self.run.convert is not None and (self.path / CONVERTED / CONFIG_NAME).is_file()

    def begin(self) -> None:
        """Write what is going to run, so that a later call knows what lies here."""
        self.failure = None
        self._write()

    def finish(self) -> None:
        """Take over the training's results: from here on the run is never run again.

        Raises:
            ValueError, OSError: if they are not there.
        """
        self.results = load_json(self.path / TRAINED / RESULTS_NAME)
        self._write(results=self.results)

    def fail(self, status: int, message: str) -> None:
        """Write why it failed: calls that run beside this one do not try it again, later ones do."""
        self.failure = Failure(status, message, time.time())
        self._write(failure=asdict(self.failure))

    def _write(self, **more: Any) -> None:
        record = {"commands": self.run.record(), **more}
        atomic_write(self.path / RECORD_NAME, json.dumps(record, indent=2) + "\n")

    def next_commands(self) -> list[list[str]]:
        """Return the words of the commands that are left to do, `launch` included.

        A training goes on from its last checkpoint, and without one it starts over.
        """
        conversion, training = self.run.conversion(self.path), self.run.training(self.path)
        program = ["-m", "attn_variants"]
        commands = []
        if conversion is not None and not self.is_converted:
            for leftover in self.path.glob(f".{CONVERTED}.partial-*"):  # of a conversion that was killed
                shutil.rmtree(leftover)
            commands.append([sys.executable, *program, *conversion])
        trained = self.path / TRAINED
        if list_checkpoints(trained):
            training += ["--resume_from_checkpoint", "latest"]
        elif trained.is_dir() and any(trained.iterdir()):
            training += ["--overwrite_output_dir"]
        launch = [_launcher(self.run.launch[0]), *self.run.launch[1:]] if self.run.launch else [sys.executable]
        return [*commands, [*launch, *program, *training]]


class SweepRunner:
    """Runs what is left of a sweep, and ends between two steps of a training when it is told to.

    Args:
        folders: the runs.
        on_finish: called after each run that finished here.
        on_wait: called about once a second, with what goes on.
    """

    def __init__(
        self, folders: Sequence[RunFolder], on_finish: Callable[[RunFolder], Any], on_wait: Callable[[str], Any]
    ):
        self.folders, self.on_finish, self.on_wait = folders, on_finish, on_wait
        self.signals = StopSignals()

    def run(self) -> None:
        """Run all that no other call of the sweep runs; one that fails does not stop the others.

        Raises:
            KeyboardInterrupt, TerminatedError: on Ctrl-C or SIGTERM, once the running command has ended, a training
                with a checkpoint.
            OSError: if a record cannot be written.
        """
        with self.signals.noticed():
            try:
                busy = [each for each in self.folders if each.results is None and not self._take(each, 0)]
                # What was killed just now may hold its run a little longer, and another call may have stopped.
                end = time.monotonic() + folder_lock.WAIT_SECONDS
                for folder in busy:
                    self._take(folder, max(0, end - time.monotonic()))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"{INTERRUPTED}; {self._how_to_go_on()}") from None

    def _take(self, folder: RunFolder, wait_seconds: float) -> bool:
        """Run what is left of a run; return false if another call has it."""
        if self.signals.number is not None:
            self._stop()
        make_folders(folder.path)
        with ExitStack() as stack:
            try:
                # The training holds it too, so that a second call does not meet one that outlived the first.
                stack.enter_context(folder_lock.held_folder(str(folder.path), wait_seconds, by_children=True))
            except folder_lock.FolderInUseError:
                return False
            folder.read()  # another call may have had it meanwhile, and written the table
            if folder.results is None and not folder.has_failed:
                self._run(folder)
        return True

    def _run(self, folder: RunFolder) -> None:
        folder.begin()
        log = folder.path / LOG_NAME
        commands = folder.next_commands()
        for words in commands:
            status = self._call(words, log, folder.run.name)
            is_told_to_stop = self.signals.number is not None
            if is_told_to_stop and (status != 0 or words is not commands[-1]):
                self._stop()
            if status != 0:
                folder.fail(status, _last_words(log))
                return
        try:
            folder.finish()
        except (ValueError, OSError) as error:
            folder.fail(0, str(error))
            return
        self.on_finish(folder)
        if self.signals.number is not None:
            self._stop()

    def _call(self, words: list[str], log: Path, name: str) -> int:
        """Run a command, its output into the log, and return its exit status; pass on the signals that come."""
        with open(log, "ab") as output:
            output.write(f"$ {shlex.join(words)}\n".encode())
            output.flush()
            # A group of its own: signals then reach a launcher's processes too, and each of them once.
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                close_fds=False,  # the lock of the run's folder: the one descriptor that is inherited
            )
            passed_on = None
            try:
                while process.poll() is None:
                    if self.signals.number != passed_on:
                        passed_on = self.signals.number
                        _signal(process, passed_on)
                    self.on_wait(name)
                    _wait(process, POLL_SECONDS)
            except KeyboardInterrupt:  # the second one
                _signal(process, signal.SIGINT)
                process.wait()
                raise
            except BaseException:
                _signal(process, signal.SIGTERM)
                process.wait()
                raise
        return process.returncode

    def _stop(self) -> None:
        if self.signals.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise TerminatedError(f"stopped by SIGTERM; {self._how_to_go_on()}")

    def _how_to_go_on(self) -> str:
        done = sum(folder.results is not None for folder in self.folders)
        return f"{done} of {len(self.folders)} runs are finished; the same command goes on"


def check_launcher(launch: Sequence[str]) -> None:
    """Check that what launches the trainings is there.

    Raises:
        ValueError: if it is not.
    """
    if launch:
        _launcher(launch[0])


def _launcher(name: str) -> str:
    beside = os.path.dirname(sys.executable)
    found = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise ValueError(f"`launch`: there is no program {name!r} here: install it, or leave `launch` out")
    return found


def _wait(process: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def _signal(process: subprocess.Popen, number: int | None) -> None:
    if number is not None and process.poll() is None:
        os.killpg(process.pid, number)


def _last_words(log: Path) -> str:
    """Return the line of a log that says why its last command failed."""
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - 2**14))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    last = next((i for i in reversed(range(len(lines))) if lines[i].startswith("$ ")), -1)
    said = [line.strip() for line in lines[last + 1 :] if line.strip()]
    errors = [line for line in said if line.startswith("error: ")]
    return (errors or said or ["it said nothing"])[-1].removeprefix("error: ")


def _difference(before: list[list[str]], now: list[list[str]]) -> str:
    """Say where two runs' commands differ first."""
    pairs = [(one, other) for one, other in zip(before, now, strict=False) if one != other]
    if not pairs:
        return "with" + ("out" if len(now) > len(before) else "") + " a conversion"
    was, is_now = (_by_flag(words) for words in pairs[0])
    changed = [name for name in (*was, *is_now) if was.get(name) != is_now.get(name)]
    if not changed:
        return "another order of flags"
    name = changed[0]
    return f"{name} was {was.get(name, 'not given')} and is {is_now.get(name, 'not given')}"


def _by_flag(words: Sequence[str]) -> dict[str, str]:
    """Return what stands behind each flag of a command."""
    found: dict[str, list[str]] = {"the program": []}
    last = "the program"
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.partition("=")
            found[last] = [value] if equals else []
        else:
            found[last].append(word)
    return {name: " ".join(values) or "given" for name, values in found.items()}
