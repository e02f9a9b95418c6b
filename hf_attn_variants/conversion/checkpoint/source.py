"""The folder of a checkpoint, checked before it is read, its configuration, and the files beside its weights."""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
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

__all__ = [
    "cached_folder",
    "check_files",
    "check_no_adapter",
    "check_no_pickle",
    "check_source",
    "check_whole_model",
    "copy_side_files",
    "learned_tokens",
    "local_folder",
    "read_config",
    "resolve_source",
    "side_files",
    "warn_of_own_code",
    "why_not_read",
]

logger = logging.getLogger(__name__)

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
WEIGHTS = (WEIGHTS_NAME, INDEX_NAME, PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME)
SAFETENSORS_SUFFIX = ".safetensors"
# Weights in other formats hold the source's heads: beside the converted ones they would be a second, different model.
OTHER_WEIGHT_SUFFIXES = (".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".ggml", ".tflite", ".mlmodel")
OTHER_WEIGHT_FOLDERS = ("onnx", "openvino", "coreml", "tf", "flax")
# What the names of this package's classes have, and the entries of `auto_map` that lead to a model's code.
OWN_CLASSES, MODEL_AUTO_CLASSES = "AttnVariant", ("AutoConfig", "AutoModel")
IGNORED_FOLDERS = (".git", ".cache", "__pycache__")


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
    if advice := unfinished_model_advice(folder):
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
    check_no_adapter(str(folder), files)
    if not allow_pickle:
        check_no_pickle(str(folder), files)


def check_no_adapter(name: str, files: list[str]) -> None:
    """Check that a checkpoint is a whole model and not an adapter of peft.

    Args:
        name: the checkpoint's folder or Hub id.
        files: the names of its files.

    Raises:
        ValueError: if an adapter is among the files.
    """
    adapter_files = sorted(file for file in files if any(fnmatchcase(file, pattern) for pattern in ADAPTER_FILES))
    if adapter_files:
        kind = "an adapter beside whole weights" if {*WEIGHTS} & {*files} else "an adapter alone, and no model"
        raise ValueError(
            f"{name} holds {kind} ({', '.join(adapter_files)}). Merge the adapter into its base model first (peft's "
            "`merge_and_unload`), or remove these files to use the model alone."
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


def local_folder(model_name_or_path: str | os.PathLike) -> Path | None:
    """Return the folder that a checkpoint's name means; None where there is none and the name can be a Hub id.

    Args:
        model_name_or_path: a folder, or an id such as "google-bert/bert-base-uncased".

    Raises:
        OSError: if it is empty, a file, or a path (it starts with ".", "/" or "~", ends with "/", or has more than one
            "/") at which there is nothing; or of a folder, as `check_files` says.
    """
    name = os.fspath(model_name_or_path)
    if not name:
        raise FileNotFoundError("the checkpoint has an empty name: give a folder or a Hub id.")
    path = Path(name).expanduser()
    if path.is_dir():
        check_files(path)
        return path
    if path.exists():
        raise NotADirectoryError(f"{name!r} is a file; give the checkpoint's folder, {str(path.parent)!r}.")
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"There is no folder {name!r}, and that is no Hub id.")
    return None


def resolve_source(
    model_name_or_path: str | os.PathLike,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
    weights: bool = True,
) -> Path:
    """Return the folder of a checkpoint; one that is named by its Hub id is downloaded into the Hub's cache.

    Args:
        model_name_or_path: as for `local_folder`.
        revision: branch, tag or commit on the Hub.
        token: the Hub token, for private and gated repositories.
        allow_pickle: download pytorch_model.bin where the repository has no safetensors file.
        weights: whether its weights will be read; if not, a repository of pickles serves as well.

    Raises:
        OSError: if there is no such folder or repository, or the Hub cannot be reached.
        ValueError: if it is an adapter, or its weights are pickles, which were not allowed.
    """
    name, folder = os.fspath(model_name_or_path), local_folder(model_name_or_path)
    if folder is not None and revision is not None:
        raise ValueError(f"`revision` is for Hub ids; {name!r} is a folder.")
    if folder is None:
        return _download(name, revision, token, allow_pickle, weights)
    if weights:
        check_whole_model(folder, allow_pickle)
    return folder


def check_source(model_name_or_path: str | os.PathLike) -> None:
    """Check a checkpoint that transformers is to load: a folder as `resolve_source` does, a repository by its list.

    Raises:
        OSError: if there is no such folder.
        ValueError: if it is an adapter, or its weights are pickles.
    """
    from huggingface_hub import HfApi

    name = os.fspath(model_name_or_path)
    folder, files = local_folder(name), None
    if folder is None:
        try:
            files = HfApi().list_repo_files(name)
        except Exception:  # no such repository, or none that answers: a copy in the cache will do
            folder = cached_folder(name)
    if folder is not None:
        check_whole_model(folder)
    elif files is not None:
        check_no_adapter(name, files)
        check_no_pickle(name, files)


def cached_folder(model_name_or_path: str | os.PathLike, revision: str | None = None) -> Path | None:
    """Return where a checkpoint lies that `resolve_source` found, without asking the Hub; None where it is gone."""
    from huggingface_hub import snapshot_download

    name = os.fspath(model_name_or_path)
    try:
        return local_folder(name) or Path(snapshot_download(name, revision=revision, local_files_only=True))
    except OSError:
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json.

    Raises:
        OSError: if there is none.
        ValueError: if it is not a JSON object with a `model_type`, or its `architectures` are no list of names.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_NAME}: not a transformers checkpoint.")
    config = load_json(path, "utf-8-sig")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} has no `model_type`: not a transformers checkpoint.")
    architectures = config.get("architectures")
    is_list = isinstance(architectures, list | None)
    if not is_list or not all(isinstance(name, str) for name in architectures or ()):
        raise ValueError(f"{path}: `architectures` must be a list of class names; got {architectures!r}.")
    return config


def side_files(folder: Path, weight_files: list[str], allow_pickle: bool = False) -> tuple[list[str], list[str]]:
    """List what lies beside a checkpoint's weights and config.json.

    Tokenizer, generation config, a sentence-transformers model's further modules with their safetensors (and, if
    allowed, pickled) weights go along. Left out: other copies of the model's weights, training state and checkpoints,
    and results that describe the source.

    Args:
        folder: the checkpoint.
        weight_files: the files that the converter reads.
        allow_pickle: take the pickled weights of sentence-transformers modules along.

    Returns:
        The relative paths to copy and those to leave out, sorted; a folder that is left out whole ends in "/".

    Raises:
        OSError: if one to copy is a link that leads nowhere, or a module is a link out of the folder; other links out
            of it are left out, with a warning.
    """
    modules = _module_folders(folder)
    # The history is read too, and written anew with the source's own step.
    read = {CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, HISTORY_NAME, *weight_files}
    if not all(name.endswith(SAFETENSORS_SUFFIX) for name in weight_files):
        read.add(PICKLE_INDEX_NAME)
    copied: list[str] = []
    left_out: list[str] = []
    for directory, subfolders, files in os.walk(folder, followlinks=True):
        relative, here = Path(directory).relative_to(folder), Path(directory).resolve()
        inside = [name for name in subfolders if not here.is_relative_to((here / name).resolve())]  # no circles
        inside = sorted(name for name in inside if name not in IGNORED_FOLDERS)
        skipped = [name for name in inside if relative == Path(".") and _is_skipped_folder(name)]
        skipped += [name for name in inside if name not in skipped and _is_refused(folder, relative / name, modules)]
        subfolders[:] = [name for name in inside if name not in skipped]
        left_out += [f"{(relative / name).as_posix()}/" for name in skipped]
        for file in files:
            path = (relative / file).as_posix()
            if path in read:
                continue
            is_result = relative == Path(".") and any(fnmatchcase(file, pattern) for pattern in RESULT_FILES)
            travels = not is_result and _travels(file, relative.as_posix() in modules, allow_pickle)
            if travels and not (folder / path).exists():
                raise FileNotFoundError(f"{folder / path} is a link to a file that is not there: mend or remove it.")
            travels = travels and not _is_refused(folder, relative / file, modules)
            (copied if travels else left_out).append(path)
    return sorted(copied), sorted(left_out)


def warn_of_own_code(config: Mapping[str, Any]) -> None:
    """Warn of model code that an upstream checkpoint brings (`auto_map` of its config.json): nothing here runs it.

    The checkpoint is read as the model that its `model_type` names. Code of tokenizers and processors stays in use.
    """
    named = config.get("auto_map") or {}
    classes = [str(named[auto]) for auto in named if auto.startswith(MODEL_AUTO_CLASSES)]
    if others := [name for name in classes if OWN_CLASSES not in name]:
        message = "the checkpoint brings code of its own (%s), which is not run: it is converted as transformers' %s"
        logger.warning(message, ", ".join(others), config.get("model_type"))


def copy_side_files(folder: Path, output: Path, files: list[str]) -> None:
    """Copy files by their relative paths, as `side_files` lists them: links to files are copied as these."""
    for name in files:
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target)


def learned_tokens(tokenizer: Any) -> set[str]:
    """Return the tokens of a tokenizer that are not special or added: none where it was made without files."""
    return set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab()) - {"▁"}


def _is_refused(folder: Path, path: Path, modules: set[str]) -> bool:
    """Whether a file or folder is a link out of the folder, or a pipe; an error where a module lies there."""
    if (reason := why_not_read(folder / path, folder)) is None:
        return False
    if modules & {path.as_posix(), path.parent.as_posix()}:
        raise OSError(f"{folder / path} is {reason}, which is not read: put a copy of it in its place.")
    logger.warning("%s is left out: it is %s", folder / path, reason)
    return True


def _travels(file: str, in_module: bool, allow_pickle: bool) -> bool:
    name = file.lower()
    # An adapter in a folder of its own is of heads that the model has no more.
    if any(fnmatchcase(name, pattern) for pattern in (*ADAPTER_FILES, *LOGS)):
        return False
    if name.endswith((".index.json", *OTHER_WEIGHT_SUFFIXES)):
        return False
    if name.endswith(SAFETENSORS_SUFFIX):
        return in_module
    if name.endswith(PICKLE_SUFFIXES):
        return in_module and allow_pickle
    return True


def _is_skipped_folder(name: str) -> bool:
    return name in (*OTHER_WEIGHT_FOLDERS, *TRACKER_FOLDERS) or name.startswith(("checkpoint-", "global_step"))


def _module_folders(folder: Path) -> set[str]:
    # sentence-transformers lists its modules, each in a folder of its own; the model itself has the path "".
    try:
        modules = load_json(folder / SENTENCE_MODULES_NAME)
        return {Path(module["path"]).as_posix() for module in modules if module["path"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _download(name: str, revision: str | None, token: str | bool | None, allow_pickle: bool, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    arguments: dict[str, Any] = {"repo_id": name, "revision": revision, "token": token}
    try:
        try:
            files = HfApi().list_repo_files(**arguments)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # not reachable (the client has errors of its own for that), or HF_HUB_OFFLINE
            folder = Path(snapshot_download(**arguments, local_files_only=True))  # a copy in the cache will do
            if weights:
                check_whole_model(folder, allow_pickle)
            return folder
        if weights:
            check_no_adapter(name, files)
        if weights and not allow_pickle:
            _check_pickles(name, files)
        return _fetch(allow_patterns=list(_wanted_files(files, allow_pickle)), **arguments)
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {name!r}, and that is no Hub id.") from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"There is no folder {name!r}; as a Hub id it is not in the cache, and the Hub cannot be reached."
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(f"There is no folder {name!r}, and the Hub refused it as an id: {reason}") from error


def _fetch(**arguments: Any) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(**arguments))
    except OSError:  # the Hub's answers, and the disk's
        raise
    except Exception as error:  # a connection that breaks has errors of the HTTP library
        if type(error).__module__.startswith("huggingface_hub"):
            raise
        raise OSError(
            f"The download of {arguments['repo_id']!r} broke off ({type(error).__name__}: {error}): repeat the "
            "command, which keeps what has come."
        ) from error


def _check_pickles(name: str, files: list[str]) -> None:
    """Refuse a repository whose weights are pickles alone; tell of a module whose weights are."""
    check_no_pickle(name, files)
    folders = [file.rpartition("/")[0] for file in files if file.endswith(f"/{PICKLE_WEIGHTS_NAME}")]
    unskipped = [folder for folder in folders if not _is_skipped_folder(folder.split("/")[0])]
    lost = [folder for folder in unskipped if f"{folder}/{WEIGHTS_NAME}" not in files]
    if SENTENCE_MODULES_NAME in files and lost:
        logger.warning("the weights of %s are pickles and not copied (see --allow_pickle)", ", ".join(lost))


def _wanted_files(files: list[str], allow_pickle: bool) -> Iterator[str]:
    has_safetensors = WEIGHTS_NAME in files or INDEX_NAME in files
    for name in files:
        top, slash, _ = name.partition("/")
        if (slash and _is_skipped_folder(top)) or name.lower().endswith(OTHER_WEIGHT_SUFFIXES):
            continue
        if not name.lower().endswith(PICKLE_SUFFIXES) or (allow_pickle and (slash or not has_safetensors)):
            yield name
