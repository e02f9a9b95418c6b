"""Reads sweep files, plans one run per variant and seed, and checks the command lines of all runs in advance."""

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

from ..files import read_file

CONVERT_KEY, MODEL = "convert", "model_name_or_path"
SWEEP_KEYS = ("title", "command", "launch", "seeds", "metrics", "flags", CONVERT_KEY, "variants", "references", "grid")
VARIABLE = re.compile(r"\$\{(\w+)\}")
# Training flags. "convert" maps to the flags of the preceding conversion, or to None if there is no conversion.
Flags = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The parsed content of a sweep file.

    Attributes:
        title: the title of the table and the plot.
        command: the training command.
        launch: the words that precede the training command, such as `accelerate launch`.
        seeds: the seeds with which each variant is trained.
        metrics: the metrics in the table and the plot. If empty, the command's default metrics are used.
        base: the flags that all runs share.
        variants: maps the name of each variant to its additional flags.
        references: variants that are not combined with the grid, in the same format as `variants`.
        grid: maps each axis to its values, and each value to the flags that it sets.
    """

    title: str
    command: str
    launch: list[str]
    seeds: list[Any]
    metrics: list[str]
    base: Flags
    variants: dict[str, Flags]
    references: dict[str, Flags]
    grid: dict[str, dict[Any, Flags]]


def read_sweep(path: Path, overrides: Mapping[str, str], commands: Collection[str]) -> Sweep:
    """Read a sweep file in YAML or JSON.

    Args:
        path: the file.
        overrides: variable values that take precedence over those in the file.
        commands: the names of the training commands.

    Raises:
        ValueError: if the content is not valid.
        OSError: if the file cannot be read.
    """
    try:
        content = _load_yaml(read_file(path))
        variables = _merge_variables(content.pop("variables", None), overrides)
        return _parse_sweep(_substitute_variables(content, variables), commands, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def merge_flags(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> Flags:
    """Return `base` updated with `overrides`. Nested dictionaries are merged key by key. Other values are replaced."""
    merged = dict(base)
    for name, value in overrides.items():
        lower_value = merged.get(name)
        if name == CONVERT_KEY and value is None and lower_value:
            merged[MODEL] = lower_value.get(MODEL)  # without a conversion, train the unconverted model
        merged[name] = {**lower_value, **value} if isinstance(lower_value, dict) and isinstance(value, dict) else value
    return merged


def _load_yaml(text: bytes) -> dict[str, Any]:
    """Parse YAML text into a dictionary. Unlike PyYAML, raise an error if a key occurs twice in the same mapping."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if repeated := [name for name in names if names.count(name) > 1]:
                line = node.start_mark.line + 1
                raise ValueError(f"`{repeated[0]}` must not occur more than once in the object at line {line}.")
            return super().construct_mapping(node, deep)

    try:
        return _check_mapping(yaml.load(text, Loader), "The file")
    except yaml.YAMLError as error:
        raise ValueError(f"The file must be valid YAML: {' '.join(str(error).split())}.") from None


def _merge_variables(stored: Any, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables from the file, updated with the values from --set."""
    known = _check_mapping(stored, "`variables`")
    if unknown := [name for name in overrides if name not in known]:
        raise ValueError(f"--set must name variables from the file ({', '.join(known)}), got {unknown[0]}.")
    values = known | {name: _parse_scalar(text) for name, text in overrides.items()}
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"The variable `{missing[0]}` has no value. Set it with --set {missing[0]}=VALUE.")
    return values


def _substitute_variables(value: Any, variables: Mapping[str, Any]) -> Any:
    """Replace each `${NAME}` in a value with the value of that variable, including in nested lists and dictionaries.

    If a text consists of a single `${NAME}`, the result is the variable's value, which is not converted to text.
    """
    if isinstance(value, dict):
        return {key: _substitute_variables(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute_variables(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    if unknown := [name for name in VARIABLE.findall(value) if name not in variables]:
        raise ValueError(
            f"{value!r} uses the variable `{unknown[0]}`, which is not defined under `variables`. Add it."
        )
    full_match = VARIABLE.fullmatch(value)
    return variables[full_match[1]] if full_match else VARIABLE.sub(lambda match: str(variables[match[1]]), value)


def _parse_sweep(content: dict[str, Any], commands: Collection[str], name: str) -> Sweep:
    if unknown := [str(key) for key in content if key not in SWEEP_KEYS]:
        keys = f"variables, {', '.join(SWEEP_KEYS)}"
        raise ValueError(f"Unknown key `{unknown[0]}`. The valid keys are {keys}. Put flags under `flags`.")
    title, command = str(content.get("title", name.replace("_", " "))), str(content.get("command"))
    if command not in commands:
        raise ValueError(f"`command` must be one of {', '.join(commands)}, got {command}.")
    launch, metrics = ([str(word) for word in _as_list(content.get(key))] for key in ("launch", "metrics"))
    variants, references = (_parse_named_flags(content.get(key), f"`{key}`") for key in ("variants", "references"))
    axes = _check_mapping(content.get("grid"), "`grid`")
    grid = {str(axis): _parse_axis(str(axis), values) for axis, values in axes.items()}
    seeds, base = _as_list(content.get("seeds", 0)), _check_mapping(content.get("flags"), "`flags`")
    if not seeds or not (variants or grid):
        raise ValueError("The file must contain `variants` or a `grid`, and `seeds` must not be empty.")
    base |= {CONVERT_KEY: content[CONVERT_KEY]} if CONVERT_KEY in content else {}
    return Sweep(title, command, launch, seeds, metrics, base, variants or {"": {}}, references, grid)


def _parse_axis(axis: str, values: Any) -> dict[Any, Flags]:
    """Return a dictionary from each value of a grid axis to the flags that it sets.

    If the values are a list, each value is assigned to the flag that has the name of the axis.
    """
    if isinstance(values, dict):
        named_flags = _parse_named_flags(values, f"`{axis}` in `grid`")
        return {_parse_scalar(value): flags for value, flags in named_flags.items()}
    points = [_parse_scalar(value) for value in _as_list(values)]
    if not points or any(isinstance(point, list | dict | None) or points.count(point) > 1 for point in points):
        raise ValueError(f"`{axis}` in `grid` must be a list of distinct values or a mapping, got {values}.")
    flag = axis.removeprefix(f"{CONVERT_KEY}.")
    return {point: {flag: point} if flag == axis else {CONVERT_KEY: {flag: point}} for point in points}


def _parse_named_flags(value: Any, location: str) -> dict[str, Flags]:
    items = _check_mapping(value, location).items()
    return {str(name): _check_mapping(flags, f"{location}, `{name}`") for name, flags in items}


def _check_mapping(value: Any, location: str) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{location} must be a mapping with entries of the form `NAME: VALUE`, got {value!r}.")
    return value or {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _parse_scalar(value: Any) -> Any:
    """Parse text as a number or a boolean if possible, because YAML reads 1e-3 as text. Return other values as is."""
    try:
        return number if isinstance(number := json.loads(value), int | float) else value
    except (TypeError, ValueError):
        return value


# The subfolders of a run that contain the converted checkpoint and the training output.
CONVERTED, TRAINED = "converted", "trained"
# Flags that only the sweep sets.
RESERVED_FLAGS = ("output_dir", "seed", "overwrite_output_dir", "resume_from_checkpoint")


@dataclass(frozen=True)
class SweepRun:
    """One training run with a single seed, optionally preceded by a conversion.

    Attributes:
        contestant: the name shared by the runs with different seeds.
        variant: the name of the variant. Empty if the file only has a grid.
        point: maps each grid axis to the value used in this run. Empty for a reference.
        seed: the seed for both commands.
        launch: the words that precede the training command.
        train: the words of the training command, without the output folder.
        convert: the words of the conversion command without the output folder, or None if there is no conversion.
    """

    contestant: str
    variant: str
    point: dict[str, Any]
    seed: int
    launch: list[str]
    train: list[str]
    convert: list[str] | None

    @property
    def name(self) -> str:
        """The name of the run, which consists of the contestant and the seed."""
        return f"{self.contestant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The path of the run, relative to the sweep folder."""
        name = re.sub(r"[^a-z0-9.=_-]+", "-", self.contestant.lower()).strip("-.") or "run"
        return Path("runs") / name / f"seed-{self.seed}"

    def build_commands(self, folder: Path) -> list[list[str]]:
        """Return the command lines of the run: the conversion, if there is one, followed by training."""
        command, *flags = self.train
        output = ["--output_dir", str(folder / TRAINED)]
        if self.convert is None:
            return [[command, *flags, *output]]
        converted = str(folder / CONVERTED)
        return [[*self.convert, "--output_dir", converted], [command, f"--{MODEL}", converted, *flags, *output]]


def plan_runs(sweep: Sweep, get_command_module: Callable[[str], ModuleType]) -> list[SweepRun]:
    """Plan the runs of a sweep.

    The runs are ordered by seed, so that all variants can be compared before the sweep is finished.

    Args:
        sweep: the content of the sweep file.
        get_command_module: a function that returns the module of a command, with `make_parser` and `parse_args`.

    Raises:
        ValueError: if a command does not accept its flags, or if two runs would use the same folder.
    """
    runs: dict[Path, SweepRun] = {}
    for seed, (variant, point, flags, convert) in itertools.product(sweep.seeds, [*_iterate_contestants(sweep)]):
        parts = [variant] * bool(variant) + [f"{get_axis_name(axis)} {value}" for axis, value in point.items()]
        contestant = ", ".join(parts)
        try:
            if convert is not None and flags.get(MODEL) is not None:
                raise ValueError(
                    f"`{MODEL}` must be set under `{CONVERT_KEY}` because the sweep trains the converted model."
                )
            train = _build_command(sweep.command, flags, seed, get_command_module)
            words = None if convert is None else _build_command(CONVERT_KEY, convert, seed, get_command_module)
            run = SweepRun(contestant, variant, point, seed, sweep.launch, train, words)
            for line in run.build_commands(Path("RUN")):
                _check_command_line(line, get_command_module(line[0]))
        except ValueError as error:
            raise ValueError(f"{contestant!r}: {error}") from None
        if runs.setdefault(run.folder, run) is not run:
            raise ValueError(
                f"{runs[run.folder].name!r} and {run.name!r} would use the same folder {run.folder}. Rename one of "
                "them."
            )
    return list(runs.values())


def get_axis_name(axis: str) -> str:
    """Return the display name of a grid axis, which is the axis name without the "convert." prefix."""
    return axis.removeprefix(f"{CONVERT_KEY}.")


def _iterate_contestants(sweep: Sweep) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]]:
    """Yield each combination of a variant and a grid point, followed by each reference.

    Yields:
        The variant's name, the grid point, the training flags, and the conversion flags. The conversion flags are None
        if there is no conversion.
    """
    points = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    for parts, multipliers in ((sweep.variants, points), (sweep.references, [{}])):
        for (variant, flags), point in itertools.product(parts.items(), multipliers):
            axis_flags = (sweep.grid[axis][value] for axis, value in point.items())
            merged = functools.reduce(merge_flags, (flags, *axis_flags), sweep.base)
            convert = merged.pop(CONVERT_KEY, None)
            yield variant, point, merged, convert


def _build_command(
    command: str, flags: dict[str, Any], seed: int, get_command_module: Callable[[str], ModuleType]
) -> list[str]:
    """Return the command line as a list of words, without the flags whose value is None."""
    options, words = get_command_module(command).make_parser()._option_string_actions, [command]
    for name, value in flags.items():
        if name in RESERVED_FLAGS:
            raise ValueError(f"`{name}` must not be set because the sweep sets it. Remove it.")
        is_switch = f"--{name}" in options and options[f"--{name}"].nargs == 0
        if value is not None and is_switch != isinstance(value, bool):
            text_rule = "text or a number (in quotes if YAML would parse it as another type)"
            rule = "true or false" if is_switch else text_rule
            raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
        if isinstance(value, bool):
            words += [f"--{name}"] if value else [f"--no-{name}"] * (f"--no-{name}" in options)
        elif isinstance(value, list):
            words += [f"--{name}", *(path for item in value for path in _expand_paths(name, item))]
        elif value is not None:
            paths = _expand_paths(name, value)
            words += [f"--{name}={paths[0]}"] if paths[0].startswith("-") else [f"--{name}", *paths]
    return [*words, "--seed", str(seed)]


def _expand_paths(name: str, value: Any) -> list[str]:
    """Return a flag's value as text. For a flag that ends in `_file`, expand file patterns as a shell does."""
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return (name.endswith("_file") and sorted(glob.glob(os.path.expanduser(text)))) or [text]


def _check_command_line(line: list[str], module: ModuleType) -> None:
    """Raise `ValueError` if the command's parser rejects the command line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            module.parse_args(line[1:])
    except SystemExit:
        message = printed.getvalue().rpartition("error: ")[2].splitlines()[0]
        raise ValueError(f"attn-variants {line[0]}: {message}") from None
