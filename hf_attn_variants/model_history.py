"""How a model was made, step by step, from its folder: conversions, trainings, and the terms of what it came from.

conversion_report.json and all_results.json tell of the last conversion and training. What is made of a folder takes
its steps and the metadata of its README.md along in model_history.json, so that the last model's card can tell all.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from .files import CARD_NAME, HISTORY_NAME, REPORT_NAME, RESULTS_NAME, load_json

__all__ = [
    "ModelHistory",
    "read_front_matter",
    "read_history",
    "read_json",
    "source_history",
    "write_history",
]

# What each step's own file is called; where a folder has both, the conversion came first.
STEP_FILES = {"conversion": REPORT_NAME, "training": RESULTS_NAME}
FORMAT = 1

ANY = "*"
NUMBER = (int, float)
SCALAR = (str, int, float)
# Files of other versions and of other hands are read too: a field that is not of the type given here is left out. A
# dict under ANY has values of one type, a list of two items is a pair, a list of one item has any length, a tuple says
# what is possible.
NONE = type(None)
COUNT = (int, NONE)
COUNTS = (*COUNT, [COUNT])  # of all layers, or one each
CONVERSION_FIELDS: dict[str, Any] = {
    "source": str,
    "source_revision": str,
    "method": str,
    "seed": int,
    "dtype": str,
    "architecture": str,
    "heads": {ANY: [COUNTS, COUNTS]},
    "talking_heads": {ANY: list},
    "parameters": {"before": int, "after": int},
    "kv_cache_bytes_per_token": {ANY: {"before": int, "after": int}},
    # Versions before 0.2 wrote neither the share that is cut nor an interval.
    "calibration": {"count": int, "kind": str, "targets": bool, "max_length": int, "cut_share": (*NUMBER, NONE)},
    "quality": {"measure": str, "value": NUMBER, "bound": NUMBER, "examples": int}
    | {"is_kept": bool, "alike": bool, "unknown": bool, "is_rare": (bool, NONE), "interval": (NONE, [NUMBER, NUMBER])},
    "versions": {ANY: str},
    "seconds": NUMBER,
}
TRAINING_FIELDS: dict[str, Any] = {
    "steps": int,
    "train_samples": int,
    "epoch": NUMBER,
    "train_runtime": NUMBER,
    "dataset": {"dataset_type": str, "dataset_name": str, "dataset_config": str},
    "task_name": str,
    "problem_type": str,
    "labels": [str],
    "text_columns": [str],
    "objective": str,
    "seed": int,
    "date": str,
    "versions": {ANY: str},
}
SCORES = ("eval_", "initial_eval_", "test_")
NAMES = ("model_name_or_path", "teacher", "task_name", "dataset_name", "objective")
METADATA_FIELDS: dict[str, Any] = {
    "license": (str, list),
    "license_name": str,
    "license_link": str,
    "base_model": (str, list),
    "tags": [str],
}
# They belong together: a README.md with a licence of its own replaces all three.
TERMS = ("license", "license_name", "license_link")


@dataclass
class ModelHistory:
    """How a model was made.

    Args:
        steps: the first one first; each has "kind": "conversion" (then the fields of conversion_report.json that a
            card tells) or "training" (those of all_results.json).
        metadata: of the README.md of what it was made from: licence, languages, base model, tags.
        problems: files, or parts of them, that could not be read, in sentences.
        has_all_terms: whether the README.md, if there is one, could be read.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    has_all_terms: bool = True


def read_history(folder: Path, with_training: bool = True) -> ModelHistory:
    """Read the history of the model in a folder; what cannot be read is left out and named in `problems`.

    Args:
        folder: of the model. A report of a step that model_history.json tells already is no further step.
        with_training: whether all_results.json tells of a step; not where its run is to go on.
    """
    history = ModelHistory()
    found = _read_or_note(folder / HISTORY_NAME, history.problems)
    earlier = found.get("steps", [])
    for number, step in enumerate(earlier if isinstance(earlier, list) else [None], 1):
        kind = step.get("kind") if isinstance(step, dict) else None
        if kind in STEP_FILES:
            history.steps.append(_step(kind, step))
        else:
            history.problems.append(f"{folder / HISTORY_NAME}: step {number} is of no kind that this version knows.")
    for kind, name in STEP_FILES.items():
        if kind == "training" and not with_training:
            continue
        report = _read_or_note(folder / name, history.problems)
        if report and (step := _step(kind, report)) not in history.steps:
            history.steps.append(step)
    history.metadata = _metadata(found.get("metadata"))
    try:
        own = _metadata(read_front_matter(folder / CARD_NAME))
    except ValueError as error:
        history.problems.append(str(error))
        history.has_all_terms = False
        return history
    if "license" in own:
        history.metadata = {name: value for name, value in history.metadata.items() if name not in TERMS}
    history.metadata |= own
    return history


def source_history(model_name_or_path: str | os.PathLike | None, is_resumed: bool = False) -> ModelHistory:
    """Return the history of a checkpoint that something is to be made of.

    Args:
        model_name_or_path: a folder, or a Hub id, of which only the files that tell are downloaded; None: there is
            none, the model is new.
        is_resumed: whether a run in this very folder goes on, whose results may lie there.

    Returns:
        Its history; `problems` says what of it could not be had. No error: a model is trained without it as well.
    """
    if model_name_or_path is None:
        return ModelHistory()
    folder = Path(model_name_or_path).expanduser()
    if folder.is_dir():
        return read_history(folder, with_training=not is_resumed)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    found: list[Path] = []
    missing: list[str] = []
    for name in (CARD_NAME, HISTORY_NAME, *STEP_FILES.values()):
        try:
            # Once the Hub could not be reached, each further try would take as long as that one.
            local = bool(missing)
            found.append(Path(hf_hub_download(str(model_name_or_path), name, local_files_only=local)))
        except Exception as error:  # of the Hub, the connection or the disk: each has errors of its own
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                missing.append(name)
    history = read_history(found[0].parent) if found else ModelHistory()
    if missing:
        history.problems.append(f"{', '.join(missing)} of {model_name_or_path} could not be had from the Hub.")
    return history


def write_history(folder: Path, history: ModelHistory) -> None:
    """Write model_history.json, whole or not at all; nothing where there is nothing to tell.

    Raises:
        OSError: if it cannot be written; what was there stays.
    """
    if history.steps or history.metadata:
        content = {"format": FORMAT, "steps": history.steps, "metadata": history.metadata}
        temporary = folder / f".tmp-{HISTORY_NAME}"
        try:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, folder / HISTORY_NAME)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None where there is no file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds something else.
    """
    if not path.is_file():
        return None
    value = load_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(value).__name__}.")
    return value


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the metadata at the head of a README.md; none where there is no file.

    Raises:
        ValueError: if it cannot be read.
    """
    if not path.is_file():
        return {}
    import yaml
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, AttributeError, OSError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} has metadata that cannot be read: {' '.join(str(error).split())}") from error


def _read_or_note(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json(path) or {}
    except (ValueError, OSError) as error:
        problems.append(str(error))
        return {}


def _step(kind: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a card needs of a report, with the types that it counts on."""
    if kind == "training":
        found = _typed(report, TRAINING_FIELDS)
        found |= {name: value for name, value in report.items() if name.startswith(SCORES) and _fits(value, NUMBER)}
        return {"kind": kind, **found, "arguments": _arguments(report.get("arguments"))}
    found = _typed(report, CONVERSION_FIELDS)
    if "source" in found and "source_revision" not in found:
        found["source"] = PurePath(found["source"]).name  # a folder of some machine
    return {"kind": kind, **found}


def _arguments(given: Any) -> dict[str, Any]:
    found = {}
    for name, value in given.items() if isinstance(given, dict) else ():
        if _fits(value, str if name in NAMES else (*SCALAR, bool)):
            found[name] = _one_line(value)
        elif name not in NAMES and _fits(value, [SCALAR]):
            found[name] = [_one_line(each) for each in value]
    return found


def _metadata(given: Any) -> dict[str, Any]:
    found = _typed(given, METADATA_FIELDS) if isinstance(given, dict) else {}
    if isinstance(given, dict) and "language" in given:
        codes = given["language"]
        found["language"] = [_language(each) for each in codes] if isinstance(codes, list) else _language(codes)
    return {name: value for name, value in found.items() if _fits(value, str) or _fits(value, [str])}


def _language(code: Any) -> Any:
    return "no" if code is False else code  # what YAML makes of Norwegian's


def _typed(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _one_line(values[name]) for name, shape in fields.items() if _fits(values.get(name), shape)}


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if ANY in shape:
            return all(_fits(each, shape[ANY]) for each in value.values())
        return all(_fits(value.get(name), each) for name, each in shape.items())
    if isinstance(shape, list):
        pair = len(shape) == 2
        return isinstance(value, list) and (not pair or len(value) == 2) and all(_fits(v, shape[0]) for v in value)
    if isinstance(shape, tuple) and any(isinstance(each, list) for each in shape):
        return any(_fits(value, each) for each in shape)
    if isinstance(value, bool):
        return shape is bool or (isinstance(shape, tuple) and bool in shape)
    return isinstance(value, shape)


def _one_line(value: Any) -> Any:
    # A line break inside a table or a list of a card would end it.
    return " ".join(value.split()) if isinstance(value, str) else value
