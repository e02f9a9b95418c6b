"""Replacement of the model in a folder by a new one.

After a kill at any moment, the folder contains the old model, the new model, or a config.json that no class can load.
Without a config.json, a class would load the weights with default settings. Therefore config.json contains a notice
while files are moved. Until the replacement is complete, hidden folders contain the files that must still be moved.
"""

import os
import shlex
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from .files import (
    BEST_MODEL_FILE,
    CARD_NAME,
    CONFIG_NAME,
    HISTORY_NAME,
    INDEX_NAME,
    PICKLE_INDEX_NAME,
    PICTURES,
    PLACEHOLDER_PREFIX,
    REPORT_NAME,
    RESULTS_NAME,
    SENTENCE_MODULES_NAME,
    WEIGHTS_NAME,
    atomic_write,
    is_generated_card,
    is_placeholder_config,
)

__all__ = ["ADAPTER_FILES", "RESULTS", "STAGE", "replace_model", "unfinished_model_advice"]

# Hidden folders: for writing the new model, for the complete new model, for the old model, and for files to delete.
STAGE, NEW, OLD, GONE = ".tmp-model", ".new-model", ".old-model", ".tmp-replaced-model"
PARTIAL = ".*.partial-*"  # the names of the folders of `files.staged_folder`
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin", PICKLE_INDEX_NAME)
WEIGHT_FILE_PATTERNS = (WEIGHTS_NAME, "model-*-of-*.safetensors", INDEX_NAME, *PICKLES, *ADAPTER_FILES)
_VOCABULARIES = ("tokenizer.*", "tokenizer_config.json", "vocab.*", "merges.txt", "*.spm", "*piece*.model")
TOKENIZER_PATTERNS = (*_VOCABULARIES, "special_tokens_map.json", "added_tokens.json")
OTHER_PATTERNS = ("generation_config.json", "*processor_config.json", "chat_template*", "*sentence_*.json")
# Files that describe one set of weights, and files that would change the model of the new weights.
RESULTS = (RESULTS_NAME, *PICTURES, *(f"predictions_*.{end}" for end in ("tsv", "json", "jsonl", "txt")))
WEIGHTS_PATTERNS = (*WEIGHT_FILE_PATTERNS, *RESULTS)
MODEL_PATTERNS = (CARD_NAME, SENTENCE_MODULES_NAME, HISTORY_NAME, REPORT_NAME, *TOKENIZER_PATTERNS, *OTHER_PATTERNS)
# A tokenizer can be loaded without a model. Therefore its settings are removed first and added last.
ENDS = ("tokenizer.json", "tokenizer_config.json")
# The content of config.json while a model is replaced.
NOTICE = PLACEHOLDER_PREFIX + (
    b"a run was killed while it replaced the one here. Move the files in .old-model/ (if it does not exist, "
    b"in .new-model/) up into this folder, or repeat the run with --overwrite_output_dir.\n"
)


def replace_model(stage: Path, folder: Path, is_continuation: bool) -> None:
    """Replace the model in a folder by the model in `stage`, a hidden folder inside it.

    Args:
        stage: `folder / STAGE` with a complete model.
        folder: the folder of the old and the new model.
        is_continuation: whether the new model was made from the old one, or by the same run. In this case, files that
            do not belong to the weights are kept unless the new model has a file with the same name.

    Raises:
        OSError: if a file cannot be moved. The message says how to complete or undo the replacement.
    """
    new, old, config = folder / NEW, folder / OLD, folder / CONFIG_NAME
    # Without a model in the folder, a README.md may describe something else.
    was_model = any(path.exists() for path in (config, new, old))
    try:
        _discard(new)  # it may be left from a killed run
        os.replace(stage, new)
        names = {path.name for path in new.iterdir()} - {CONFIG_NAME}
        patterns = (*WEIGHTS_PATTERNS, *(() if is_continuation or not was_model else MODEL_PATTERNS))
        removed = {path.name for path in folder.iterdir() if any(fnmatchcase(path.name, glob) for glob in patterns)}
        if is_generated_card(folder / CARD_NAME):  # it describes the old weights
            removed.add(CARD_NAME)
        replaced = {name for name in names if (folder / name).exists()} | removed - {BEST_MODEL_FILE, CONFIG_NAME}
        old.mkdir(exist_ok=True)
        if config.exists() and not is_placeholder_config(config):
            atomic_write(old / CONFIG_NAME, config.read_bytes())
            atomic_write(config, NOTICE)
        for name in reversed(_sort_names(replaced)):
            _move(folder / name, old / name)
        os.replace(old, _remove(folder / GONE))  # from here on, only the new model can be restored
        for name in _sort_names(names):
            _move(new / name, folder / name)
        os.replace(new / CONFIG_NAME, config)
        new.rmdir()
        shutil.rmtree(folder / GONE, ignore_errors=True)
    except OSError as error:
        advice = unfinished_model_advice(folder)
        if advice is None:  # no file was moved
            for path in (new, old):
                shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            f"The new model could not replace the old one in {folder} ({type(error).__name__}: {error}). "
            f"{advice or 'The old model is unchanged.'}"
        ) from error


def unfinished_model_advice(folder: Path) -> str | None:
    """Return how to repair a folder in which a killed run did not finish writing or replacing a model, or None."""
    is_notice = is_placeholder_config(folder / CONFIG_NAME)
    if (folder / CONFIG_NAME).exists() and not is_notice:
        return None
    moves = {OLD: "restores the old model", NEW: "completes the replacement"}
    for name, what in moves.items():
        if (folder / name / CONFIG_NAME).is_file():
            quoted = shlex.quote(str(folder))
            return (
                f"A run was killed while it replaced the model there. `mv {quoted}/{name}/* {quoted}/` {what}. "
                "Alternatively, repeat the run with --overwrite_output_dir."
            )
    if is_notice or (folder / STAGE).is_dir() or any(path.is_dir() for path in folder.glob(PARTIAL)):
        return (
            "The command that wrote it was killed before the model was complete. Repeat it (a training with "
            "--resume_from_checkpoint latest or --overwrite_output_dir, other commands into an empty folder)."
        )
    return None


def _sort_names(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (ENDS.index(name) + 1 if name in ENDS else 0, name))


def _move(path: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)  # left from a killed run
    os.replace(path, target)


def _discard(path: Path) -> None:
    # The folder is renamed before it is deleted, because a partly deleted one would contain neither model.
    if path.is_dir():
        os.replace(path, _remove(path.with_name(GONE)))
        shutil.rmtree(path.with_name(GONE))


def _remove(path: Path) -> Path:
    """Remove a folder if it exists, and return its path."""
    shutil.rmtree(path, ignore_errors=True)
    return path
