"""`quantize`: convert a loaded model to int8 linear layers, or to bfloat16, for a CPU."""

import copy
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

from ..model_properties import InstanceMethod
from .int8_weight import check_engine, current_plan, time_in_turns
from .packed_linear import (
    MAX_ERROR,
    MIN_WEIGHTS,
    Bfloat16Linear,
    Int8Linear,
    PackedLinear,
    find_large_linears,
    has_fast_bfloat16,
    make_example_inputs,
    matches_name,
    measure_rounding_errors,
    record_weight_reads,
)

logger = logging.getLogger(f"transformers.{__name__}")

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

QUANTIZED_DTYPES = ("int8", "bfloat16")
# A warning is logged above this ratio of times. A decoding step may be a little slower in int8 if texts are faster.
INT8_WARNING_RATIO = 1.5
# The prefixes of the modules that define the linear layers of quantization libraries.
QUANTIZATION_LIBRARIES = ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "auto_gptq.", "hqq.")


def quantize(model: ModelT, dtype: str | torch.dtype = "int8", example_inputs: dict[str, Any] | None = None) -> ModelT:
    """Quantize the linear layers of a loaded model to int8, or convert the whole model to bfloat16, for a CPU.

    The model is changed in place and cannot be changed back; `copy.deepcopy(model)` keeps the float32 model. It may be
    a variant of this package or any model of Transformers. Call `share_memory` before `quantize` if you use both.

    With int8, each weight has one scale per row, and each token of the inputs is rounded by its own largest number
    when the layer is called. The model runs once on a small batch before it is changed. Layers whose inputs have
    outliers become bfloat16 if the processor has fast bfloat16, and stay in float32 otherwise. Embeddings, norms,
    convolutions, relative positions and small layers stay in float32, and so do layers whose weight the model's code
    reads instead of calling the layer. The model cannot be trained afterwards.

    Args:
        model: A float32 model in evaluation mode on a CPU.
        dtype: "int8" or "bfloat16".
        example_inputs: The keyword arguments of one call of the model, with real data if possible. By default, a
            random batch is used.

    Returns:
        The same model.

    Raises:
        ValueError: If the model cannot be quantized. The model is unchanged then.

    Example:
        >>> model = AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2").eval()
        >>> quantize(model)
    """
    name = str(dtype).removeprefix("torch.")
    if name not in QUANTIZED_DTYPES:
        raise ValueError(f'`dtype` must be "int8" or "bfloat16", got {dtype!r}.')
    _check_model_type(model)
    _check_state(model)
    if name == "bfloat16":
        convert_to_bfloat16(model)
        return model
    check_engine()
    linears = find_large_linears(model)
    _check_linears(model, linears)
    inputs, errors = _measure_errors(model, linears, example_inputs)
    packed_layers = _pack_linears(model, linears, errors)
    _replace_linears(model, linears, packed_layers)
    if inputs is not None:
        _restore_read_linears(model, linears, packed_layers, inputs)
    _log_summary(model, linears, packed_layers)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # `Trainer` does not train a model with `is_quantized`. `push_to_hub` would create a repository and then
            # fail to save.
            vars(module).update(is_quantized=True)
            vars(module).update(
                {name: partial(_raise_unsupported, name) for name in ("save_pretrained", "push_to_hub")}
            )
            for name, function in REPLACED_METHODS.items():
                vars(module)[name] = InstanceMethod(function, module)
            if isinstance(module.get_output_embeddings(), PackedLinear):
                names = ("resize_token_embeddings", "tie_weights")
                vars(module).update({name: partial(_raise_unsupported, name) for name in names})
    return model


def _measure_errors(
    model: PreTrainedModel, linears: dict[str, nn.Linear], example_inputs: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """Return the inputs for a call of the model, and the rounding error of each layer.

    If a random batch does not work, the inputs are None, and layers that Transformers keeps in float32 in half
    precision get an infinite error.
    """
    if example_inputs is not None:
        return example_inputs, measure_rounding_errors(model, linears, example_inputs)
    try:
        inputs = make_example_inputs(model)
        return inputs, measure_rounding_errors(model, linears, inputs)
    except Exception as error:  # a model may raise any error for unsuitable inputs
        logger.warning(
            "`quantize` could not run %s on a random batch (%s: %s), so that it cannot measure the error of each "
            "layer. Pass `example_inputs`, the keyword arguments of one call.",
            type(model).__name__,
            type(error).__name__,
            error,
        )
    float32_names = getattr(model, "_keep_in_fp32_modules", None) or ()
    return None, {path: math.inf for path in linears if matches_name(path, float32_names)}


def _pack_linears(
    model: PreTrainedModel, linears: dict[str, nn.Linear], errors: dict[str, float]
) -> dict[int, PackedLinear]:
    """Return {id of the linear layer: packed layer} for the layers that are replaced."""
    float32_names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    packed_layers: dict[int, PackedLinear] = {}
    for path, linear in linears.items():
        if id(linear) in packed_layers or matches_name(path, float32_names):
            continue
        if errors.get(path, 0.0) <= MAX_ERROR:
            packed_layers[id(linear)] = Int8Linear(linear)
        elif has_fast_bfloat16():
            packed_layers[id(linear)] = Bfloat16Linear(linear)
    return packed_layers


def _replace_linears(
    model: PreTrainedModel, linears: dict[str, nn.Linear], packed_layers: dict[int, PackedLinear]
) -> None:
    """Replace each linear layer by its packed layer, and restore the linear layers that do not have one."""
    for path, linear in linears.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, packed_layers.get(id(linear), linear))


def _restore_read_linears(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    packed_layers: dict[int, PackedLinear],
    inputs: dict[str, Any],
) -> None:
    """Run the model, and restore the linear layers whose weight its code reads instead of calling the layer.

    Args:
        model: The model with packed layers.
        linears: The linear layers by path.
        packed_layers: The packed layers. The entries of the restored layers are removed.
        inputs: The keyword arguments of a call.

    Raises:
        ValueError: If the model fails for another reason. The model is unchanged then.
    """
    while True:
        with record_weight_reads() as reads, torch.no_grad():
            try:
                model(**inputs)
                return
            except Exception as error:  # reading the weight of a packed layer may raise any error
                cause = reads[-1] if reads else None
                # The layers at the same path in other blocks are restored too.
                patterns = {
                    re.sub(r"\d+", "", path)
                    for path, linear in linears.items()
                    if packed_layers.get(id(linear)) is cause
                }
                if cause is None or not patterns:
                    packed_layers.clear()
                    _replace_linears(model, linears, packed_layers)
                    raise ValueError(
                        f"{type(model).__name__} does not run with int8 layers: {error}. The model is unchanged."
                    ) from error
        for path, linear in linears.items():
            if re.sub(r"\d+", "", path) in patterns:
                packed_layers.pop(id(linear), None)
        _replace_linears(model, linears, packed_layers)


def _log_summary(
    model: PreTrainedModel, linears: dict[str, nn.Linear], packed_layers: dict[int, PackedLinear]
) -> None:
    """Log the numbers of quantized layers, and warn if int8 is slower than float32 on this processor."""
    kinds = Counter(type(packed).__name__ for packed in packed_layers.values())
    logger.info(
        "Quantized %d linear layers to int8 (inputs of %d bits, multiplied by %s) and %d to bfloat16; %d stay in "
        "float32.",
        kinds["Int8Linear"],
        current_plan().bits,
        current_plan(),
        kinds["Bfloat16Linear"],
        len({id(linear) for linear in linears.values()}) - len(packed_layers),
    )
    pairs = [
        (linear, packed_layers[id(linear)])
        for linear in linears.values()
        if isinstance(packed_layers.get(id(linear)), Int8Linear)
    ]
    if not pairs:
        return
    common = Counter(linear.weight.shape for linear, _ in pairs).most_common(1)[0][0]
    linear, packed = next(pair for pair in pairs if pair[0].weight.shape == common)
    ratios = {}
    for what, rows in TIMED_ROWS.items():
        states = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            float32, int8 = time_in_turns(functools.partial(linear, states), functools.partial(packed, states))
        ratios[what] = int8 / float32
    if min(ratios.values()) > 1 or max(ratios.values()) > INT8_WARNING_RATIO:
        figures = ", ".join(f"{ratio:.1f} times as long as in float32 for {what}" for what, ratio in ratios.items())
        logger.warning(
            "int8 is not faster than float32 on this processor for every call: a layer of %d x %d takes %s. The model "
            "needs less memory.",
            linear.out_features,
            linear.in_features,
            figures,
        )


def _raise_unsupported(method: str, *args: Any, **kwargs: Any) -> None:
    """Raise `ValueError` instead of running a method of the model that needs float32 weights."""
    raise ValueError(
        f"`{method}` needs the float32 model, because the weights of this one are packed as int8. Call it before "
        "`quantize`, or load the model again. (`state_dict()` holds the int8 weights.)"
    )


def _list_packed_linears(model: PreTrainedModel) -> list[PackedLinear]:
    """Return the packed layers of a model."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def _num_parameters(module: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Return the number of parameters, with the elements of the packed layers, which are not trainable."""
    packed = [] if only_trainable else _list_packed_linears(module)
    return type(module).num_parameters(module, only_trainable, exclude_embeddings) + sum(
        linear.num_numbers() for linear in packed
    )


def _get_memory_footprint(module: PreTrainedModel, return_buffers: bool = True) -> int:
    """Return the bytes of the model, with its packed layers."""
    packed = sum(linear.num_bytes() for linear in _list_packed_linears(module))
    return int(type(module).get_memory_footprint(module, return_buffers)) + packed


def _apply_without_cast(
    module: PreTrainedModel, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Apply a function to each tensor (`to` and `bfloat16` call this), unless it changes the dtype or the device.

    Raises:
        ValueError: If it does. No tensor is changed then.
    """
    result = fn(torch.empty(0, dtype=torch.float32, device="cpu"))
    if result.dtype != torch.float32 or result.device.type != "cpu":
        raise ValueError(
            f"{type(module).__name__} has int8 layers, so that it must stay float32 on a CPU, got {result.dtype} on "
            f"{result.device}. Load the model again to convert it."
        )
    return type(module)._apply(module, fn, *args, **kwargs)


# The methods that are replaced in a quantized model.
REPLACED_METHODS: dict[str, Callable[..., Any]] = {
    "_apply": _apply_without_cast,
    "num_parameters": _num_parameters,
    "get_memory_footprint": _get_memory_footprint,
}


def _check_model_type(model: Any) -> None:
    """Raise `ValueError` if an object is not a Transformers model or is compiled."""
    if isinstance(model, PreTrainedModel):
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            raise ValueError(f"{type(model).__name__} is compiled. Call `quantize` before you compile the model.")
        return
    raise ValueError(
        f"`model` must be a model of Transformers, got {type(model).__name__}. Load the model first, compile it "
        "afterwards, and merge an adapter with `merge_and_unload()`."
    )


def _check_state(model: PreTrainedModel) -> None:
    """Check that a model is in evaluation mode, float32 and on a CPU, and not quantized.

    Raises:
        ValueError: If it is not.
    """
    name = type(model).__name__
    if getattr(model, "is_quantized", False) or _is_quantized(model):
        raise ValueError(f"{name} is already quantized. Load the model again to quantize it differently.")
    if any(module.training for module in model.modules()):
        raise ValueError(f"{name} must not be in training mode. Call `model.eval()` first.")
    for path, numbers in (*model.named_parameters(), *model.named_buffers()):
        is_float32 = not numbers.is_floating_point() or numbers.dtype == torch.float32
        if numbers.device.type != "cpu" or not is_float32:
            raise ValueError(
                f"`{path}` of {name} must be float32 on a CPU, got {numbers.dtype} on {numbers.device}. On a GPU, use "
                "`model.to(torch.bfloat16)` instead."
            )


def _is_quantized(model: nn.Module) -> bool:
    """Return whether a quantization library or this package has replaced a module or a parameter."""
    modules = any(
        isinstance(m, PackedLinear) or type(m).__module__.startswith(QUANTIZATION_LIBRARIES) for m in model.modules()
    )
    return modules or any(type(parameter) is not nn.Parameter for parameter in model.parameters())


def _check_linears(model: PreTrainedModel, linears: dict[str, nn.Linear]) -> None:
    """Check that there are linear layers to quantize, and that they are ordinary layers with finite weights.

    Raises:
        ValueError: If they are not.
    """
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ValueError(f"`{path}` is a {type(module).__name__} of peft. Call `merge_and_unload()` first.")
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no linear layer with at least {MIN_WEIGHTS} weights. Smaller layers do not "
            "benefit from int8."
        )
    for path, linear in linears.items():
        if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
            raise ValueError(
                f"`{path}` has a hook or a replaced `forward` (of the offloading of accelerate, for example), which "
                "would be lost. Remove it first."
            )
        if not linear.weight.isfinite().all():
            raise ValueError(f"`{path}.weight` must be finite. Check the checkpoint.")


# The timed products: the rows of a decoding step and of a text, with a feed-forward layer of the size of T5-small.
TIMED_ROWS, WIDTH, INNER = {"a step of 4 rows": 4, "a text of 64 tokens": 64}, 512, 2048
# A smaller ratio of times may be noise.
BFLOAT16_WARNING_RATIO = 1.1


def convert_to_bfloat16(model: PreTrainedModel) -> None:
    """Convert a model to bfloat16 in place, and warn if bfloat16 is slower than float32 on this processor.

    Parameters and buffers that `from_pretrained(dtype=torch.bfloat16)` keeps in float32 stay in float32.
    """
    ratios = measure_bfloat16_slowdowns(torch.get_num_threads())
    if max(ratios.values()) > BFLOAT16_WARNING_RATIO:
        figures = ", ".join(f"{ratio:.1f} times as long as in float32 for {what}" for what, ratio in ratios.items())
        logger.warning(
            "bfloat16 is slow on this processor: a product takes %s. The model needs half of the memory, but more "
            'time. `quantize(model, "int8")` may reduce both.',
            figures,
        )
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    float32_parameters: dict[Any, torch.Tensor] = {
        parameter: parameter.data for path, parameter in model.named_parameters() if matches_name(path, names)
    }
    float32_paths = _find_float32_buffers(model)
    buffers = [(path, buffer) for path, buffer in model.named_buffers() if path in float32_paths]
    to: Any = model.to  # typed as Any, because the Transformers wrapper hides the signature
    to(torch.bfloat16)
    for parameter, data in float32_parameters.items():
        parameter.data = data
    for path, buffer in buffers:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._buffers[name] = buffer


def _find_float32_buffers(model: PreTrainedModel) -> set[str]:
    """Return the paths of the buffers that are float32 in a bfloat16 model (the frequencies of RoPE, for example).

    Like `from_pretrained`, this function creates the model while the default dtype of torch is bfloat16, but on the
    meta device, which needs no memory.
    """
    default, cls = torch.get_default_dtype(), type(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            bfloat16_model: Any = cls(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(default)
    return {path for path, buffer in bfloat16_model.named_buffers() if buffer.dtype == torch.float32}


@functools.cache
@torch.autocast("cpu", enabled=False)
def measure_bfloat16_slowdowns(threads: int) -> dict[str, float]:
    """Return the time of products in bfloat16 divided by their time in float32, {product: ratio}.

    The products are timed once per process and number of threads.

    Args:
        threads: The current number of threads of torch, which is the key of the cache.
    """
    ratios = {}
    for what, rows in TIMED_ROWS.items():
        pairs = [
            (torch.full((rows, WIDTH), 0.01, dtype=dtype), torch.full((INNER, WIDTH), 0.01, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
        ]
        with torch.no_grad():
            float32, bfloat16 = time_in_turns(
                *(functools.partial(torch.nn.functional.linear, *pair) for pair in pairs)
            )
        ratios[what] = bfloat16 / float32
    return ratios
