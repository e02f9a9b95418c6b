"""Models in memory as the converter reads and builds them, and what it reads of a checkpoint and a model alike."""

import copy as copying
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...modeling.mechanisms.kernels.kernel_table import drawn_names
from ...modeling.variant_names import EAGER, SDPA
from .entries import TensorEntry, checked_finite, dtype_name
from .reading import CheckpointReader

__all__ = ["ModelReader", "TensorSource", "assemble"]


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
ModelT = TypeVar("ModelT", bound=PreTrainedModel)


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
    converted.set_attn_implementation({EAGER: "eager", SDPA: "sdpa"}.get(implementation, implementation))
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
