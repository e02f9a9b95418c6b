"""The file of a sweep: its keys, with the variables filled in."""

import json
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..open_files import read_file

__all__ = ["CONVERT", "MODEL", "Sweep", "merge_flags", "read_sweep"]

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
