"""What the folder of a checkpoint must be before anything of it is read: asked by every command, here alone."""

import json
import os
import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from ...files import CARD_NAME, INDEX_NAME, PICKLE_INDEX_NAME, PICKLE_WEIGHTS_NAME, WEIGHTS_NAME, load_json
from ...model_folder import ADAPTER_FILES, unfinished_swap

__all__ = ["check_files", "check_no_adapter", "check_no_pickle", "check_whole_model", "why_not_read"]

# What transformers, peft and this package read of a folder by its name.
LOADED = (
    "*.json",
    "*.safetensors",
    "*.bin",
    "*.model",
    "*.spm",
    "*.py",
    "*.jinja",
    "vocab.*",
    "merges.txt",
    CARD_NAME,
)
# What an adapter is trained for, as peft writes it, and the class of its base.
TASK_CLASSES = {
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
WEIGHTS = (WEIGHTS_NAME, INDEX_NAME, PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME)


def why_not_read(path: Path, folder: Path) -> str | None:
    """Say why a file or folder in a checkpoint's folder is not read; None where it is.

    Links are read within the folder, and into the Hub's cache, which is made of them.
    """
    target, home = path.resolve(), folder.resolve()
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    is_blob = snapshots is not None and target.is_relative_to(snapshots.parent / "blobs")
    is_blob |= "blobs" in target.parts and target.is_relative_to(Path(HF_HUB_CACHE).resolve())
    if not is_blob and not target.is_relative_to(home):
        return f"a link that leads out of the folder, to {target}"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "neither a file nor a folder"
    return None


def check_files(folder: Path) -> None:
    """Check the files of a folder that loaders read by their names.

    Raises:
        OSError: if one is a link out of the folder or to nothing, or a pipe or a device; or if a run was killed while
            it wrote the folder.
    """
    if advice := unfinished_swap(folder):
        raise FileNotFoundError(f"{folder} holds no whole model: {advice}")
    for path in sorted(folder.iterdir()):
        if not any(fnmatchcase(path.name, pattern) for pattern in LOADED):
            continue
        if not path.exists():
            raise FileNotFoundError(f"{path} is a link to a file that is not there: mend or remove it.")
        if reason := why_not_read(path, folder):
            raise OSError(f"{path} is {reason}, which is not read: put a copy of the file in its place.")


def check_whole_model(folder: Path, allow_pickle: bool = False) -> None:
    """Check that a folder holds a model by itself: no adapter, and weights that are no pickle unless these may be.

    Raises:
        ValueError: if it does not; what of it is missing is said by whoever reads it.
    """
    files = os.listdir(folder)
    check_no_adapter(str(folder), files, folder)
    if not allow_pickle:
        check_no_pickle(str(folder), files)


def check_no_adapter(name: str, files: list[str], folder: Path | None = None) -> None:
    """Raise ValueError if among the files of a checkpoint, in `folder` if they are here, is an adapter of peft."""
    adapter_files = sorted(file for file in files if any(fnmatchcase(file, pattern) for pattern in ADAPTER_FILES))
    if not adapter_files:
        return
    kind, beside = "an adapter alone, and no model", ""
    if {*WEIGHTS} & {*files}:
        kind = "an adapter beside whole weights"
        beside = f"; without {' and '.join(adapter_files)} the folder is the model alone"
    base, model_class = _adapted(folder) if folder is not None else ("BASE", "AutoModel")
    package = "hf_attn_variants" if model_class.startswith("AttnVariant") else "transformers"
    quoted, merged = (json.dumps(each) for each in (name, f"{name.rstrip('/')}-merged"))
    code = (
        f"from {package} import {model_class} as M; from peft import PeftModel as P; "
        f'P.from_pretrained(M.from_pretrained("{base}"), {quoted}).merge_and_unload().save_pretrained({merged})'
    )
    raise ValueError(
        f"{name} holds {kind} ({', '.join(adapter_files)}), made for {base}: merge it first, by `python -c "
        f"{shlex.quote(code)}`{beside}."
    )


def check_no_pickle(name: str, files: list[str]) -> None:
    """Raise ValueError if the weights among the files of a checkpoint are pickles alone."""
    weights = [file for file in WEIGHTS if file in files]
    if weights and weights[0] in (PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME):
        raise ValueError(
            f"{name}: {weights[0]} is a pickle, which can run code when loaded; use a safetensors copy, or "
            "allow_pickle=True (--allow_pickle of `attn-variants convert`, which makes such a copy) to read its "
            "tensors with weights_only=True."
        )


def _adapted(folder: Path) -> tuple[str, str]:
    """Return the base of an adapter and its class; placeholders for what is not said, or is no plain name."""
    try:
        values = load_json(folder / "adapter_config.json")
    except (OSError, ValueError):
        values = None
    values = values if isinstance(values, dict) else {}
    base, mapping = values.get("base_model_name_or_path"), values.get("auto_mapping")
    model_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    model_class = model_class or TASK_CLASSES.get(str(values.get("task_type")))  # peft says one of the two
    return (
        base if isinstance(base, str) and re.fullmatch(r"[\w./~ -]+", base) else "BASE",
        model_class if isinstance(model_class, str) and re.fullmatch(r"\w+", model_class, re.ASCII) else "AutoModel",
    )
