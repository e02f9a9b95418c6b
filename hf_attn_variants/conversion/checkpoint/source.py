"""The folder of a checkpoint: checks before it is read, its configuration, and the files other than weights.

folder or Hub id ──► resolve_source ──► check_files          links out of the folder, pipes, unfinished runs
                           │            check_complete_model    adapters, pickled weights
                           ▼
                        folder ──► read_config               config.json
                              └──► list_side_files                files to copy, files to leave out
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from ...files import (
    CARD_NAME,
    CONFIG_NAME,
    HISTORY_NAME,
    INDEX_NAME,
    LOGS,
    PICKLE_INDEX_NAME,
    PICKLE_SUFFIXES,
    PICKLE_WEIGHTS_NAME,
    RESULT_FILES,
    SENTENCE_MODULES_NAME,
    TRACKER_FOLDERS,
    WEIGHTS_NAME,
    load_json,
)
from ...model_folder import ADAPTER_FILES, unfinished_model_advice

logger = logging.getLogger(__name__)

# Patterns of files that Transformers, peft and this package read by their names.
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
WEIGHTS = (WEIGHTS_NAME, INDEX_NAME, PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME)
SAFETENSORS_SUFFIX = ".safetensors"
# Weights in other formats have the original heads. Next to the converted weights, they would be a different model.
OTHER_WEIGHT_SUFFIXES = (".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".ggml", ".tflite", ".mlmodel")
OTHER_WEIGHT_FOLDERS = ("onnx", "openvino", "coreml", "tf", "flax")
# Part of the names of this package's classes, and the beginning of `auto_map` entries for model code.
CLASS_PREFIX, MODEL_AUTO_CLASSES = "AttnVariant", ("AutoConfig", "AutoModel")
IGNORED_FOLDERS = (".git", ".cache", "__pycache__")


def explain_unsafe_path(path: Path, folder: Path) -> str | None:
    """Return why a file or folder inside a checkpoint folder is not read, or None if it is.

    Links within the folder and into the cache of the Hub are read. Other links, pipes and devices are not.
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
        OSError: if a file is a link out of the folder, a broken link, a pipe or a device, or if a run was killed while
            it wrote the folder.
    """
    if advice := unfinished_model_advice(folder):
        raise FileNotFoundError(f"{folder} does not contain a complete model: {advice}")
    for path in sorted(folder.iterdir()):
        if not any(fnmatchcase(path.name, pattern) for pattern in LOADED):
            continue
        if not path.exists():
            raise FileNotFoundError(f"{path} is a broken link. Repair or remove it.")
        if reason := explain_unsafe_path(path, folder):
            raise OSError(f"{path} is {reason}, and is not read for safety. Replace it by a copy of the file.")


def check_complete_model(folder: Path, allow_pickle: bool = False) -> None:
    """Check that a folder contains a complete model: no adapter, and no pickled weights unless they are allowed.

    Raises:
        ValueError: if it does not. Missing files are not checked here.
    """
    files = os.listdir(folder)
    check_no_adapter(str(folder), files)
    if not allow_pickle:
        check_no_pickled_weights(str(folder), files)


def check_no_adapter(name: str, files: list[str]) -> None:
    """Check that a checkpoint is a complete model and not an adapter of peft.

    Args:
        name: Folder or Hub id of the checkpoint.
        files: Names of its files.

    Raises:
        ValueError: if an adapter is among the files.
    """
    adapter_files = sorted(file for file in files if any(fnmatchcase(file, pattern) for pattern in ADAPTER_FILES))
    if adapter_files:
        kind = "an adapter next to complete weights" if {*WEIGHTS} & {*files} else "only an adapter"
        raise ValueError(
            f"{name} must be a model without an adapter, got {kind} ({', '.join(adapter_files)}). Merge the adapter "
            "into its base model first (`merge_and_unload` of peft), or remove these files to use the model without."
        )


def check_no_pickled_weights(name: str, files: list[str]) -> None:
    """Check that a checkpoint has weights in other formats than pickle.

    Raises:
        ValueError: if it only has pickled weights.
    """
    weights = [file for file in WEIGHTS if file in files]
    if weights and weights[0] in (PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME):
        raise ValueError(
            f"{name}: {weights[0]} is a pickle, which can run code when it is loaded. Use a safetensors copy, or give "
            "allow_pickle=True (--allow_pickle of `attn-variants convert`, which makes such a copy) to read its "
            "tensors with weights_only=True."
        )


def find_local_folder(model_name_or_path: str | os.PathLike) -> Path | None:
    """Return the folder of a checkpoint, or None if it does not exist and the name can be a Hub id.

    Args:
        model_name_or_path: A folder, or an id such as "google-bert/bert-base-uncased".

    Raises:
        OSError: if the name is empty, a file, or a path that does not exist. A name is a path if it starts with ".",
            "/" or "~", ends with "/", or contains more than one "/". Also as for `check_files`.
    """
    name = os.fspath(model_name_or_path)
    if not name:
        raise FileNotFoundError("The name of the checkpoint must not be empty. Give a folder or a Hub id.")
    path = Path(name).expanduser()
    if path.is_dir():
        check_files(path)
        return path
    if path.exists():
        raise NotADirectoryError(f"{name!r} is a file. Give the folder of the checkpoint, {str(path.parent)!r}.")
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"There is no folder {name!r}, and it is not a Hub id. Check the path.")
    return None


def resolve_source(
    model_name_or_path: str | os.PathLike,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
    weights: bool = True,
) -> Path:
    """Return the folder of a checkpoint. If the name is a Hub id, the checkpoint is downloaded into the cache.

    Args:
        model_name_or_path: As for `find_local_folder`.
        revision: Branch, tag or commit on the Hub.
        token: Token of the Hub, for private and gated repositories.
        allow_pickle: Whether to download pytorch_model.bin if the repository has no safetensors file.
        weights: Whether the weights will be read. If not, pickled weights are not checked.

    Raises:
        OSError: if there is no such folder or repository, or the Hub cannot be reached.
        ValueError: if the checkpoint is an adapter, or its weights are pickles and these are not allowed.
    """
    name, folder = os.fspath(model_name_or_path), find_local_folder(model_name_or_path)
    if folder is not None and revision is not None:
        raise ValueError(f"`revision` must only be given for a Hub id, got the folder {name!r}. Leave it out.")
    if folder is None:
        return _download(name, revision, token, allow_pickle, weights)
    if weights:
        check_complete_model(folder, allow_pickle)
    return folder


def check_source(model_name_or_path: str | os.PathLike) -> None:
    """Check a checkpoint before Transformers loads it: a folder as in `resolve_source`, a repository by its file list.

    Raises:
        OSError: if there is no such folder.
        ValueError: if the checkpoint is an adapter, or its weights are pickles.
    """
    from huggingface_hub import HfApi

    name = os.fspath(model_name_or_path)
    folder, files = find_local_folder(name), None
    if folder is None:
        try:
            files = HfApi().list_repo_files(name)
        except Exception:  # the repository does not exist or cannot be reached: use a copy in the cache
            folder = find_cached_folder(name)
    if folder is not None:
        check_complete_model(folder)
    elif files is not None:
        check_no_adapter(name, files)
        check_no_pickled_weights(name, files)


def find_cached_folder(model_name_or_path: str | os.PathLike, revision: str | None = None) -> Path | None:
    """Return the folder of a checkpoint that was resolved before, without network access, or None if it is gone."""
    from huggingface_hub import snapshot_download

    name = os.fspath(model_name_or_path)
    try:
        return find_local_folder(name) or Path(snapshot_download(name, revision=revision, local_files_only=True))
    except OSError:
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint.

    Raises:
        OSError: if the file does not exist.
        ValueError: if it is not a JSON object with a `model_type`, or its `architectures` are not a list of names.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must contain {CONFIG_NAME}. Give the folder of a Transformers checkpoint.")
    config = load_json(path, "utf-8-sig")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} must contain `model_type`. Give the folder of a Transformers checkpoint.")
    architectures = config.get("architectures")
    is_list = isinstance(architectures, list | None)
    if not is_list or not all(isinstance(name, str) for name in architectures or ()):
        raise ValueError(f"{path}: `architectures` must be a list of class names, got {architectures!r}.")
    return config


def list_side_files(folder: Path, weight_files: list[str], allow_pickle: bool = False) -> tuple[list[str], list[str]]:
    """List the files of a checkpoint other than its weights and config.json.

    The tokenizer, the generation configuration, and the further modules of a sentence-transformers model with their
    safetensors weights are copied (pickled weights only if they are allowed). Other copies of the weights, training
    states and checkpoints, and results that describe the original model are left out.

    Args:
        folder: The checkpoint.
        weight_files: Files that the converter reads.
        allow_pickle: Whether to copy pickled weights of sentence-transformers modules.

    Returns:
        The sorted relative paths of files to copy, and of files to leave out. The path of a folder that is left out
        ends in "/".

    Raises:
        OSError: if a file to copy is a broken link, or a module is a link out of the folder. Other links out of the
            folder are left out with a warning.
    """
    modules = _list_module_folders(folder)
    # The history is read too, and a new one is written that includes the conversion.
    read = {CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, HISTORY_NAME, *weight_files}
    if not all(name.endswith(SAFETENSORS_SUFFIX) for name in weight_files):
        read.add(PICKLE_INDEX_NAME)
    copied: list[str] = []
    left_out: list[str] = []
    for directory, subfolders, files in os.walk(folder, followlinks=True):
        relative, here = Path(directory).relative_to(folder), Path(directory).resolve()
        # Links to a parent folder would lead to endless recursion.
        inside = [name for name in subfolders if not here.is_relative_to((here / name).resolve())]
        inside = sorted(name for name in inside if name not in IGNORED_FOLDERS)
        skipped = [name for name in inside if relative == Path(".") and _should_skip_folder(name)]
        skipped += [name for name in inside if name not in skipped and _is_unsafe(folder, relative / name, modules)]
        subfolders[:] = [name for name in inside if name not in skipped]
        left_out += [f"{(relative / name).as_posix()}/" for name in skipped]
        for file in files:
            path = (relative / file).as_posix()
            if path in read:
                continue
            is_result = relative == Path(".") and any(fnmatchcase(file, pattern) for pattern in RESULT_FILES)
            is_copied = not is_result and _should_copy_file(file, relative.as_posix() in modules, allow_pickle)
            if is_copied and not (folder / path).exists():
                raise FileNotFoundError(f"{folder / path} is a broken link. Repair or remove it.")
            is_copied = is_copied and not _is_unsafe(folder, relative / file, modules)
            (copied if is_copied else left_out).append(path)
    return sorted(copied), sorted(left_out)


def warn_about_remote_code(config: Mapping[str, Any]) -> None:
    """Warn about remote code of a model (`auto_map` in its config.json), because the conversion does not run it.

    The checkpoint is converted as the model of its `model_type`. Remote code of tokenizers and processors is not
    affected.
    """
    auto_map = config.get("auto_map") or {}
    classes = [str(auto_map[auto]) for auto in auto_map if auto.startswith(MODEL_AUTO_CLASSES)]
    if others := [name for name in classes if CLASS_PREFIX not in name]:
        message = "The remote code of the checkpoint (%s) is not run. It is converted as the %s model of Transformers."
        logger.warning(message, ", ".join(others), config.get("model_type"))


def copy_side_files(folder: Path, output: Path, files: list[str]) -> None:
    """Copy files by their relative paths from `list_side_files`. Links are copied as files."""
    for name in files:
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target)


def list_learned_tokens(tokenizer: Any) -> set[str]:
    """Return the tokens of a tokenizer that are not special or added; none if it was made without files."""
    return set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab()) - {"▁"}


def _is_unsafe(folder: Path, path: Path, modules: set[str]) -> bool:
    """Return whether a file or folder is left out for safety (see `explain_unsafe_path`).

    Raises:
        OSError: if it belongs to a module of a sentence-transformers model, which cannot be left out.
    """
    if (reason := explain_unsafe_path(folder / path, folder)) is None:
        return False
    if modules & {path.as_posix(), path.parent.as_posix()}:
        raise OSError(f"{folder / path} is {reason}, and is not read for safety. Replace it by a copy of the file.")
    logger.warning("%s is left out, because it is %s.", folder / path, reason)
    return True


def _should_copy_file(file: str, in_module: bool, allow_pickle: bool) -> bool:
    """Return whether a file is copied, judged by its name."""
    name = file.lower()
    # An adapter, even in a folder of its own, does not fit the new heads.
    if any(fnmatchcase(name, pattern) for pattern in (*ADAPTER_FILES, *LOGS)):
        return False
    if name.endswith((".index.json", *OTHER_WEIGHT_SUFFIXES)):
        return False
    if name.endswith(SAFETENSORS_SUFFIX):
        return in_module
    if name.endswith(PICKLE_SUFFIXES):
        return in_module and allow_pickle
    return True


def _should_skip_folder(name: str) -> bool:
    """Return whether a folder at the top level of a checkpoint is left out."""
    return name in (*OTHER_WEIGHT_FOLDERS, *TRACKER_FOLDERS) or name.startswith(("checkpoint-", "global_step"))


def _list_module_folders(folder: Path) -> set[str]:
    """Return the relative paths of the modules of a sentence-transformers model, except the model itself."""
    # The path of the model itself is "".
    try:
        modules = load_json(folder / SENTENCE_MODULES_NAME)
        return {Path(module["path"]).as_posix() for module in modules if module["path"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _download(name: str, revision: str | None, token: str | bool | None, allow_pickle: bool, weights: bool) -> Path:
    """Download a checkpoint into the cache. Arguments and errors as for `resolve_source`."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    arguments: dict[str, Any] = {"repo_id": name, "revision": revision, "token": token}
    with _convert_download_errors(name):
        try:
            files = HfApi().list_repo_files(**arguments)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # the Hub cannot be reached, or HF_HUB_OFFLINE is set: use a copy in the cache
            files = []
            folder = Path(snapshot_download(**arguments, local_files_only=True))
    if not files:
        if weights:
            check_complete_model(folder, allow_pickle)
        return folder
    if weights:
        check_no_adapter(name, files)
    if weights and not allow_pickle:
        _check_pickles(name, files)
    with _convert_download_errors(name):
        return Path(snapshot_download(allow_patterns=list(_select_files(files, allow_pickle)), **arguments))


@contextmanager
def _convert_download_errors(name: str) -> Iterator[None]:
    """Convert all errors of a download into `OSError`. The HTTP library has its own errors for broken connections."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OSError(f"{name!r} is not a folder, and it cannot be downloaded as a Hub id ({reason}).") from error


def _check_pickles(name: str, files: list[str]) -> None:
    """Check that a repository has weights in other formats than pickle. Warn about modules that only have pickles.

    Raises:
        ValueError: if the repository only has pickled weights.
    """
    check_no_pickled_weights(name, files)
    folders = [file.rpartition("/")[0] for file in files if file.endswith(f"/{PICKLE_WEIGHTS_NAME}")]
    unskipped = [folder for folder in folders if not _should_skip_folder(folder.split("/")[0])]
    lost = [folder for folder in unskipped if f"{folder}/{WEIGHTS_NAME}" not in files]
    if SENTENCE_MODULES_NAME in files and lost:
        logger.warning("The pickled weights of %s are not copied. Give --allow_pickle to copy them.", ", ".join(lost))


def _select_files(files: list[str], allow_pickle: bool) -> Iterator[str]:
    """Yield the files of a repository that are downloaded."""
    has_safetensors = WEIGHTS_NAME in files or INDEX_NAME in files
    for name in files:
        top, slash, _ = name.partition("/")
        if (slash and _should_skip_folder(top)) or name.lower().endswith(OTHER_WEIGHT_SUFFIXES):
            continue
        if not name.lower().endswith(PICKLE_SUFFIXES) or (allow_pickle and (slash or not has_safetensors)):
            yield name
