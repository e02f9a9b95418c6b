"""The file of a sweep and its runs: each variant with each seed, as command lines that were checked."""

import contextlib
import functools
import glob
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..input_files import read_file

__all__ = [
    "CONVERT",
    "CONVERTED",
    "MODEL",
    "TRAINED",
    "Run",
    "Sweep",
    "axis_name",
    "merge_flags",
    "plan_runs",
    "read_sweep",
]

CONVERT, MODEL = "convert", "model_name_or_path"
KEYS = ("title", "command", "launch", "seeds", "metrics", "flags", CONVERT, "variants", "references", "grid")
VARIABLE = re.compile(r"\$\{(\w+)\}")
Flags = dict[str, Any]  # of a training; "convert" has the flags of the conversion before it, None without one


@dataclass(frozen=True)
class Sweep:
    """The content of a file."""

    title: str  # of the table and the plot
    command: str  # the training command
    launch: list[str]  # the words before the training command, such as those of `accelerate launch`
    seeds: list[Any]  # of the runs of each variant
    metrics: list[str]  # in the table and the plot; empty for the defaults of the command
    base: Flags  # of all runs
    variants: dict[str, Flags]  # further flags by name
    references: dict[str, Flags]  # variants that the grid does not multiply
    grid: dict[str, dict[Any, Flags]]  # for each axis, its values with the flags that they stand for


def read_sweep(path: Path, given: Mapping[str, str], commands: Collection[str]) -> Sweep:
    """Read the YAML file of a sweep (JSON is YAML, too).

    Args:
        path: the file.
        given: values of variables that replace those of the file.
        commands: the training commands.

    Raises:
        ValueError, OSError: if it is not the file of a sweep, or cannot be read.
    """
    try:
        content = _load_yaml(read_file(path))
        variables = _variables(content.pop("variables", None), given)
        return _sweep(_fill(content, variables), commands, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def merge_flags(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Flags:
    """Return flags with others on top of them: objects are merged field by field, other values are replaced."""
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        if name == CONVERT and value is None and below:
            merged[MODEL] = below.get(MODEL)  # the model is trained as it is
        merged[name] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _load_yaml(text: bytes) -> dict[str, Any]:
    """Load YAML, and raise an error for a key that an object has twice: yaml itself takes the last one silently."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"`{twice[0]}` is twice in the object at line {node.start_mark.line + 1}.")
            return super().construct_mapping(node, deep)

    try:
        return _object(yaml.load(text, Loader), "the file")
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _variables(stored: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables of the file with the values that replace theirs."""
    known = _object(stored, "`variables`")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--set must name variables of the file, {', '.join(known)}; got {unknown[0]}.")
    values = known | {name: _number_or_text(text) for name, text in given.items()}
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"the variable `{missing[0]}` needs a value: --set {missing[0]}=VALUE.")
    return values


def _fill(value: Any, variables: Mapping[str, Any]) -> Any:
    """Return a value with those of `${NAME}` filled in; a text of only one variable takes its type, too."""
    if isinstance(value, dict):
        return {key: _fill(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, variables) for inner in value]
    if not isinstance(value, str):
        return value
    if unknown := [name for name in VARIABLE.findall(value) if name not in variables]:
        raise ValueError(f"`variables` must have {unknown[0]}, because the file has {value}.")
    whole = VARIABLE.fullmatch(value)
    return variables[whole[1]] if whole else VARIABLE.sub(lambda match: str(variables[match[1]]), value)


def _sweep(content: dict[str, Any], commands: Collection[str], name: str) -> Sweep:
    if unknown := [str(key) for key in content if key not in KEYS]:
        raise ValueError(
            f"the keys must be variables, {', '.join(KEYS)}; got {unknown[0]}. Flags belong under `flags`."
        )
    title, command = str(content.get("title", name.replace("_", " "))), str(content.get("command"))
    if command not in commands:
        raise ValueError(f"`command` must be one of {', '.join(commands)}, got {command}.")
    launch, metrics = ([str(each) for each in _list(content.get(key))] for key in ("launch", "metrics"))
    variants, references = (_parts(content.get(key), f"`{key}`") for key in ("variants", "references"))
    grid = {str(axis): _axis(str(axis), values) for axis, values in _object(content.get("grid"), "`grid`").items()}
    seeds, base = _list(content.get("seeds", 0)), _object(content.get("flags"), "`flags`")
    if not seeds or not (variants or grid):
        raise ValueError("a sweep needs `variants` or a `grid`, and at least one of `seeds`.")
    base |= {CONVERT: content[CONVERT]} if CONVERT in content else {}
    return Sweep(title, command, launch, seeds, metrics, base, variants or {"": {}}, references, grid)


def _axis(axis: str, values: Any) -> dict[Any, Flags]:
    """Return the values of an axis of the grid with their flags: of the flag with this name, or of an object."""
    if isinstance(values, dict):
        return {_number_or_text(value): flags for value, flags in _parts(values, f"`grid`, `{axis}`").items()}
    points = [_number_or_text(value) for value in _list(values)]
    if not points or any(isinstance(point, list | dict | None) or points.count(point) > 1 for point in points):
        raise ValueError(f"`grid`, `{axis}` must be a list of different values or an object, got {values}.")
    flag = axis.removeprefix(f"{CONVERT}.")
    return {point: {flag: point} if flag == axis else {CONVERT: {flag: point}} for point in points}


def _parts(value: Any, where: str) -> dict[str, Flags]:
    return {str(name): _object(flags, f"{where}, `{name}`") for name, flags in _object(value, where).items()}


def _object(value: Any, where: str) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{where} must be an object with lines `NAME: VALUE`, got {value!r}.")
    return value or {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _number_or_text(value: Any) -> Any:
    """Return the number or the truth value that a text is, or the text; YAML takes 1e-3 for text."""
    try:
        return found if isinstance(found := json.loads(value), int | float) else value
    except (TypeError, ValueError):
        return value


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
