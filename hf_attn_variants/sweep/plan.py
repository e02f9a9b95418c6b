"""The runs of a sweep: each variant at each point of the grid with each seed, as command lines that were checked."""

import contextlib
import functools
import glob
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .sweep_file import CONVERT, MODEL, Sweep, merge_flags

__all__ = ["CONVERTED", "TRAINED", "Run", "axis_name", "plan_runs"]

# The folders of a run: the converted checkpoint, and the output of the training.
CONVERTED, TRAINED = "converted", "trained"
OWN_FLAGS = ("output_dir", "seed", "overwrite_output_dir", "resume_from_checkpoint")  # the sweep sets them


@dataclass(frozen=True)
class Run:
    """One training, with the conversion before it if there is one; the words do not name the folders."""

    contestant: str  # the name that the runs of all seeds share
    variant: str  # the name of the variant; "" if the file has only a grid
    point: dict[str, Any]  # the value on each axis of the grid; empty for a reference
    seed: int  # of both commands
    launch: list[str]  # the words before the training
    train: list[str]
    convert: list[str] | None

    @property
    def name(self) -> str:
        """The contestant and the seed."""
        return f"{self.contestant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run in the folder of the sweep."""
        name = re.sub(r"[^a-z0-9.=_-]+", "-", self.contestant.lower()).strip("-.") or "run"
        return Path("runs") / name / f"seed-{self.seed}"

    def commands(self, folder: Path) -> list[list[str]]:
        """Return the command lines of the run in a folder: the training, and before it the conversion if any."""
        command, *flags = self.train
        output = ["--output_dir", str(folder / TRAINED)]
        if self.convert is None:
            return [[command, *flags, *output]]
        converted = str(folder / CONVERTED)
        return [[*self.convert, "--output_dir", converted], [command, f"--{MODEL}", converted, *flags, *output]]


def plan_runs(sweep: Sweep, command_module: Callable[[str], ModuleType]) -> list[Run]:
    """Return the runs of a sweep by seed, so that an unfinished sweep compares all variants.

    Args:
        sweep: the file.
        command_module: returns the module of a command, with `make_parser` and `parse_args`.

    Raises:
        ValueError: if the parser of a command does not take its flags, or two runs would share a folder.
    """
    runs: dict[Path, Run] = {}
    for seed, (variant, point, flags, convert) in itertools.product(sweep.seeds, [*_contestants(sweep)]):
        contestant = ", ".join([variant] * bool(variant) + [f"{axis_name(a)} {value}" for a, value in point.items()])
        try:
            if convert is not None and flags.get(MODEL) is not None:
                raise ValueError(f"`{MODEL}` must be under `{CONVERT}`, because the converted model is trained.")
            train = _words(sweep.command, flags, seed, command_module)
            words = None if convert is None else _words(CONVERT, convert, seed, command_module)
            run = Run(contestant, variant, point, seed, sweep.launch, train, words)
            for line in run.commands(Path("RUN")):
                _check(line, command_module(line[0]))
        except ValueError as error:
            raise ValueError(f"{contestant!r}: {error}") from None
        if runs.setdefault(run.folder, run) is not run:
            raise ValueError(f"{runs[run.folder].name!r} and {run.name!r} would share the folder {run.folder}.")
    return list(runs.values())


def axis_name(axis: str) -> str:
    """Return the name of an axis of the grid: its flag, without the command."""
    return axis.removeprefix(f"{CONVERT}.")


def _contestants(sweep: Sweep) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]]:
    """Yield variant, point, flags and conversion of each variant at each point of the grid, and of each reference."""
    points = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    for parts, multipliers in ((sweep.variants, points), (sweep.references, [{}])):
        for (variant, flags), point in itertools.product(parts.items(), multipliers):
            on_axes = (sweep.grid[axis][value] for axis, value in point.items())
            merged = functools.reduce(merge_flags, (flags, *on_axes), sweep.base)
            convert = merged.pop(CONVERT, None)
            yield variant, point, merged, convert


def _words(command: str, flags: dict[str, Any], seed: int, command_module: Callable[[str], ModuleType]) -> list[str]:
    """Return a command with its flags as words; flags with the value None are left out."""
    options, words = command_module(command).make_parser()._option_string_actions, [command]
    for name, value in flags.items():
        if name in OWN_FLAGS:
            raise ValueError(f"`{name}` is set by the sweep. Leave it out.")
        is_switch = f"--{name}" in options and options[f"--{name}"].nargs == 0
        if value is not None and is_switch != isinstance(value, bool):
            rule = "true or false" if is_switch else "text or a number, in quotes if YAML takes it for something else"
            raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
        if isinstance(value, bool):
            words += [f"--{name}"] if value else [f"--no-{name}"] * (f"--no-{name}" in options)
        elif isinstance(value, list):
            words += [f"--{name}", *(path for each in value for path in _paths(name, each))]
        elif value is not None:
            found = _paths(name, value)
            words += [f"--{name}={found[0]}"] if found[0].startswith("-") else [f"--{name}", *found]
    return [*words, "--seed", str(seed)]


def _paths(name: str, value: Any) -> list[str]:
    """Return a value as text; for a pattern of files, the files that match it, as a shell does."""
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return (name.endswith("_file") and sorted(glob.glob(os.path.expanduser(text)))) or [text]


def _check(line: list[str], module: ModuleType) -> None:
    """Check a command line with the parser of its command."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            module.parse_args(line[1:])
    except SystemExit:
        message = printed.getvalue().rpartition("error: ")[2].splitlines()[0]
        raise ValueError(f"attn-variants {line[0]}: {message}") from None
