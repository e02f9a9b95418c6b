"""`quantize`: a live model with int8 linear maps, or in bfloat16, for a CPU."""

import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..instance_attributes import InstanceMethod
from .bfloat16 import TIMED_ROWS, make_bfloat16
from .int8_weight import check_engine, current_plan, least_seconds
from .packed_linear import (
    LEAST_WEIGHTS,
    MOST_ERROR,
    Bfloat16Linear,
    Int8Linear,
    PackedLinear,
    has_fast_bfloat16,
    is_named,
    large_linears,
    make_example_inputs,
    recorded_reads,
    rounding_errors,
)

__all__ = ["quantize"]

logger = logging.getLogger(f"transformers.{__name__}")

Model = TypeVar("Model", bound=PreTrainedModel)

DTYPES = ("int8", "bfloat16")
# A step of few rows may take a little longer in int8 where a text takes half of the time.
MUCH_SLOWER = 1.5
# Where the classes of maps that a quantiser has made come from.
QUANTISERS = ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "auto_gptq.", "hqq.")


def quantize(model: Model, dtype: str | torch.dtype = "int8", example_inputs: dict[str, Any] | None = None) -> Model:
    """Give the linear layers of a loaded model int8 weights, or turn the whole model into bfloat16, for a CPU.

    The model is changed in place and cannot be changed back; `copy.deepcopy(model)` keeps the float32 model. It may be
    a variant of this package or any model of Transformers. Call `share_memory` before `quantize` if you use both.

    With int8, each weight has one scale per row, and each token of the inputs is rounded by its own largest number
    when the layer is called. The model runs once on a small batch before it is changed. Layers whose inputs have
    outliers become bfloat16 if the processor multiplies that, and stay in float32 otherwise. Embeddings, norms,
    convolutions, relative positions and small layers stay in float32, and so do layers whose weight the model's code
    reads instead of calling the layer. The model cannot be trained afterwards.

    Args:
        model: a float32 model in evaluation mode on a CPU.
        dtype: "int8" or "bfloat16".
        example_inputs: keyword arguments for one call of the model, with real data if possible. By default, a random
            batch is made from the configuration.

    Returns:
        The same model.

    Raises:
        ValueError: if the model cannot be quantized. The model is unchanged then.

    Example:
        >>> model = AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2").eval()
        >>> quantize(model)
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
    linears = large_linears(model)
    _check_linears(model, linears)
    inputs, errors = _measured(model, linears, example_inputs)
    made = _packed(model, linears, errors)
    _replace(model, linears, made)
    if inputs is not None:
        _leave_read_linears(model, linears, made, inputs)
    _report(model, linears, made)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # By the first, upstream refuses to train it. A push would make a repository before it saves.
            vars(module).update(is_quantized=True)
            vars(module).update({name: partial(_refuse, name) for name in ("save_pretrained", "push_to_hub")})
            for name, function in METHODS.items():
                vars(module)[name] = InstanceMethod(function, module)
            if isinstance(module.get_output_embeddings(), PackedLinear):
                names = ("resize_token_embeddings", "tie_weights")
                vars(module).update({name: partial(_refuse, name) for name in names})
    return model


def _measured(
    model: PreTrainedModel, linears: dict[str, nn.Linear], example_inputs: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """Return inputs that the model runs on, and the rounding error of each layer; None if a guess does not run."""
    if example_inputs is not None:
        return example_inputs, rounding_errors(model, linears, example_inputs)
    try:
        inputs = make_example_inputs(model)
        return inputs, rounding_errors(model, linears, inputs)
    except Exception as error:  # whatever the code of a model raises for inputs that it was not made for
        logger.warning(
            "`quantize` could not run this %s on a random batch (%s: %s), so it has not measured which layers int8 "
            "suits. Pass `example_inputs`, the keyword arguments of one call.",
            type(model).__name__,
            type(error).__name__,
            error,
        )
    named = getattr(model, "_keep_in_fp32_modules", None) or ()
    return None, {path: math.inf for path in linears if is_named(path, named)}


def _packed(
    model: PreTrainedModel, linears: dict[str, nn.Linear], errors: dict[str, float]
) -> dict[int, PackedLinear]:
    """Return the packed layer of each linear layer that gets one, by the id of the linear layer."""
    float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    made: dict[int, PackedLinear] = {}
    for path, linear in linears.items():
        if id(linear) in made or is_named(path, float32):
            continue
        if errors.get(path, 0.0) <= MOST_ERROR:
            made[id(linear)] = Int8Linear(linear)
        elif has_fast_bfloat16():
            made[id(linear)] = Bfloat16Linear(linear)
    return made


def _replace(model: PreTrainedModel, linears: dict[str, nn.Linear], made: dict[int, PackedLinear]) -> None:
    """Put the packed layers in their places, and the linear layers that have none in theirs."""
    for path, linear in linears.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, made.get(id(linear), linear))


def _leave_read_linears(
    model: PreTrainedModel, linears: dict[str, nn.Linear], made: dict[int, PackedLinear], inputs: dict[str, Any]
) -> None:
    """Run the model, and take back the packed layers whose weight its code reads.

    Raises:
        ValueError: if the model fails for another reason. The model is unchanged then.
    """
    while True:
        with recorded_reads() as reads, torch.no_grad():
            try:
                model(**inputs)
                return
            except Exception as error:  # whatever reading the weight of a packed layer leads to
                cause = reads[-1] if reads else None
                places = {
                    re.sub(r"\d+", "", path) for path, linear in linears.items() if made.get(id(linear)) is cause
                }
                if cause is None or not places:
                    made.clear()
                    _replace(model, linears, made)
                    raise ValueError(
                        f"This {type(model).__name__} does not run with int8 layers: {error}. The model is unchanged."
                    ) from error
        for path, linear in linears.items():
            if re.sub(r"\d+", "", path) in places:
                made.pop(id(linear), None)
        _replace(model, linears, made)


def _report(model: PreTrainedModel, linears: dict[str, nn.Linear], made: dict[int, PackedLinear]) -> None:
    """Log what was done, and warn if an int8 layer is slower than a float32 one on this processor."""
    kinds = Counter(type(packed).__name__ for packed in made.values())
    logger.info(
        "Quantized %d linear layers to int8 (inputs of %d bits, multiplied by %s) and %d to bfloat16; %d stay in "
        "float32.",
        kinds["Int8Linear"],
        current_plan().bits,
        current_plan(),
        kinds["Bfloat16Linear"],
        len({id(linear) for linear in linears.values()}) - len(made),
    )
    pairs = [(linear, made[id(linear)]) for linear in linears.values() if isinstance(made.get(id(linear)), Int8Linear)]
    if not pairs:
        return
    common = Counter(linear.weight.shape for linear, _ in pairs).most_common(1)[0][0]
    linear, packed = next(pair for pair in pairs if pair[0].weight.shape == common)
    ratios = {}
    for what, rows in TIMED_ROWS.items():
        states = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            float32, int8 = least_seconds(functools.partial(linear, states), functools.partial(packed, states))
        ratios[what] = int8 / float32
    if min(ratios.values()) > 1 or max(ratios.values()) > MUCH_SLOWER:
        figures = ", ".join(f"{ratio:.1f} times as long as in float32 for {what}" for what, ratio in ratios.items())
        logger.warning(
            "int8 is not faster than float32 on this processor for every call: a layer of %d x %d takes %s. The model "
            "needs less memory.",
            linear.out_features,
            linear.in_features,
            figures,
        )


def _refuse(method: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"`{method}` needs the float32 model, because the weights of this one are packed as int8. Call it before "
        "`quantize`, or load the model again. (`state_dict()` holds the int8 weights.)"
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
    raise ValueError(
        f"`model` must be a model of Transformers, got {type(model).__name__}. Load the model first, compile it "
        "afterwards, and merge an adapter with `merge_and_unload()`."
    )


def _check_state(model: PreTrainedModel) -> None:
    """Check the mode of a model and its numbers.

    Raises:
        ValueError: with what it has and what is asked.
    """
    name = type(model).__name__
    if getattr(model, "is_quantized", False) or _is_quantized(model):
        raise ValueError(f"This {name} is quantized already.")
    if any(module.training for module in model.modules()):
        raise ValueError(f"This {name} is in training mode: call `model.eval()` before.")
    for path, numbers in (*model.named_parameters(), *model.named_buffers()):
        is_float32 = not numbers.is_floating_point() or numbers.dtype == torch.float32
        if numbers.device.type != "cpu" or not is_float32:
            raise ValueError(
                f"`{path}` of this {name} must be float32 on a CPU, got {numbers.dtype} on {numbers.device}. On a GPU "
                "use `model.to(torch.bfloat16)` instead."
            )


def _is_quantized(model: nn.Module) -> bool:
    """Return whether a quantization library, or this package, has changed a module or a parameter."""
    modules = any(isinstance(m, PackedLinear) or type(m).__module__.startswith(QUANTISERS) for m in model.modules())
    return modules or any(type(parameter) is not nn.Parameter for parameter in model.parameters())


def _check_linears(model: PreTrainedModel, linears: dict[str, nn.Linear]) -> None:
    """Check that there are linear layers to quantize, and that each is no more than its weight and bias.

    Raises:
        ValueError: if not.
    """
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ValueError(f"`{path}` is a {type(module).__name__} of peft: merge the adapter before.")
    if not linears:
        raise ValueError(
            f"This {type(model).__name__} has no linear layer of {LEAST_WEIGHTS} weights or more, and smaller "
            "ones gain nothing in int8."
        )
    for path, linear in linears.items():
        if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
            raise ValueError(
                f"`{path}` has a hook or a `forward` of its own (accelerate's offloading does so), which would be "
                "lost: take it off before."
            )
        if not linear.weight.isfinite().all():
            raise ValueError(f"`{path}.weight` has numbers that are not finite.")
