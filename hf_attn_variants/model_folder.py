"""Functions that replace the model in a folder safely, and that read and write the history of a model.

Even if the process is killed, the folder contains the old model, the new model, or a config.json that cannot be
loaded. Without config.json, a model class would load the weights with default settings. Therefore, config.json
contains a notice while files are moved. Until the replacement is complete, the files to move remain in hidden folders.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from .files import (
    BEST_MODEL_FILE,
    CARD_NAME,
    CONFIG_NAME,
    HISTORY_NAME,
    INDEX_NAME,
    PICKLE_INDEX_NAME,
    PLACEHOLDER_PREFIX,
    PLOT_FILES,
    REPORT_NAME,
    RESULTS_NAME,
    SENTENCE_MODULES_NAME,
    WEIGHTS_NAME,
    atomic_write,
    is_generated_card,
    is_placeholder_config,
    load_json,
)

# Hidden folders for the new model while it is written, the complete new model, the old model, and files to delete.
STAGE_FOLDER, NEW_FOLDER = ".tmp-model", ".new-model"
OLD_FOLDER, DISCARDED_FOLDER = ".old-model", ".tmp-replaced-model"
STAGED_FOLDER_PATTERN = ".*.partial-*"  # the temporary folders created by `files.staged_folder`
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*")
PICKLE_PATTERNS = ("pytorch_model.bin", "pytorch_model-*.bin", PICKLE_INDEX_NAME)
WEIGHT_FILE_PATTERNS = (WEIGHTS_NAME, "model-*-of-*.safetensors", INDEX_NAME, *PICKLE_PATTERNS, *ADAPTER_FILES)
_VOCABULARIES = ("tokenizer.*", "tokenizer_config.json", "vocab.*", "merges.txt", "*.spm", "*piece*.model")
TOKENIZER_PATTERNS = (*_VOCABULARIES, "special_tokens_map.json", "added_tokens.json")
OTHER_PATTERNS = ("generation_config.json", "*processor_config.json", "chat_template*", "*sentence_*.json")
# Files that describe only one set of weights, and files that would change how the new weights are used.
RESULT_PATTERNS = (RESULTS_NAME, *PLOT_FILES, *(f"predictions_*.{end}" for end in ("tsv", "json", "jsonl", "txt")))
WEIGHTS_PATTERNS = (*WEIGHT_FILE_PATTERNS, *RESULT_PATTERNS)
MODEL_PATTERNS = (CARD_NAME, SENTENCE_MODULES_NAME, HISTORY_NAME, REPORT_NAME, *TOKENIZER_PATTERNS, *OTHER_PATTERNS)
# A tokenizer can be loaded without a model. Therefore, its settings are removed first and added last.
MOVED_LAST = ("tokenizer.json", "tokenizer_config.json")
# The content of config.json while the model is being replaced.
REPLACEMENT_NOTICE = PLACEHOLDER_PREFIX + (
    b"a run was killed while it replaced the model in this folder. Move the files in .old-model/ "
    b"(if it does not exist, in .new-model/) up into this folder, or repeat the run with --overwrite_output_dir.\n"
)


def replace_model(stage: Path, folder: Path, is_continuation: bool) -> None:
    """Replace the model in a folder with the model in `stage`, a hidden folder inside it.

    Args:
        stage: `folder / STAGE_FOLDER`, which contains the complete new model.
        folder: the folder that contains the old model and will contain the new one.
        is_continuation: whether the new model was created from the old one or by the same run. In this case, files
            that do not belong to the weights are kept, unless the new model has a file with the same name.

    Raises:
        OSError: if a file cannot be moved. The message explains how to complete or undo the replacement.
    """
    new, old, config = folder / NEW_FOLDER, folder / OLD_FOLDER, folder / CONFIG_NAME
    # If the folder does not contain a model, its README.md may describe something else.
    had_model = any(path.exists() for path in (config, new, old))
    try:
        _discard_folder(new)  # a killed run may have left it
        os.replace(stage, new)
        names = {path.name for path in new.iterdir()} - {CONFIG_NAME}
        patterns = (*WEIGHTS_PATTERNS, *(() if is_continuation or not had_model else MODEL_PATTERNS))
        removed = {path.name for path in folder.iterdir() if any(fnmatchcase(path.name, glob) for glob in patterns)}
        if is_generated_card(folder / CARD_NAME):  # it describes the old weights
            removed.add(CARD_NAME)
        replaced = {name for name in names if (folder / name).exists()} | removed - {BEST_MODEL_FILE, CONFIG_NAME}
        old.mkdir(exist_ok=True)
        if config.exists() and not is_placeholder_config(config):
            atomic_write(old / CONFIG_NAME, config.read_bytes())
            atomic_write(config, REPLACEMENT_NOTICE)
        for name in reversed(_sort_by_move_order(replaced)):
            _move(folder / name, old / name)
        os.replace(old, _remove_folder(folder / DISCARDED_FOLDER))  # from here on, the old model cannot be restored
        for name in _sort_by_move_order(names):
            _move(new / name, folder / name)
        os.replace(new / CONFIG_NAME, config)
        new.rmdir()
        shutil.rmtree(folder / DISCARDED_FOLDER, ignore_errors=True)
    except OSError as error:
        advice = describe_unfinished_model(folder)
        if advice is None:  # no file was moved
            for path in (new, old):
                shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            f"Cannot replace the model in {folder} ({type(error).__name__}: {error}). "
            f"{advice or 'The old model is unchanged.'}"
        ) from error


def describe_unfinished_model(folder: Path) -> str | None:
    """Return instructions for repairing a folder that a killed run left incomplete, or None if it is complete."""
    is_notice = is_placeholder_config(folder / CONFIG_NAME)
    if (folder / CONFIG_NAME).exists() and not is_notice:
        return None
    for name, effect in ((OLD_FOLDER, "restores the old model"), (NEW_FOLDER, "completes the replacement")):
        if (folder / name / CONFIG_NAME).is_file():
            quoted = shlex.quote(str(folder))
            return (
                f"A run was killed while it replaced this model. `mv {quoted}/{name}/* {quoted}/` {effect}. "
                "Alternatively, repeat the run with --overwrite_output_dir."
            )
    stages = (folder / STAGE_FOLDER, *folder.glob(STAGED_FOLDER_PATTERN))
    if is_notice or any(path.is_dir() for path in stages):
        return (
            "The command was killed before the model was complete. Repeat a training command with "
            "--resume_from_checkpoint latest or --overwrite_output_dir, and any other command with an empty folder."
        )
    return None


def _sort_by_move_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (MOVED_LAST.index(name) + 1 if name in MOVED_LAST else 0, name))


def _move(path: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)  # left by a killed run
    os.replace(path, target)


def _discard_folder(path: Path) -> None:
    # The folder is renamed before it is deleted, because a partly deleted folder would contain neither model.
    if path.is_dir():
        os.replace(path, _remove_folder(path.with_name(DISCARDED_FOLDER)))
        shutil.rmtree(path.with_name(DISCARDED_FOLDER))


def _remove_folder(path: Path) -> Path:
    """Remove a folder if it exists, and return its path."""
    shutil.rmtree(path, ignore_errors=True)
    return path


# The file that each step writes. If a folder contains both files, the conversion was done first.
STEP_FILES = {"conversion": REPORT_NAME, "training": RESULTS_NAME}
HISTORY_FORMAT = 1
# The fields of these files that model cards show, in addition to training scores and arguments.
REPORT_FIELDS = {
    "conversion": """source source_revision method seed dtype architecture heads talking_heads parameters
    kv_cache_bytes_per_token calibration quality versions seconds""".split(),
    "training": """steps train_samples epoch train_runtime dataset task_name problem_type labels text_columns
    objective seed date versions""".split(),
}
SCORE_PREFIXES = ("eval_", "initial_eval_", "test_")
METADATA = ("license", "license_name", "license_link", "base_model", "tags", "language")
# These fields belong together, so a README.md with a license replaces all three.
LICENSE_FIELDS = METADATA[:3]


@dataclass
class ModelHistory:
    """The steps that created a model, and its metadata.

    Args:
        steps: the steps in chronological order. Each has a "kind" ("conversion" or "training") and the `REPORT_FIELDS`
            of its report.
        metadata: the license, languages, base model and tags from the README.md of the original model.
        problems: messages about files, or parts of files, that could not be read.
        has_readable_card: whether README.md could be read or does not exist.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    has_readable_card: bool = True


def read_history(folder: Path, with_training: bool = True) -> ModelHistory:
    """Return the history of the model in a folder. Files that cannot be read are listed in `problems`.

    Args:
        folder: the model folder. A report whose step is already in model_history.json is not counted twice.
        with_training: whether all_results.json counts as a step. Set it to False if training is resumed.

    Example:
        >>> [step["kind"] for step in read_history(Path("runs/stsb")).steps]
        ['conversion', 'training']
    """
    history = ModelHistory()
    stored = _read_json_or_record_problem(folder / HISTORY_NAME, history.problems)
    earlier_steps = stored.get("steps", [])
    for number, step in enumerate(earlier_steps if isinstance(earlier_steps, list) else [None], 1):
        kind = step.get("kind") if isinstance(step, dict) else None
        if kind in STEP_FILES:
            history.steps.append(_select_fields(kind, step))
        else:
            history.problems.append(f"{folder / HISTORY_NAME}: step {number} is of a kind unknown to this version.")
    for kind, name in STEP_FILES.items():
        if kind == "training" and not with_training:
            continue
        report = _read_json_or_record_problem(folder / name, history.problems)
        if report and (step := _select_fields(kind, report)) not in history.steps:
            history.steps.append(step)
    history.metadata = _select_metadata(stored.get("metadata"))
    try:
        front_matter = _select_metadata(read_front_matter(folder / CARD_NAME))
    except ValueError as error:
        history.problems.append(str(error))
        history.has_readable_card, front_matter = False, {}
    if "license" in front_matter:
        history.metadata = {name: value for name, value in history.metadata.items() if name not in LICENSE_FIELDS}
    history.metadata |= front_matter
    return history


def read_source_history(model_name_or_path: str | os.PathLike | None, is_resumed: bool = False) -> ModelHistory:
    """Return the history of the checkpoint that a run starts from. Errors are collected in `problems`.

    Args:
        model_name_or_path: a folder or Hub id. Only the files that contain the history are downloaded from the Hub.
            None means a new model.
        is_resumed: whether a run in this folder is resumed. In this case, results in the folder do not count as a
            step, because the run itself may have written them.
    """
    if model_name_or_path is None:
        return ModelHistory()
    folder = Path(model_name_or_path).expanduser()
    if folder.is_dir():
        return read_history(folder, with_training=not is_resumed)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    history, missing = ModelHistory(), list[str]()
    for name in (CARD_NAME, HISTORY_NAME, *STEP_FILES.values()):
        try:
            # After the first failure, only the cache is used, because each request could wait for a timeout.
            path = hf_hub_download(str(model_name_or_path), name, local_files_only=bool(missing))
            history = read_history(Path(path).parent)
        except Exception as error:  # the Hub client, the network and the disk raise many types of errors
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                missing.append(name)
    if missing:
        history.problems.append(f"Could not download {', '.join(missing)} of {model_name_or_path} from the Hub.")
    return history


def write_history(folder: Path, history: ModelHistory) -> None:
    """Write model_history.json atomically, unless the history is empty.

    Raises:
        OSError: if the file cannot be written. An existing file is left unchanged.
    """
    if history.steps or history.metadata:
        content = {"format": HISTORY_FORMAT, "steps": history.steps, "metadata": history.metadata}
        atomic_write(folder / HISTORY_NAME, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file does not exist.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file does not contain a JSON object.
    """
    if not path.is_file():
        return None
    value = load_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(value).__name__}.")
    return value


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the YAML metadata of a README.md, or an empty dictionary if the file does not exist.

    Raises:
        ValueError: if the metadata cannot be read.
    """
    if not path.is_file():
        return {}
    import yaml
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, AttributeError, OSError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"Cannot read the metadata of {path}: {' '.join(str(error).split())}.") from error


def _read_json_or_record_problem(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json(path) or {}
    except (ValueError, OSError) as error:
        problems.append(str(error))
        return {}


def _select_fields(kind: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a report that model cards show."""
    fields = {name: _join_lines(report[name]) for name in REPORT_FIELDS[kind] if report.get(name) is not None}
    if kind == "training":
        scores = {name: value for name, value in report.items() if name.startswith(SCORE_PREFIXES)}
        fields |= {name: value for name, value in scores.items() if type(value) in (int, float)}
        arguments = report.get("arguments")
        arguments = arguments if isinstance(arguments, dict) else {}
        fields["arguments"] = {name: _join_lines(value) for name, value in arguments.items() if value is not None}
    elif "source" in fields and "source_revision" not in fields:
        fields["source"] = PurePath(str(fields["source"])).name  # the path of a local folder may be private
    return {"kind": kind, **fields}


def _select_metadata(front_matter: Any) -> dict[str, Any]:
    """Return the metadata that also applies to models created from this model, without values of invalid types."""
    front_matter = front_matter if isinstance(front_matter, dict) else {}
    metadata = {name: _clean_metadata_value(front_matter[name]) for name in METADATA if name in front_matter}
    return {name: value for name, value in metadata.items() if value is not None}


def _clean_metadata_value(value: Any) -> str | list[str] | None:
    """Return a string or a list of strings, or None for other values. YAML parses the language "no" as False."""
    if isinstance(value, list):
        names = ["no" if item is False else _join_lines(item) for item in value]
        return names if all(isinstance(name, str) for name in names) else None
    return "no" if value is False else _join_lines(value) if isinstance(value, str) else None


def _join_lines(value: Any) -> Any:
    return " ".join(value.split()) if isinstance(value, str) else value
