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

from .files import CARD_NAME, HISTORY_NAME, REPORT_NAME, RESULTS_NAME, atomic_write, load_json

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
# The fields of these files that model cards show, besides the scores and arguments of a training.
FIELDS = {
    "conversion": """source source_revision method seed dtype architecture heads talking_heads parameters
    kv_cache_bytes_per_token calibration quality versions seconds""".split(),
    "training": """steps train_samples epoch train_runtime dataset task_name problem_type labels text_columns
    objective seed date versions""".split(),
}
SCORES = ("eval_", "initial_eval_", "test_")
METADATA = ("license", "license_name", "license_link", "base_model", "tags", "language")
# They belong together: a README.md with a license of its own replaces all three.
TERMS = METADATA[:3]


@dataclass
class ModelHistory:
    """How a model was made.

    Args:
        steps: the first one first; each has "kind", "conversion" or "training", and `FIELDS` of its report.
        metadata: of the original model's README.md: license, languages, base model, tags.
        problems: sentences about files, or parts of them, that could not be read.
        has_all_terms: whether the README.md, if there is one, could be read.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    has_all_terms: bool = True


def read_history(folder: Path, with_training: bool = True) -> ModelHistory:
    """Read the history of the model in a folder; what cannot be read is left out and named in `problems`.

    Args:
        folder: of the model. A report of a step that model_history.json has already is not a further step.
        with_training: whether all_results.json is a step; it is not if its run is resumed.
    """
    history = ModelHistory()
    found = _read_or_note(folder / HISTORY_NAME, history.problems)
    earlier = found.get("steps", [])
    for number, step in enumerate(earlier if isinstance(earlier, list) else [None], 1):
        kind = step.get("kind") if isinstance(step, dict) else None
        if kind in (*STEP_FILES,):
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
        history.has_all_terms, own = False, {}
    if "license" in own:
        history.metadata = {name: value for name, value in history.metadata.items() if name not in TERMS}
    history.metadata |= own
    return history


def source_history(model_name_or_path: str | os.PathLike | None, is_resumed: bool = False) -> ModelHistory:
    """Return the history of the checkpoint that a run starts from; an error becomes one of its `problems`.

    Args:
        model_name_or_path: a folder, or a Hub id, of which only the files with a history are downloaded; None: the
            model is new.
        is_resumed: whether a run in this very folder is resumed, whose results may be there.
    """
    if model_name_or_path is None:
        return ModelHistory()
    folder = Path(model_name_or_path).expanduser()
    if folder.is_dir():
        return read_history(folder, with_training=not is_resumed)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    found, missing = ModelHistory(), list[str]()
    for name in (CARD_NAME, HISTORY_NAME, *STEP_FILES.values()):
        try:
            # Once the Hub could not be reached, each further try would take as long as that one.
            path = hf_hub_download(str(model_name_or_path), name, local_files_only=bool(missing))
            found = read_history(Path(path).parent)
        except Exception as error:  # of the Hub, the connection or the disk: each has errors of its own
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                missing.append(name)
    if missing:
        found.problems.append(f"{', '.join(missing)} of {model_name_or_path} could not be had from the Hub.")
    return found


def write_history(folder: Path, history: ModelHistory) -> None:
    """Write model_history.json, whole or not at all; nothing where there is nothing to tell.

    Raises:
        OSError: if it cannot be written; what was there stays.
    """
    if history.steps or history.metadata:
        content = {"format": FORMAT, "steps": history.steps, "metadata": history.metadata}
        atomic_write(folder / HISTORY_NAME, json.dumps(content, indent=2) + "\n")


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
    """Return the fields of a report that model cards show."""
    found = {name: _one_line(report[name]) for name in FIELDS[kind] if report.get(name) is not None}
    if kind == "training":
        found |= {name: value for name, value in report.items() if name.startswith(SCORES) and _is_number(value)}
        arguments = report.get("arguments")
        arguments = arguments if isinstance(arguments, dict) else {}
        found["arguments"] = {name: _one_line(value) for name, value in arguments.items() if value is not None}
    elif "source" in found and "source_revision" not in found:
        found["source"] = PurePath(str(found["source"])).name  # a folder of some machine
    return {"kind": kind, **found}


def _metadata(given: Any) -> dict[str, Any]:
    """Return the metadata of a README.md that hold for a model made from its model, if they are of the Hub's types."""
    given = given if isinstance(given, dict) else {}
    found = {name: _names(given[name]) for name in METADATA if name in given}
    return {name: value for name, value in found.items() if value is not None}


def _names(value: Any) -> str | list[str] | None:
    """Return a text, or a list of texts; None for anything else. YAML reads the language "no" as False."""
    if isinstance(value, list):
        names = ["no" if each is False else _one_line(each) for each in value]
        return names if all(isinstance(each, str) for each in names) else None
    return "no" if value is False else _one_line(value) if isinstance(value, str) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_line(value: Any) -> Any:
    return " ".join(value.split()) if isinstance(value, str) else value
