"""Checks a checkpoint folder before it is read, reads its configuration, and lists its other files.

folder or Hub id ──► resolve_checkpoint_folder ──► check_checkpoint_files   links out of the folder, incomplete folders
                           │            check_complete_model     adapters, pickled weights
                           ▼
                        folder ──► read_config                   config.json
                              └──► list_auxiliary_files          files to copy, files to leave out
"""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from ...files import (
    CARD_NAME,
    CONFIG_NAME,
    HISTORY_NAME,
    INDEX_NAME,
    LOG_PATTERNS,
    PICKLE_INDEX_NAME,
    PICKLE_SUFFIXES,
    PICKLE_WEIGHTS_NAME,
    RESULT_FILES,
    SENTENCE_MODULES_NAME,
    TRACKER_FOLDERS,
    WEIGHTS_NAME,
    load_json,
)
from ...model_folder import ADAPTER_FILES, describe_unfinished_model

logger = logging.getLogger(__name__)

# Patterns of file names that Transformers, PEFT and this package look for.
LOADED_FILE_PATTERNS = (*"*.json *.safetensors *.bin *.model *.spm *.py *.jinja vocab.* merges.txt".split(), CARD_NAME)
WEIGHT_FILE_NAMES = (WEIGHTS_NAME, INDEX_NAME, PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME)
SAFETENSORS_SUFFIX = ".safetensors"
# Weights in other formats are not copied because they contain the original heads.
OTHER_WEIGHT_SUFFIXES = (".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".ggml", ".tflite", ".mlmodel")
OTHER_WEIGHT_FOLDERS = ("onnx", "openvino", "coreml", "tf", "flax")
# Part of this package's class names, and the prefix of `auto_map` entries for model code.
CLASS_PREFIX, MODEL_AUTO_CLASSES = "AttnVariant", ("AutoConfig", "AutoModel")
IGNORED_FOLDERS = (".git", ".cache", "__pycache__")


def get_unsafe_path_reason(path: Path, folder: Path) -> str | None:
    """Return the reason why a path in a checkpoint folder is not safe to read, or None if it is safe.

    Links within the folder and into the Hub cache are safe. Other links, pipes and devices are not.
    """
    target, resolved_folder = path.resolve(), folder.resolve()
    snapshots = next((parent for parent in resolved_folder.parents if parent.name == "snapshots"), None)
    is_blob = snapshots is not None and target.is_relative_to(snapshots.parent / "blobs")
    is_blob |= "blobs" in target.parts and target.is_relative_to(Path(HF_HUB_CACHE).resolve())
    if not is_blob and not target.is_relative_to(resolved_folder):
        return f"a link that leads out of the folder, to {target}"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "neither a file nor a folder"
    return None


def check_checkpoint_files(folder: Path) -> None:
    """Check that every file that is read to load a checkpoint exists and is safe to read.

    Raises:
        OSError: if a file is a link out of the folder, a broken link, a pipe or a device, or if the program that wrote
            the folder was interrupted.
    """
    if advice := describe_unfinished_model(folder):
        raise FileNotFoundError(f"{folder} does not contain a complete model: {advice}")
    for path in sorted(folder.iterdir()):
        if not _matches_any_pattern(path.name, LOADED_FILE_PATTERNS):
            continue
        if not path.exists():
            raise FileNotFoundError(f"{path} is a broken link. Repair or remove it.")
        if reason := get_unsafe_path_reason(path, folder):
            raise OSError(
                f"{path} is {reason}, which is not read for security reasons. Replace it with a copy of the file."
            )


def check_complete_model(folder: Path, allow_pickle: bool = False) -> None:
    """Check that a folder contains no adapter and, if `allow_pickle` is False, that not all weights are pickled.

    Missing files are not reported.

    Raises:
        ValueError: if the folder contains an adapter, or only pickled weights that are not allowed.
    """
    files = os.listdir(folder)
    check_no_adapter(str(folder), files)
    if not allow_pickle:
        check_no_pickled_weights(str(folder), files)


def check_no_adapter(name: str, files: list[str]) -> None:
    """Check that a checkpoint is a complete model and does not contain a PEFT adapter.

    Args:
        name: Folder or Hub id of the checkpoint.
        files: Names of the checkpoint's files.

    Raises:
        ValueError: if the files include an adapter.
    """
    if adapter_files := sorted(file for file in files if _matches_any_pattern(file, ADAPTER_FILES)):
        kind = "an adapter next to complete weights" if {*WEIGHT_FILE_NAMES} & {*files} else "only an adapter"
        raise ValueError(
            f"{name} must be a model without an adapter, got {kind} ({', '.join(adapter_files)}). Merge the adapter "
            "into its base model first (`merge_and_unload` in PEFT), or remove these files to ignore the adapter."
        )


def _matches_any_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a file name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_no_pickled_weights(name: str, files: list[str]) -> None:
    """Check that a checkpoint has weights in a format other than pickle.

    Raises:
        ValueError: if the checkpoint only has pickled weights.
    """
    weights = [file for file in WEIGHT_FILE_NAMES if file in files]
    if weights and weights[0] in (PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME):
        raise ValueError(
            f"{weights[0]} in {name} is a pickle file, which can run code when it is loaded. Use a safetensors copy, "
            "or set allow_pickle=True to read the tensors with weights_only=True. `attn-variants convert "
            "--allow_pickle` creates such a copy."
        )


def find_local_folder(model_name_or_path: str | os.PathLike) -> Path | None:
    """Return a checkpoint's folder, or None if it does not exist and the name can be a Hub id.

    Args:
        model_name_or_path: A folder, or an id such as "google-bert/bert-base-uncased".

    Raises:
        OSError: if the name is empty, a file, or a path that does not exist, or if `check_checkpoint_files` fails. A
            name is considered a path if it starts with ".", "/" or "~", ends with "/", or contains more than one "/".
    """
    name = os.fspath(model_name_or_path)
    path = Path(name).expanduser()
    if name and path.is_dir():
        check_checkpoint_files(path)
        return path
    if name and path.exists():
        raise NotADirectoryError(f"{name!r} is a file. Pass the checkpoint folder {str(path.parent)!r}.")
    if not name or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"{name!r} is neither an existing folder nor a Hub id. Check the path.")
    return None


def resolve_checkpoint_folder(
    model_name_or_path: str | os.PathLike,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
    with_weights: bool = True,
) -> Path:
    """Return a checkpoint's folder. If the name is a Hub id, the checkpoint is downloaded to the cache.

    Args:
        model_name_or_path: A folder or a Hub id (see `find_local_folder`).
        revision: Branch, tag or commit on the Hub.
        token: Access token for private and gated repositories on the Hub.
        allow_pickle: Whether to download pytorch_model.bin if the repository has no safetensors file.
        with_weights: Whether the weights will be read. If False, pickled weights and adapters are not checked.

    Raises:
        OSError: if the folder or repository does not exist, or the Hub cannot be reached.
        ValueError: if the checkpoint is an adapter, or only has pickled weights, which are not allowed by default.
    """
    name, folder = os.fspath(model_name_or_path), find_local_folder(model_name_or_path)
    if folder is not None and revision is not None:
        raise ValueError(f"`revision` is only supported for a Hub id, not for the folder {name!r}. Remove it.")
    if folder is None:
        return _download_checkpoint(name, revision, token, allow_pickle, with_weights)
    if with_weights:
        check_complete_model(folder, allow_pickle)
    return folder


def check_source(model_name_or_path: str | os.PathLike) -> None:
    """Check a checkpoint before Transformers loads it. For a Hub repository, only the list of files is checked.

    Raises:
        OSError: if the folder does not exist.
        ValueError: if the checkpoint is an adapter, or has only pickled weights.
    """
    from huggingface_hub import HfApi, snapshot_download

    name = os.fspath(model_name_or_path)
    folder = find_local_folder(name)
    try:
        files = os.listdir(folder) if folder is not None else HfApi().list_repo_files(name)
    except Exception:  # the repository does not exist or cannot be reached, so the cached copy is used
        with suppress(OSError):
            folder = folder or Path(snapshot_download(name, local_files_only=True))
        files = [] if folder is None else os.listdir(folder)
    check_no_adapter(str(folder or name), files)
    check_no_pickled_weights(str(folder or name), files)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json.

    Raises:
        OSError: if the file does not exist.
        ValueError: if the file is not a JSON object with a `model_type`, or if `architectures` is not a list of names.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must contain {CONFIG_NAME}. Pass the folder of a Transformers checkpoint.")
    config = load_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} must contain `model_type`. Pass the folder of a Transformers checkpoint.")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"`architectures` in {path} must be a list of class names, got {architectures!r}.")
    return config


def list_auxiliary_files(
    folder: Path, weight_files: list[str], allow_pickle: bool = False
) -> tuple[list[str], list[str]]:
    """List the files in a checkpoint other than its weights and config.json.

    The files to copy include the tokenizer, the generation configuration, and the additional modules of a
    sentence-transformers model with their safetensors weights (or pickled weights if they are allowed). Other copies
    of the weights, training checkpoints, and results that describe the original model are left out.

    Args:
        folder: The checkpoint folder.
        weight_files: The weight files that the conversion reads.
        allow_pickle: Whether to copy pickled weights of sentence-transformers modules.

    Returns:
        The sorted relative paths of files to copy and of files to leave out. The path of a folder that is left out
        ends with "/".

    Raises:
        OSError: if a file to copy is a broken link, or a module is a link out of the folder. Other links out of the
            folder are left out with a warning.
    """
    modules = _list_module_folders(folder)
    # The history is not copied because a new history that includes the conversion is written.
    handled_files = {CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, HISTORY_NAME, *weight_files}
    if not all(name.endswith(SAFETENSORS_SUFFIX) for name in weight_files):
        handled_files.add(PICKLE_INDEX_NAME)
    copied: list[str] = []
    left_out: list[str] = []
    for directory, subfolders, files in os.walk(folder, followlinks=True):
        relative, resolved = Path(directory).relative_to(folder), Path(directory).resolve()
        # Links to a parent folder would lead to endless recursion.
        inside = [name for name in subfolders if not resolved.is_relative_to((resolved / name).resolve())]
        inside = sorted(name for name in inside if name not in IGNORED_FOLDERS)
        skipped = [name for name in inside if relative == Path(".") and _should_skip_folder(name)]
        skipped += [name for name in inside if name not in skipped and _is_unsafe(folder, relative / name, modules)]
        subfolders[:] = [name for name in inside if name not in skipped]
        left_out += [f"{(relative / name).as_posix()}/" for name in skipped]
        for file in files:
            path = (relative / file).as_posix()
            if path in handled_files:
                continue
            is_result = relative == Path(".") and _matches_any_pattern(file, RESULT_FILES)
            is_copied = not is_result and _should_copy_file(file, relative.as_posix() in modules, allow_pickle)
            if is_copied and not (folder / path).exists():
                raise FileNotFoundError(f"{folder / path} is a broken link. Repair or remove it.")
            is_copied = is_copied and not _is_unsafe(folder, relative / file, modules)
            (copied if is_copied else left_out).append(path)
    return sorted(copied), sorted(left_out)


def warn_about_remote_code(config: Mapping[str, Any]) -> None:
    """Warn if a model has remote code (`auto_map` in config.json), because the conversion does not run it.

    The checkpoint is converted as a Transformers model of its `model_type`. Remote code for tokenizers and processors
    is not affected.

    Raises:
        ValueError: if `auto_map` is not a dictionary.
    """
    auto_map = config.get("auto_map") or {}
    if not isinstance(auto_map, Mapping):
        raise ValueError(f"`auto_map` in config.json must be a dictionary, got {auto_map!r}. Correct or remove it.")
    classes = [str(auto_map[auto]) for auto in auto_map if auto.startswith(MODEL_AUTO_CLASSES)]
    if other_classes := [name for name in classes if CLASS_PREFIX not in name]:
        logger.warning(
            f"The checkpoint's remote code ({', '.join(other_classes)}) is not run. The checkpoint is converted as a "
            f"{config.get('model_type')} model of Transformers."
        )


def copy_auxiliary_files(folder: Path, output: Path, files: list[str]) -> None:
    """Copy files by their relative paths (see `list_auxiliary_files`).

    Links are replaced by the files they point to.
    """
    for name in files:
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target)


def list_learned_tokens(tokenizer: Any) -> set[str]:
    """Return a tokenizer's tokens except special and added tokens, or an empty set if it has no files."""
    return set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab()) - {"▁"}


def _is_unsafe(folder: Path, path: Path, modules: set[str]) -> bool:
    """Return whether to leave out a file or folder because it is not safe to read (see `get_unsafe_path_reason`).

    Raises:
        OSError: if the path belongs to a sentence-transformers module, which cannot be left out.
    """
    if (reason := get_unsafe_path_reason(folder / path, folder)) is None:
        return False
    if modules & {path.as_posix(), path.parent.as_posix()}:
        raise OSError(
            f"{folder / path} is {reason}, which is not read for security reasons. Replace it with a copy of the file."
        )
    logger.warning("Skipping %s because it is %s.", folder / path, reason)
    return True


def _should_copy_file(file: str, in_module: bool, allow_pickle: bool) -> bool:
    """Return whether to copy a file, based on its name."""
    name = file.lower()
    # An adapter, even in a separate folder, does not match the new heads.
    is_adapter_or_log = _matches_any_pattern(name, (*ADAPTER_FILES, *LOG_PATTERNS))
    if is_adapter_or_log or name.endswith((".index.json", *OTHER_WEIGHT_SUFFIXES)):
        return False
    if name.endswith(SAFETENSORS_SUFFIX):
        return in_module
    return not name.endswith(PICKLE_SUFFIXES) or (in_module and allow_pickle)


def _should_skip_folder(name: str) -> bool:
    """Return whether to leave out a top-level folder in a checkpoint."""
    return name in (*OTHER_WEIGHT_FOLDERS, *TRACKER_FOLDERS) or name.startswith(("checkpoint-", "global_step"))


def _list_module_folders(folder: Path) -> set[str]:
    """Return the relative paths of a sentence-transformers model's modules, except the Transformers model itself."""
    # The path of the Transformers model itself is "".
    try:
        modules = load_json(folder / SENTENCE_MODULES_NAME)
        return {Path(module["path"]).as_posix() for module in modules if module["path"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _download_checkpoint(
    repo_id: str, revision: str | None, token: str | bool | None, allow_pickle: bool, with_weights: bool
) -> Path:
    """Download a checkpoint to the cache.

    Takes the same arguments and raises the same errors as `resolve_checkpoint_folder`.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    arguments: dict[str, Any] = {"repo_id": repo_id, "revision": revision, "token": token}
    with _convert_download_errors(repo_id):
        try:
            files = HfApi().list_repo_files(**arguments)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # the Hub cannot be reached or HF_HUB_OFFLINE is set, so the cached copy is used
            files = []
            folder = Path(snapshot_download(**arguments, local_files_only=True))
    if not files:
        if with_weights:
            check_complete_model(folder, allow_pickle)
        return folder
    if with_weights:
        check_no_adapter(repo_id, files)
    if with_weights and not allow_pickle:
        _check_pickled_weights(repo_id, files)
    patterns = list(_iterate_files_to_download(files, allow_pickle))
    with _convert_download_errors(repo_id):
        return Path(snapshot_download(allow_patterns=patterns, **arguments))


@contextmanager
def _convert_download_errors(repo_id: str) -> Iterator[None]:
    """Convert all download errors to `OSError`, because the HTTP library raises its own types of errors."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OSError(f"{repo_id!r} is not a folder, and it cannot be downloaded as a Hub id ({reason}).") from error


def _check_pickled_weights(name: str, files: list[str]) -> None:
    """Check that not all weights in a repository are pickled, and warn about modules that only have pickled weights.

    Raises:
        ValueError: if the repository only has pickled weights.
    """
    check_no_pickled_weights(name, files)
    folders = [file.rpartition("/")[0] for file in files if file.endswith(f"/{PICKLE_WEIGHTS_NAME}")]
    kept_folders = [folder for folder in folders if not _should_skip_folder(folder.split("/")[0])]
    lost = [folder for folder in kept_folders if f"{folder}/{WEIGHTS_NAME}" not in files]
    if SENTENCE_MODULES_NAME in files and lost:
        logger.warning("The pickled weights of %s are not copied. Pass --allow_pickle to copy them.", ", ".join(lost))


def _iterate_files_to_download(files: list[str], allow_pickle: bool) -> Iterator[str]:
    """Yield the names of the files in a repository that should be downloaded."""
    has_safetensors = WEIGHTS_NAME in files or INDEX_NAME in files
    for name in files:
        top_folder, slash, _ = name.partition("/")
        if (slash and _should_skip_folder(top_folder)) or name.lower().endswith(OTHER_WEIGHT_SUFFIXES):
            continue
        if not name.lower().endswith(PICKLE_SUFFIXES) or (allow_pickle and (slash or not has_safetensors)):
            yield name
