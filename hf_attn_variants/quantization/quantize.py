"""`quantize`: a live model with int8 linear maps, or in bfloat16, for a CPU."""

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..instance_attributes import InstanceMethod
from .bfloat16 import make_bfloat16
from .bfloat16_weight import has_bfloat16
from .int8_weight import check_engine
from .kept_maps import LEAST_WEIGHTS, bfloat16_maps, int8_maps
from .packed_linear import Bfloat16Linear, Int8Linear, PackedLinear

__all__ = ["quantize"]

Model = TypeVar("Model", bound=PreTrainedModel)

DTYPES = ("int8", "bfloat16")
# Where the classes of maps that a quantiser has made come from.
QUANTISERS = ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "auto_gptq.", "hqq.")


def quantize(model: Model, dtype: str | torch.dtype = "int8") -> Model:
    """Give the linear maps of a live model int8 weights, or turn all of it into bfloat16, for a CPU.

    In place and for good: `copy.deepcopy(model)` before keeps the float32. A variant of this package or any model of
    transformers, whether it shares its memory (`share_memory`, which is best called before) or not.

    With int8 the weights have a scale a row, and the inputs of each call are rounded as they come: outputs depend a
    little on what else is in the batch. T5's `wo`, of large inputs, becomes bfloat16 where the processor multiplies
    it. Embeddings, norms, convolutions, relative positions and small maps stay in float32; so do maps whose weight an
    attention reads itself, which makes keys and values needless (a latent's, and those of `share_memory` with the
    encoder's outputs in its cache). The model computes no gradients from then on.

    Args:
        model: in evaluation mode, of float32 numbers, on a CPU.
        dtype: "int8" or "bfloat16".

    Returns:
        The model.

    Raises:
        ValueError: for a model that cannot, before anything of it is changed; the message says what it has.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f'`dtype` must be "int8" or "bfloat16"; got {dtype!r}.')
    _check_kind(model)
    _check_state(model)
    if name == "bfloat16":
        make_bfloat16(model)
        return model
    check_engine()
    maps = int8_maps(model)
    halves = bfloat16_maps(model) if has_bfloat16() else {}
    _check_maps(model, maps, halves)
    made: dict[int, PackedLinear] = {}
    for cls, linears in ((Int8Linear, maps), (Bfloat16Linear, halves)):
        made |= {id(linear): cls(linear) for linear in {id(each): each for each in linears.values()}.values()}
    for path, linear in (maps | halves).items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(linear)])
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # By the first, upstream refuses to train it. A push would make a repository before it saves.
            vars(module).update(is_quantized=True, save_pretrained=_refuse_to_save, push_to_hub=_refuse_to_save)
            for name, function in METHODS.items():
                vars(module)[name] = InstanceMethod(function, module)
            if isinstance(module.get_output_embeddings(), PackedLinear):
                vars(module).update(resize_token_embeddings=_refuse_to_resize, tie_weights=_refuse_to_tie)
    return model


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "A model of int8 maps is not saved: save the one of float32, and call `quantize` after loading it. "
        "(`state_dict()` holds the int8 weights, for a model that was quantized the same way.)"
    )


def _refuse_to_resize(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "The output embeddings are int8, which no token can be added to: call `resize_token_embeddings` on the model "
        "of float32, and `quantize` after it."
    )


def _refuse_to_tie(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "The output embeddings are int8, made of the weights that they had: call `tie_weights` on the model of "
        "float32, and `quantize` after it."
    )


def _packed_maps(module: PreTrainedModel) -> list[PackedLinear]:
    return [each for each in module.modules() if isinstance(each, PackedLinear)]


def _num_parameters(module: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count as upstream does, with the packed maps, none of which is trainable."""
    packed = [] if only_trainable else _packed_maps(module)
    return type(module).num_parameters(module, only_trainable, exclude_embeddings) + sum(
        each.num_numbers() for each in packed
    )


def _memory_footprint(module: PreTrainedModel, return_buffers: bool = True) -> int:
    """Return the bytes that upstream counts, with the packed maps."""
    packed = sum(each.num_bytes() for each in _packed_maps(module))
    return int(type(module).get_memory_footprint(module, return_buffers)) + packed


def _apply_unless_it_casts(
    module: PreTrainedModel, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Do what `to`, `bfloat16` and the like call for each tensor, unless it makes another type or leaves the CPU.

    Raises:
        ValueError: if it does, before any tensor is changed.
    """
    made = fn(torch.empty(0, dtype=torch.float32, device="cpu"))
    if made.dtype != torch.float32 or made.device.type != "cpu":
        raise ValueError(
            f"This {type(module).__name__} has int8 maps, which compute on a CPU beside float32; asked for "
            f"{made.dtype} on {made.device}. Load the model again for that."
        )
    return type(module)._apply(module, fn, *args, **kwargs)


# What a quantized model does otherwise than its class.
METHODS: dict[str, Callable[..., Any]] = {
    "_apply": _apply_unless_it_casts,
    "num_parameters": _num_parameters,
    "get_memory_footprint": _memory_footprint,
}


def _check_kind(model: Any) -> None:
    if isinstance(model, PreTrainedModel):
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            raise ValueError(f"This {type(model).__name__} is compiled: quantize first and compile then.")
        return
    if isinstance(model, str | os.PathLike):
        raise ValueError(
            "`quantize` takes a model, not its path: load it first, for an encoder-decoder by "
            f"`AutoModelForSeq2SeqLM.from_pretrained({os.fspath(model)!r})`."
        )
    advice = ""
    if isinstance(model, nn.Module) and hasattr(model, "_orig_mod"):
        advice = " Quantize first and compile then: `torch.compile(quantize(model))`."
    elif hasattr(model, "merge_and_unload"):
        advice = " Of a peft model give the merged one: `quantize(peft_model.merge_and_unload())`."
    raise ValueError(f"`quantize` takes a model of transformers; got a {type(model).__name__}.{advice}")


def _check_state(model: PreTrainedModel) -> None:
    """Check the mode of a model and its numbers.

    Raises:
        ValueError: with what it has and what is asked.
    """
    name = type(model).__name__
    if getattr(model, "is_quantized", False):
        raise ValueError(f"This {name} is quantized already.")
    for path, kind in _quantised(model):
        raise ValueError(f"This {name} is quantized already (`{path}` is a {kind}).")
    if any(module.training for module in model.modules()):
        raise ValueError(f"This {name} is in training mode: call `model.eval()` before.")
    for path, numbers in (*model.named_parameters(), *model.named_buffers()):
        if numbers.device.type != "cpu":
            raise ValueError(
                f"`{path}` of this {name} is on {numbers.device}: `quantize` is for a CPU. Call `model.cpu()` before; "
                "on a GPU `model.to(torch.bfloat16)` is the one line."
            )
        if numbers.is_floating_point() and numbers.dtype != torch.float32:
            raise ValueError(f"`{path}` of this {name} is {numbers.dtype}: `quantize` takes a model of float32.")


def _quantised(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path and the class of each module or parameter that a quantiser has made."""
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear) or type(module).__module__.startswith(QUANTISERS):
            yield path, type(module).__name__
    for path, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            yield path, type(parameter).__name__


def _check_maps(model: PreTrainedModel, maps: dict[str, nn.Linear], halves: dict[str, nn.Linear]) -> None:
    """Check that maps are no more than their weights, and that there are some.

    Raises:
        ValueError: with what they have.
    """
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ValueError(f"`{path}` is a {type(module).__name__} of peft: merge the adapter before.")
    if not maps:
        raise ValueError(
            f"This {type(model).__name__} has no linear map of {LEAST_WEIGHTS} weights or more, and smaller ones gain "
            "nothing in int8."
        )
    for path, linear in (maps | halves).items():
        if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
            raise ValueError(
                f"`{path}` has a hook or a `forward` of its own (accelerate's offloading does so), which would be "
                "lost: take it off before."
            )
        if not linear.weight.isfinite().all():
            raise ValueError(f"`{path}.weight` has numbers that are not finite.")
