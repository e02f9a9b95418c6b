"""A model put in the place of an earlier one: a kill leaves the old one, the new one, or a folder that is refused.

On the way config.json is a line of text that no loader takes: without the file, a class loads weights with its own
defaults. What was moved, or is to be, lies in a hidden folder from which it can be moved back, or on.
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
    NO_MODEL,
    PICKLE_INDEX_NAME,
    PICTURES,
    REPORT_NAME,
    RESULTS_NAME,
    SENTENCE_MODULES_NAME,
    WEIGHTS_NAME,
    atomic_write,
    is_generated_card,
    is_no_model,
)

__all__ = ["ADAPTER_FILES", "RESULTS", "STAGE", "replace_model", "unfinished_swap"]

# Where a model is written, where it lies when it is whole, where the old one goes, and what is to be deleted.
STAGE, NEW, OLD, GONE = ".tmp-model", ".new-model", ".old-model", ".tmp-replaced-model"
PARTIAL = ".*.partial-*"  # of `files.staged_folder`
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin", PICKLE_INDEX_NAME)
WEIGHT_FILES = (WEIGHTS_NAME, "model-*-of-*.safetensors", INDEX_NAME, *PICKLES, *ADAPTER_FILES)
_VOCABULARIES = ("tokenizer.*", "tokenizer_config.json", "vocab.*", "merges.txt", "*.spm", "*piece*.model")
TOKENIZER_FILES = (*_VOCABULARIES, "special_tokens_map.json", "added_tokens.json")
OTHER_FILES = ("generation_config.json", "*processor_config.json", "chat_template*", "*sentence_*.json")
# What is true of a set of weights alone, and what would make another model of the new weights.
RESULTS = (RESULTS_NAME, *PICTURES, *(f"predictions_*.{end}" for end in ("tsv", "json", "jsonl", "txt")))
OF_WEIGHTS = (*WEIGHT_FILES, *RESULTS)
OF_MODEL = (CARD_NAME, SENTENCE_MODULES_NAME, HISTORY_NAME, REPORT_NAME, *TOKENIZER_FILES, *OTHER_FILES)
# A tokenizer loads by itself: its settings leave first and come last.
ENDS = ("tokenizer.json", "tokenizer_config.json")
# In the place of config.json while a model is replaced.
NOTICE = NO_MODEL + (
    b"a run was killed while it replaced the one here. Move what is in .old-model/, or where that "
    b"is not there in .new-model/, up into this folder; or repeat the run with --overwrite_output_dir.\n"
)


def replace_model(stage: Path, folder: Path, goes_on: bool) -> None:
    """Move the model that `stage`, a hidden folder in `folder`, holds into `folder`, in the place of an earlier one.

    Args:
        stage: `folder / STAGE`, whole.
        folder: where the model is to lie.
        goes_on: whether the new model was made of the one there, or by the same run: what lies beside its weights
            stays, where the new one has nothing in its place.

    Raises:
        OSError: if a file cannot be moved; the message says what is where.
    """
    new, old, config = folder / NEW, folder / OLD, folder / CONFIG_NAME
    # Without a model beside it, a README.md may be of anything.
    was_model = any(path.exists() for path in (config, new, old))
    try:
        _discard(new)  # of an earlier kill
        os.replace(stage, new)
        names = {path.name for path in new.iterdir()} - {CONFIG_NAME}
        patterns = (*OF_WEIGHTS, *(() if goes_on or not was_model else OF_MODEL))
        found = {path.name for path in folder.iterdir() if any(fnmatchcase(path.name, each) for each in patterns)}
        if is_generated_card(folder / CARD_NAME):  # it tells of the weights that go
            found.add(CARD_NAME)
        replaced = {name for name in names if (folder / name).exists()} | found - {BEST_MODEL_FILE, CONFIG_NAME}
        old.mkdir(exist_ok=True)
        if config.exists() and not is_no_model(config):
            atomic_write(old / CONFIG_NAME, config.read_bytes())
            atomic_write(config, NOTICE)
        for name in reversed(_in_order(replaced)):
            _move(folder / name, old / name)
        os.replace(old, _emptied(folder / GONE))  # from here on the new one is the one to finish
        for name in _in_order(names):
            _move(new / name, folder / name)
        os.replace(new / CONFIG_NAME, config)
        new.rmdir()
        shutil.rmtree(folder / GONE, ignore_errors=True)
    except OSError as error:
        advice = unfinished_swap(folder)
        if advice is None:  # nothing was moved yet
            for path in (new, old):
                shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            f"could not put the new model in its place in {folder} ({type(error).__name__}: {error}); "
            f"{advice or 'the old one stays.'}"
        ) from error


def unfinished_swap(folder: Path) -> str | None:
    """Return what to do about a folder whose model was being replaced, or written, by a run that was killed."""
    is_notice = is_no_model(folder / CONFIG_NAME)
    if (folder / CONFIG_NAME).exists() and not is_notice:
        return None
    moves = {OLD: "brings the old one back", NEW: "finishes that"}
    for name, what in moves.items():
        if (folder / name / CONFIG_NAME).is_file():
            at = shlex.quote(str(folder))
            return (
                f"a run was killed while it replaced the model there: `mv {at}/{name}/* {at}/` {what}; or repeat the "
                "run with --overwrite_output_dir."
            )
    if is_notice or (folder / STAGE).is_dir() or any(path.is_dir() for path in folder.glob(PARTIAL)):
        return (
            "the command that wrote it was killed before the model was whole: repeat it (a training with "
            "--resume_from_checkpoint latest or --overwrite_output_dir, others into an empty folder)."
        )
    return None


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (ENDS.index(name) + 1 if name in ENDS else 0, name))


def _move(path: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)  # of an earlier kill
    os.replace(path, target)


def _discard(path: Path) -> None:
    # Renamed first: one half deleted is neither model.
    if path.is_dir():
        os.replace(path, _emptied(path.with_name(GONE)))
        shutil.rmtree(path.with_name(GONE))


def _emptied(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    return path
