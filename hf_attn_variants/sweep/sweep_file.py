"""The file of a sweep: what its keys say, its variables filled in, and what is wrong with it."""

import json
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..command_line import nearest_name
from ..files import parse_json
from ..open_files import read_file

__all__ = ["CONVERT", "Part", "Sweep", "did_you_mean", "read_sweep"]

KEYS = (
    *("title", "command", "launch", "seeds", "metrics", "variables"),
    *("flags", "convert", "variants", "references", "grid"),
)
CONVERT = "convert"
MOST_BYTES = 2**20
VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Part:
    """What one part of the file (all runs, a variant, a point of the grid) gives its runs.

    Attributes:
        flags: of the training.
        convert: flags of the conversion before it.
        converts: whether there is one; None where the part does not say.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    convert: dict[str, Any] = field(default_factory=dict)
    converts: bool | None = None

    def then(self, other: "Part") -> "Part":
        """Return this part with another on top of it: its values win, and objects are merged field by field."""
        converts = self.converts if other.converts is None else other.converts
        return Part(_merged(self.flags, other.flags), _merged(self.convert, other.convert), converts)


@dataclass(frozen=True)
class Sweep:
    """What a file asks for.

    Attributes:
        title: of the table and the plot.
        command: the training, a subcommand of `attn-variants`.
        launch: the words that start it on several processes; empty: none.
        seeds: of each variant's runs.
        metrics: results in the table and the plot; empty: the command's own.
        base: what all runs have.
        variants: by name; each is multiplied by the grid.
        references: the same, but not multiplied by the grid.
        grid: the values of each axis, with what they give a run.
        variables: as they were filled in.
    """

    title: str
    command: str
    launch: tuple[str, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    base: Part
    variants: dict[str, Part]
    references: dict[str, Part]
    grid: dict[str, dict[Any, Part]]
    variables: dict[str, Any]


def read_sweep(path: Path, given: Mapping[str, str], commands: Collection[str]) -> Sweep:
    """Read the file of a sweep.

    Args:
        path: YAML (.yaml, .yml) or JSON (.json).
        given: values of its variables that replace those in the file.
        commands: the training commands there are.

    Raises:
        OSError: if it cannot be read.
        ValueError: if something is wrong with it; the message says where.
    """
    content = _read(path)
    try:
        return _sweep(content, given, commands, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or all of a few."""
    if (near := nearest_name(name, map(str, known))) is not None:
        return f"did you mean `{near}`?"
    return f"there are {', '.join(f'`{each}`' for each in known)}" if len(known) <= 12 else "see the command's --help"


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path}: a sweep is a .yaml, .yml or .json file")
    text = read_file(path, MOST_BYTES)
    try:
        content = parse_json(text, object_pairs_hook=_once) if path.suffix == ".json" else _load_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object with the keys {', '.join(KEYS)}")
    return content


def _load_yaml(text: bytes) -> Any:
    """Load YAML whose keys stand once; yaml's own loader takes the last of two without a word."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines and key.tag != "tag:yaml.org,2002:merge":
                    raise ValueError(f"`{name}` stands twice in one object, in lines {lines[name]} and {line}")
                lines[name] = line
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_about_yaml(error, text)}") from None


def _about_yaml(error: Any, text: bytes) -> str:
    """Return where a text is no YAML, and what mends the common mistakes."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    lines = text.decode(errors="replace").splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    hint = ""
    if "\t" in line:
        hint = ": this line has a tab, and YAML is indented by spaces"
    elif problem.startswith("expected <block end>"):
        hint = ": this line is not indented as those that belong with it"
    elif "':'" in problem:
        hint = ": the line above has no `NAME: VALUE`"
    elif re.search(r"[\[{].*\$\{", line):
        hint = """: within [ ] and { } a text with ${...} needs quotes, as in ["${DATA}/train.txt"]"""
    elif re.search(r"[\[{*&!%@`]", line):
        hint = ": a text that begins with one of * & ! % @ `, or has [ ] { } in it, needs quotes"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"`{twice[0]}` stands twice in one object")
    return dict(pairs)


def _sweep(content: dict[str, Any], given: Mapping[str, str], commands: Collection[str], name: str) -> Sweep:
    if unknown := [key for key in content if key not in KEYS]:
        hint = "" if nearest_name(str(unknown[0]), KEYS) else "; a flag belongs under `flags`"
        raise ValueError(f"unknown key `{unknown[0]}`: {did_you_mean(str(unknown[0]), KEYS)}{hint}")
    variables = _variables(content.pop("variables", None), given)
    content = _filled(content, variables)
    command: Any = content.get("command")
    if command not in commands:
        said = "give `command`, a training" if command is None else f"`command` {command!r} is no training"
        raise ValueError(f"{said}: {did_you_mean(str(command), commands)}")
    variants, references = (_parts(content.get(key), f"`{key}`") for key in ("variants", "references"))
    grid = {str(axis): _axis(str(axis), values) for axis, values in _object(content.get("grid"), "`grid`").items()}
    if not variants and not grid:
        raise ValueError("give `variants`, or a `grid` of values: there is nothing to compare")
    if twice := [each for each in references if each in variants]:
        raise ValueError(f"{twice[0]!r} is both in `variants` and in `references`")
    if references and not grid:
        raise ValueError("`references` are what the grid does not multiply: without a `grid`, put them in `variants`")
    flags = dict(_object(content.get("flags"), "`flags`"))
    if CONVERT in content:
        flags[CONVERT] = content[CONVERT]
    return Sweep(
        title=_text(content.get("title", name.replace("_", " ")), "`title`"),
        command=command,
        launch=_texts(content.get("launch"), "`launch`"),
        seeds=_seeds(content.get("seeds", [0])),
        metrics=_texts(content.get("metrics"), "`metrics`"),
        base=_part(flags, "`flags`"),
        variants=variants or {"": Part()},
        references=references,
        grid=grid,
        variables=variables,
    )


def _variables(stored: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables with their values: those of the file, and in their place those that are given.

    Raises:
        ValueError: for one that the file does not have, or that has no value.
    """
    known = _object(stored, "`variables`")
    for name in given:
        if name not in known:
            there = did_you_mean(name, known) if known else "the file has no `variables`"
            raise ValueError(f"--set {name}: no such variable; {there}")
    values = {str(name): _scalar(given[name]) if name in given else value for name, value in known.items()}
    for name, value in values.items():
        if not VARIABLE.fullmatch(f"${{{name}}}"):
            raise ValueError(f"`variables`: {name!r} is no name (letters, digits and _)")
        if value is None:
            raise ValueError(f"`{name}` has no value: give one, as in --set {name}=VALUE")
        if isinstance(value, list | dict):
            raise ValueError(f"`variables`: the value of `{name}` must be text or a number, got {value!r}")
        if isinstance(value, str):
            values[name] = str(Path(value).expanduser()) if value.startswith("~") else value
    return values


def _scalar(text: str) -> Any:
    """Return a number or a truth value where a text is one, else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _filled(content: dict[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with the values of `${NAME}` in its texts; a text that is one alone becomes the value.

    Raises:
        ValueError: for a name that is no variable, and for a variable that stands nowhere.
    """
    used = set()

    def value_of(match: re.Match) -> Any:
        if match[1] not in variables:
            raise ValueError(f"`{match[0]}`: `variables` has no {match[1]}; {did_you_mean(match[1], variables)}")
        used.add(match[1])
        return variables[match[1]]

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        if not isinstance(value, str):
            return value
        whole = VARIABLE.fullmatch(value)
        return value_of(whole) if whole else VARIABLE.sub(lambda match: str(value_of(match)), value)

    result = {key: filled(value) for key, value in content.items()}
    if idle := [name for name in variables if name not in used]:
        raise ValueError(f"the variable `{idle[0]}` stands nowhere in the file: write it as ${{{idle[0]}}}")
    return result


def _parts(value: Any, where: str) -> dict[str, Part]:
    return {_name(name, where): _part(part, f"{where}, {name!r}") for name, part in _object(value, where).items()}


def _part(value: Any, where: str) -> Part:
    flags = dict(_object(value, where))
    for name in flags:
        _name(name, where)
    if CONVERT not in flags:
        return Part(flags)
    convert = flags.pop(CONVERT)
    if convert is None:
        return Part(flags, converts=False)
    return Part(flags, _object(convert, f"{where}, `{CONVERT}`"), converts=True)


def _axis(axis: str, values: Any) -> dict[Any, Part]:
    """Return the points of an axis: values of the flag that it is called, or what each of its names gives."""
    where = f"`grid`, `{axis}`"
    if isinstance(values, dict) and values:
        return {_point(point): _part(part, f"{where}, {point!r}") for point, part in values.items()}
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where} must be a list of values, or an object of names with flags; got {values!r}")
    points = {}
    for value in values:
        if value is None or isinstance(value, list | dict):
            raise ValueError(f"{where}: a value must be text, a number, true or false; got {value!r}")
        if _point(value) in points:
            raise ValueError(f"{where} has {value!r} twice")
        flag = axis.removeprefix(f"{CONVERT}.")
        points[_point(value)] = Part({flag: value}) if flag == axis else Part(convert={flag: value}, converts=True)
    return points


def _point(value: Any) -> Any:
    """Return a value as a place on its axis: a number where a text is one (YAML takes 1e-3 for text)."""
    return _scalar(value) if isinstance(value, str) else value


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else [] if value is None else [value]
    if not seeds:
        raise ValueError("`seeds` is empty: give one seed or more, or leave it out (it is then [0])")
    if not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"`seeds` must be whole numbers of at least 0, got {value!r}")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds` must be different, got {value!r}")
    return tuple(seeds)


def _merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _object(value: Any, where: str) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, NAME: VALUE in a line each, got {value!r}")
    return value or {}


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {value!r} is no name: put it in quotes")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, got {value!r}")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, str | int | float) for each in values):
        raise ValueError(f"{where} must be a list of texts, got {value!r}")
    return tuple(map(str, values))
