"""Loads models and tokenizers with Transformers, reads model tensors, and builds models in memory."""

import copy as copying
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import convert_to_value_error
from ...modeling.fields.mechanism_fields import has_kernel
from ...modeling.mechanisms.kernels.kernel_table import get_random_buffer_names
from ...modeling.variant_names import get_plain_implementation
from .source import find_local_folder, list_learned_tokens
from .tensor_files import CheckpointReader, TensorEntry, check_finite, get_safetensors_dtype

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

# Suffixes of the files from which a tokenizer can be loaded.
_TOKENIZER_FILE_SUFFIXES = tuple("tokenizer.json vocab.txt vocab.json merges.txt .model .spm .bpe .vocab".split())


@contextmanager
def convert_loading_errors(source: str | os.PathLike) -> Iterator[str]:
    """Yield a checkpoint's path or Hub id, and convert all errors while loading it to `OSError` or `ValueError`.

    Args:
        source: A folder or a Hub id.
    """
    # The folder is checked first because Transformers would report an invalid Hub id if a path does not exist.
    folder = find_local_folder(source)
    name = os.fspath(source)
    try:
        # Transformers, huggingface_hub and safetensors raise their own types of errors.
        with convert_to_value_error(name):
            yield os.path.expanduser(source)
    except (ValueError, OSError) as error:
        if name in str(error):
            raise
        prefix = f"There is no folder {name!r}, and as a Hub id" if folder is None else name
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{prefix}: {' '.join(str(error).split())}") from error


def load_checkpoint_tokenizer(source: str | os.PathLike, advice: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Args:
        source: A folder or a Hub id.
        advice: The end of the error message (see `check_vocabulary_not_empty`).
        options: Further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError, ValueError: If the folder contains no tokenizer files. See also `convert_loading_errors` and
            `check_vocabulary_not_empty`.
    """
    with convert_loading_errors(source) as folder:
        suffixes, path = (*_TOKENIZER_FILE_SUFFIXES, "config.json"), Path(folder)
        if path.is_dir() and not any(name.endswith(suffixes) for name in _list_file_names(path)):
            raise FileNotFoundError(f"{folder} has no tokenizer files{advice}")
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    check_vocabulary_not_empty(tokenizer, source, advice)
    return tokenizer


def check_vocabulary_not_empty(tokenizer: PreTrainedTokenizerBase, source: str | os.PathLike, advice: str) -> None:
    """Check that a tokenizer was loaded from files. If they are missing, Transformers v5 creates an empty tokenizer.

    Args:
        tokenizer: A tokenizer that was loaded with Transformers.
        source: The folder or Hub id from which the tokenizer was loaded.
        advice: The end of the error message. It begins with punctuation and says what to do.

    Raises:
        OSError: if the tokenizer has no vocabulary. The message lists the files in the folder.
    """
    if list_learned_tokens(tokenizer):
        return
    names = _list_file_names(Path(os.path.expanduser(source)))
    if not (files := [name for name in names if name.endswith(_TOKENIZER_FILE_SUFFIXES)]):
        raise FileNotFoundError(f"{os.fspath(source)} has no tokenizer files{advice}")
    raise FileNotFoundError(
        f"{os.fspath(source)} contains {', '.join(files)}, but AutoTokenizer loads an empty vocabulary from it. The "
        f"files of {type(tokenizer).__name__} are incomplete or belong to another tokenizer{advice}"
    )


def _list_file_names(folder: Path) -> list[str]:
    """Return the sorted names of the files in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def build_model_from_tensors(
    model_class: type[ModelT], config: Any, tensors: Mapping[str, torch.Tensor], folder: Path, **options: Any
) -> ModelT:
    """Build a model from named tensors with `from_pretrained`.

    Args:
        model_class: Class of the model.
        config: Configuration of the model.
        tensors: {name: tensor} for all tensors.
        folder: The folder from which the tensors were read, for log messages.
        options: Further arguments of `from_pretrained`.

    Raises:
        ValueError: if the tensors do not match the configuration.
    """

    def insert_folder(record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).replace("from: None", f"from: {folder}")
        return True

    # Transformers' report about missing and unexpected tensors states where the tensors come from.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(insert_folder)
    try:
        with convert_loading_errors(folder):
            return model_class.from_pretrained(None, config=config, state_dict=tensors, **options)
    finally:
        logger.removeFilter(insert_folder)


class ModelReader:
    """Reads the tensors of a model in memory without copying them, and checks that they are finite.

    Args:
        model: A Transformers model.

    Raises:
        ValueError: if the model is not a Transformers model, if it has an adapter, or if it is not in memory.
    """

    def __init__(self, model: nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"`model` must be a Transformers model, got {type(model).__name__}. If it is a wrapper (such as a "
                "PEFT model), pass the model inside it."
            )
        self._tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        if hasattr(model.config, "get_variant_fields") and has_kernel(model.config):
            buffer_suffixes = tuple(f".{name}" for name in get_random_buffer_names())
            self._tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(buffer_suffixes)}
        self.entries = {}
        for name, tensor in self._tensors.items():
            if ".lora_" in name or ".base_layer." in name:
                raise ValueError(
                    f"`model` must not have an adapter, got {name!r}. Merge it first (`merge_and_unload` in PEFT), or "
                    "convert the model without it and train a new adapter on the converted model."
                )
            if tensor.device.type == "meta":
                raise ValueError(
                    f"{name!r} must be in memory, but it is on the meta device. Load the model without offloading."
                )
            self.entries[name] = TensorEntry("", get_safetensors_dtype(tensor.dtype), tuple(tensor.shape))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor after checking that it is finite."""
        return check_finite(self._tensors[name].detach(), name)


# Both classes provide `entries` and `read`.
TensorSource = CheckpointReader | ModelReader


def assemble_model(
    model_class: type[ModelT],
    config: Any,
    tensors: dict[str, torch.Tensor],
    model: PreTrainedModel,
    copy: bool = False,
) -> ModelT:
    """Build a model from named tensors, with the tied weights, buffers and other state of an existing model.

    Args:
        model_class: Class of the new model.
        config: Configuration of the new model.
        tensors: {name: tensor} for all tensors.
        model: The original model.
        copy: Whether to copy tensors that share memory with `model`.
    """
    with torch.device("meta"):
        built = model_class(config)
    sources = dict(model.named_parameters(remove_duplicate=False))
    parameters: dict[int, nn.Parameter] = {}
    buffers = {name for name, _ in built.named_buffers()} & tensors.keys()  # random vectors of a kernel
    for name, tensor in tensors.items():
        if name in buffers:
            continue
        source = sources.get(name)
        if id(source) not in parameters or source is None:
            if copy and source is not None and tensor.data_ptr() == source.data_ptr():
                tensor = tensor.clone()
            parameters[id(source)] = nn.Parameter(tensor, requires_grad=source is None or source.requires_grad)
        _set_tensor(built, name, parameters[id(source)])  # tied weights remain a single parameter
    for name, buffer in model.named_buffers():
        _set_tensor(built, name, buffer.clone())
    for name in buffers:
        _set_tensor(built, name, tensors[name].clone())
    return _copy_state(built, model)


def _set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer in a model."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    module_tensors: Any = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    module_tensors[leaf] = tensor


def _copy_state(converted: ModelT, model: PreTrainedModel) -> ModelT:
    """Copy the training mode, gradient checkpointing, attention implementation, weight tying and generation config."""
    converted.train(model.training)
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            function = module._gradient_checkpointing_func
            target = vars(converted.get_submodule(name))
            target.update(gradient_checkpointing=True, _gradient_checkpointing_func=function)
    implementation = model.config._attn_implementation
    converted.set_attn_implementation(get_plain_implementation(implementation))
    # The weights of an untied T5 model must stay untied, although its class ties them.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    keys = converted.all_tied_weights_keys or {}
    converted.all_tied_weights_keys = {name: to for name, to in keys.items() if name in tied}
    if getattr(model, "generation_config", None) is not None:
        converted.generation_config = copying.deepcopy(model.generation_config)
    missing = [name for name, tensor in (*converted.named_parameters(), *converted.named_buffers()) if tensor.is_meta]
    if missing:
        raise ValueError(
            f"`model` must be an unmodified {converted.config.model_type} model, but it has no tensor {missing[0]!r}. "
            "Convert the original model."
        )
    return converted
