"""Models of a checkpoint's tensors: loaded by Transformers, read from memory, or built in memory."""

import copy as copying
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import is_out_of_memory
from ...files import load_json
from ...modeling.mechanisms.kernels.kernel_table import drawn_names
from ...modeling.variant_names import plain_implementation
from .source import learned_tokens, local_folder
from .tensor_files import CheckpointReader, TensorEntry, checked_finite, dtype_name

__all__ = [
    "TOKENIZER_FILES",
    "ModelReader",
    "TensorSource",
    "assemble",
    "check_learned_tokens",
    "check_tokenizer_files",
    "load_tokenizer_of",
    "model_of_tensors",
    "reading_checkpoint",
]

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

TOKENIZER_OBJECTS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
# What a tokenizer is read from, by the endings of the names.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", ".model", ".spm", ".bpe", ".vocab")


@contextmanager
def reading_checkpoint(source: str | os.PathLike) -> Iterator[str]:
    """Give what to load from; turn any error in reading it into an OSError or a ValueError."""
    folder = local_folder(source)  # of a path at which there is nothing, transformers says that it is no Hub id
    name = os.fspath(source)
    # transformers, huggingface_hub and safetensors each have errors of their own.
    try:
        with _held_mismatches() as reports:
            yield os.path.expanduser(source)
    except (ValueError, OSError) as error:
        if name in str(error):
            raise
        what = f"there is no folder {name!r}, and as a Hub id" if folder is None else name
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{what}: {' '.join(str(error).split())}") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if reports:
            raise ValueError(f"{name}: its config.json does not fit its weights: {reports[0]}") from error
        # Two lines: huggingface_hub's first one names the field and its second one the value.
        text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ValueError(f"{name}: {type(error).__name__}: {text}") from error


@contextmanager
def _held_mismatches() -> Iterator[list[str]]:
    """Hold transformers' tables of tensors that do not fit back until it is clear that this is no error.

    Yields:
        What they say of the first tensor of each.
    """
    reports: list[str] = []
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        line = re.search(r"^(\S+)\s*\|.*MISMATCH.*?\|(.*)", record.getMessage(), re.MULTILINE)
        if line is None:
            return record.levelno >= level
        reports.append(f"{line[1]}: {line[2].strip()}")
        held.append(record)
        return False

    logger = logging.getLogger("transformers.modeling_utils")
    own, level = logger.level, logger.getEffectiveLevel()
    logger.addFilter(hold)
    if level > logging.WARNING:  # where only errors are shown
        logger.setLevel(logging.INFO)  # of a logger that is at WARNING itself, transformers wants to know more
    try:
        yield reports
    finally:
        logger.removeFilter(hold)
        logger.setLevel(own)
    for record in held:
        if record.levelno >= level:
            logger.handle(record)


def load_tokenizer_of(source: str | os.PathLike, advice: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer; errors as for `reading_checkpoint` and `check_learned_tokens`."""
    with reading_checkpoint(source) as folder:
        check_tokenizer_files(folder, advice)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    check_learned_tokens(tokenizer, source, advice)
    return tokenizer


def check_tokenizer_files(source: str, advice: str = "") -> None:
    """Check that a folder can hold a tokenizer, and the JSON beside it, of which transformers expects objects.

    Args:
        source: the folder, or a Hub id, of which nothing is checked.
        advice: as for `check_learned_tokens`.

    Raises:
        OSError: if the folder has nothing that a tokenizer could be read from.
        ValueError: for JSON that is something else; the message names the file.
    """
    folder = Path(source)
    if folder.is_dir() and not any(name.endswith((*TOKENIZER_FILES, "config.json")) for name in _file_names(folder)):
        raise _no_tokenizer(source, advice)
    for name in TOKENIZER_OBJECTS:
        path = folder / name
        value = load_json(path, "utf-8-sig") if path.is_file() else {}
        if not isinstance(value, dict):
            raise ValueError(f"{path} must be a JSON object, got a {type(value).__name__}: mend or remove it")
        if name == "added_tokens.json" and (wrong := [key for key, each in value.items() if type(each) is not int]):
            raise ValueError(f"{path}: the token {wrong[0]!r} must have a number, got {value[wrong[0]]!r:.60}")


def check_learned_tokens(tokenizer: PreTrainedTokenizerBase, source: str | os.PathLike, advice: str) -> None:
    """Check that a tokenizer was made of files: without any, transformers v5 makes one that knows no word.

    Args:
        tokenizer: as transformers loaded it.
        source: from where.
        advice: what to do, the end of the message, with what divides it from the rest.

    Raises:
        OSError: if it was not; the message says which files there are.
    """
    if learned_tokens(tokenizer):
        return
    folder = Path(os.path.expanduser(source))
    if found := [name for name in _file_names(folder) if name.endswith(TOKENIZER_FILES)]:
        raise FileNotFoundError(
            f"{os.fspath(source)} has {', '.join(found)}, and AutoTokenizer reads no word from it: a "
            f"{type(tokenizer).__name__} needs other files, or these are of another tokenizer{advice}"
        )
    raise _no_tokenizer(source, advice)


def _file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _no_tokenizer(source: str | os.PathLike, advice: str) -> FileNotFoundError:
    return FileNotFoundError(f"{os.fspath(source)} has no tokenizer files{advice}")


def model_of_tensors(
    model_class: type[ModelT], config: Any, tensors: Mapping[str, torch.Tensor], folder: Path, **options: Any
) -> ModelT:
    """Return a model of a folder's tensors, as `from_pretrained` makes it of the folder itself.

    Raises:
        ValueError: if they do not fit the configuration.
    """

    def named(record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).replace("from: None", f"from: {folder}")
        return True

    # The report on tensors that are missing, or too many, says where these come from.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(named)
    try:
        with reading_checkpoint(folder):
            return model_class.from_pretrained(None, config=config, state_dict=tensors, **options)
    finally:
        logger.removeFilter(named)


class ModelReader:
    """The tensors of a model in memory, as they are: `read` returns the parameter's own memory, which is finite."""

    def __init__(self, model: nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"a {type(model).__name__} is no transformers model (of a wrapper like peft's give the model inside)."
            )
        self._tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        drawn = tuple(f".{name}" for name in drawn_names())
        self._tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(drawn)}
        self.entries = {}
        for name, tensor in self._tensors.items():
            if ".lora_" in name or ".base_layer." in name:
                raise ValueError(
                    f"the model holds an adapter ({name!r}): merge it first (peft's `merge_and_unload`), or convert "
                    "the model without it and train the adapter on the converted one."
                )
            if tensor.device.type == "meta":
                raise ValueError(f"{name!r} is not in memory (device meta): load the model without offloading first.")
            self.entries[name] = TensorEntry("", dtype_name(tensor.dtype), tuple(tensor.shape))

    def read(self, name: str) -> torch.Tensor:
        return checked_finite(self._tensors[name].detach(), name)


# Both have `entries` and `read`.
TensorSource = CheckpointReader | ModelReader


def assemble(
    model_class: type[ModelT],
    config: Any,
    tensors: dict[str, torch.Tensor],
    model: PreTrainedModel,
    copy: bool = False,
) -> ModelT:
    """Build a model of tensors by name; tied weights, buffers and all other state as in `model`.

    Args:
        copy: copy the tensors that are `model`'s own memory.
    """
    with torch.device("meta"):
        built = model_class(config)
    sources = dict(model.named_parameters(remove_duplicate=False))
    parameters: dict[int, nn.Parameter] = {}
    buffers = {name for name, _ in built.named_buffers()} & tensors.keys()  # a kernel's random vectors
    for name, tensor in tensors.items():
        if name in buffers:
            continue
        source = sources.get(name)
        if id(source) not in parameters or source is None:
            if copy and source is not None and tensor.data_ptr() == source.data_ptr():
                tensor = tensor.clone()
            parameters[id(source)] = nn.Parameter(tensor, requires_grad=source is None or source.requires_grad)
        _set_tensor(built, name, parameters[id(source)])  # tied weights stay one parameter
    for name, buffer in model.named_buffers():
        _set_tensor(built, name, buffer.clone())
    for name in buffers:
        _set_tensor(built, name, tensors[name].clone())
    return _with_state(built, model)


def _set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    of_module: Any = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    of_module[leaf] = tensor


def _with_state(converted: ModelT, model: PreTrainedModel) -> ModelT:
    """Give a converted model the state that is no parameter: mode, attention kernel, checkpointing, generation."""
    converted.train(model.training)
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            vars(converted.get_submodule(name)).update(
                gradient_checkpointing=True, _gradient_checkpointing_func=module._gradient_checkpointing_func
            )
    implementation = model.config._attn_implementation
    converted.set_attn_implementation(plain_implementation(implementation))
    # An untied T5 is not tied, whatever its class says.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    converted.all_tied_weights_keys = {
        name: to for name, to in (converted.all_tied_weights_keys or {}).items() if name in tied
    }
    if getattr(model, "generation_config", None) is not None:
        converted.generation_config = copying.deepcopy(model.generation_config)
    left = [name for name, tensor in (*converted.named_parameters(), *converted.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(
            f"the model has no tensor {left[0]!r}: it is not a plain {converted.config.model_type} model."
        )
    return converted
