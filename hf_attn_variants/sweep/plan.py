"""The runs of a sweep: variants times points of the grid times seeds, each checked before any starts."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .flags import CommandFlags
from .sweep_file import CONVERT, Part, Sweep

__all__ = ["CONVERTED", "TRAINED", "Run", "axis_name", "check_files", "curve_axis", "plan_runs"]

# What a run's folder has: the checkpoint that was converted, and what the training leaves.
CONVERTED, TRAINED = "converted", "trained"
MODEL = "model_name_or_path"


@dataclass(frozen=True)
class Run:
    """One training, and the conversion before it where there is one.

    Attributes:
        variant: its name; "" where the file has a grid alone.
        point: its value on each axis of the grid; empty for a reference.
        seed: its seed.
        command: the training command.
        launch: the words that start it.
        train, convert: the words of both commands, but for the folders; `convert` is None without a conversion.
    """

    variant: str
    point: dict[str, Any]
    seed: int
    command: str
    launch: tuple[str, ...]
    train: tuple[str, ...]
    convert: tuple[str, ...] | None

    @property
    def contestant(self) -> str:
        """What its runs of all seeds are called."""
        point = [f"{axis_name(axis)} {value}" for axis, value in self.point.items()]
        return ", ".join([self.variant, *point] if self.variant else point)

    @property
    def name(self) -> str:
        """The contestant and the seed."""
        return f"{self.contestant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where it lies in the sweep's folder."""
        return Path("runs") / _folder_name(self.contestant) / f"seed-{self.seed}"

    def conversion(self, folder: Path) -> list[str] | None:
        """Return the words of the conversion, for a run in that folder; None without one."""
        if self.convert is None:
            return None
        return [CONVERT, *self.convert, "--output_dir", str(folder / CONVERTED)]

    def training(self, folder: Path) -> list[str]:
        """Return the words of the training, without those that launch it."""
        begins = [] if self.convert is None else [f"--{MODEL}", str(folder / CONVERTED)]
        return [self.command, *begins, *self.train, "--output_dir", str(folder / TRAINED)]

    def record(self) -> list[list[str]]:
        """Return its commands, wherever the sweep's folder lies."""
        here = Path("RUN")
        conversion = self.conversion(here)
        return [*([] if conversion is None else [conversion]), [*self.launch, *self.training(here)]]


def plan_runs(sweep: Sweep, commands: Mapping[str, CommandFlags]) -> list[Run]:
    """Return the runs of a sweep, those of one seed after another, so that an unfinished sweep compares all variants.

    Args:
        sweep: the file.
        commands: the flags of its training command, and of "convert".

    Raises:
        ValueError: if a command would not take its flags, two runs are the same, or two would lie in one folder; the
            message names the variant.
    """
    runs = [
        _run(sweep, commands, variant, point, part, seed)
        for seed in sweep.seeds
        for variant, point, part in _contestants(sweep)
    ]
    commands_seen: dict[str, Run] = {}
    folders: dict[Path, Run] = {}
    for run in runs:
        if (same := commands_seen.setdefault(str(run.record()), run)) is not run:
            raise ValueError(f"{same.contestant!r} and {run.contestant!r} are the same commands: leave one out")
        if (same := folders.setdefault(run.folder, run)) is not run:
            raise ValueError(f"{same.contestant!r} and {run.contestant!r} would share the folder {run.folder}")
    return runs


def check_files(run: Run) -> None:
    """Check that what a run's `..._file` and `..._dir` flags name is there.

    Raises:
        OSError: if something is not; the message names the variant and the flag.
    """
    for words in (run.convert or (), run.train):
        flag = ""
        for word in words:
            if word.startswith("--"):
                flag = word.removeprefix("--")
            elif flag.endswith(("_file", "_dir")) and not Path(word).expanduser().exists():
                raise OSError(f"{run.contestant!r}: `{flag}`: no such file or folder: {word}")


def curve_axis(sweep: Sweep) -> str | None:
    """Return the axis of the grid that a curve is drawn along: the first one of several numbers; None without one."""
    for axis, points in sweep.grid.items():
        if len(points) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in points):
            return axis
    return None


def axis_name(axis: str) -> str:
    """Return what an axis of the grid is called: its flag, whichever command has it."""
    return axis.removeprefix(f"{CONVERT}.")


def _contestants(sweep: Sweep) -> Iterator[tuple[str, dict[str, Any], Part]]:
    """Yield each variant at each point of the grid, and each reference: its name, its point, and what it has."""
    for variant, part in sweep.variants.items():
        for values in itertools.product(*sweep.grid.values()):
            point, found = dict(zip(sweep.grid, values, strict=True)), sweep.base.then(part)
            for axis, value in point.items():
                found = found.then(sweep.grid[axis][value])
            yield variant, point, found
    for reference, part in sweep.references.items():
        yield reference, {}, sweep.base.then(part)


def _run(
    sweep: Sweep, commands: Mapping[str, CommandFlags], variant: str, point: dict[str, Any], part: Part, seed: int
) -> Run:
    flags, convert = dict(part.flags), part.convert if part.converts else None
    if part.converts is not None and MODEL in flags:
        raise ValueError(f"`{MODEL}` of a run that may be converted is that of `{CONVERT}`: leave it out of the flags")
    if part.converts is False:
        flags = {MODEL: part.convert.get(MODEL), **flags}
    run = Run(variant, point, seed, sweep.command, sweep.launch, (), None)
    try:
        own = ["--seed", str(seed)]
        train = (*commands[sweep.command].words(flags), *own)
        words = None if convert is None else (*commands[CONVERT].words(convert), *own)
        run = Run(variant, point, seed, sweep.command, sweep.launch, train, words)
        here = Path("RUN")
        if (conversion := run.conversion(here)) is not None:
            commands[CONVERT].check(conversion[1:])
        commands[sweep.command].check(run.training(here)[1:])
    except ValueError as error:
        where = f"{run.contestant!r}: " if run.contestant else ""
        raise ValueError(f"{where}{error}") from None
    return run


def _folder_name(contestant: str) -> str:
    return re.sub(r"[^a-z0-9.=_-]+", "-", contestant.lower()).strip("-.") or "run"
