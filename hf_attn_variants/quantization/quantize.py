"""The `quantize` function, which prepares a loaded model for inference on CPUs.

It quantizes the linear layers to int8, or converts the whole model to bfloat16.
"""

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
from .int8_weight import check_int8_support, get_current_plan, time_calls_in_turn
from .packed_linear import (
    MAX_ERROR,
    MIN_WEIGHTS,
    Bfloat16Linear,
    Int8Linear,
    PackedLinear,
    contains_module_name,
    find_large_linears,
    has_fast_bfloat16,
    make_example_inputs,
    measure_rounding_errors,
    record_weight_reads,
)

logger = logging.getLogger(f"transformers.{__name__}")

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

QUANTIZED_DTYPES = ("int8", "bfloat16")
# A warning is logged if the ratio of int8 time to float32 time exceeds this value. A decoding step may be slightly
# slower in int8 if whole texts are faster.
INT8_WARNING_RATIO = 1.5
# The prefixes of the modules in which quantization libraries define their linear layers.
QUANTIZATION_LIBRARIES = ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "auto_gptq.", "hqq.")


def quantize(model: ModelT, dtype: str | torch.dtype = "int8", example_inputs: dict[str, Any] | None = None) -> ModelT:
    """Quantize a model's linear layers to int8, or convert the whole model to bfloat16, for inference on a CPU.

    The model is modified in place, which cannot be undone. Use `copy.deepcopy(model)` to keep the float32 model. The
    model may be a variant from this package or any Transformers model. If you also use `share_memory`, call it first.

    With int8, each weight has one scale per row. When a layer is called, each input token is rounded relative to its
    largest value. The model runs once on a small batch before it is modified. Layers whose inputs have outliers are
    converted to bfloat16 if it is fast on the processor, and otherwise remain in float32. Embeddings, norms,
    convolutions, relative position biases, small layers, and layers that are not called because other modules read
    their weight also remain in float32. The model cannot be trained afterwards.

    Args:
        model: A float32 model in evaluation mode on a CPU.
        dtype: "int8" or "bfloat16".
        example_inputs: Keyword arguments for one call of the model, preferably with real data. By default, a random
            batch is used.

    Returns:
        The same model.

    Raises:
        ValueError: If the model cannot be quantized. In this case, it is left unchanged.

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
    check_int8_support()
    linears = find_large_linears(model)
    _check_linears(model, linears)
    inputs, errors = _measure_errors(model, linears, example_inputs)
    packed_layers = _pack_linears(model, linears, errors)
    _replace_linears(model, linears, packed_layers)
    if inputs is not None:
        _restore_uncalled_linears(model, linears, packed_layers, inputs)
    _log_summary(model, linears, packed_layers)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # `Trainer` does not train models with `is_quantized`. `push_to_hub` would create a repository and then
            # fail to save the model.
            unsupported = ["save_pretrained", "push_to_hub"]
            if isinstance(module.get_output_embeddings(), PackedLinear):
                unsupported += ["resize_token_embeddings", "tie_weights"]
            vars(module).update({name: partial(_raise_unsupported, name) for name in unsupported}, is_quantized=True)
            methods = {name: InstanceMethod(function, module) for name, function in REPLACED_METHODS.items()}
            vars(module).update(methods)
    return model


def _measure_errors(
    model: PreTrainedModel, linears: dict[str, nn.Linear], example_inputs: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """Return inputs for the model and the rounding error of each layer.

    If the model does not run on a random batch, the inputs are None, and the error is infinite for those layers that
    Transformers keeps in float32 when a model is loaded in half precision.
    """
    if example_inputs is not None:
        return example_inputs, measure_rounding_errors(model, linears, example_inputs)
    try:
        inputs = make_example_inputs(model)
        return inputs, measure_rounding_errors(model, linears, inputs)
    except Exception as error:  # models may raise any error for unsuitable inputs
        message = "`quantize` could not run %s on a random batch (%s: %s) and therefore cannot measure the error of "
        message += "each layer. Pass the keyword arguments for one call as `example_inputs`."
        logger.warning(message, type(model).__name__, type(error).__name__, error)
    float32_names = getattr(model, "_keep_in_fp32_modules", None) or ()
    return None, {path: math.inf for path in linears if contains_module_name(path, float32_names)}


def _pack_linears(
    model: PreTrainedModel, linears: dict[str, nn.Linear], errors: dict[str, float]
) -> dict[int, PackedLinear]:
    """Pack the layers that are to be replaced, and return {id of the linear layer: packed layer}."""
    float32_names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    packed_layers: dict[int, PackedLinear] = {}
    for path, linear in linears.items():
        if id(linear) in packed_layers or contains_module_name(path, float32_names):
            continue
        if errors.get(path, 0.0) <= MAX_ERROR:
            packed_layers[id(linear)] = Int8Linear(linear)
        elif has_fast_bfloat16():
            packed_layers[id(linear)] = Bfloat16Linear(linear)
    return packed_layers


def _replace_linears(
    model: PreTrainedModel, linears: dict[str, nn.Linear], packed_layers: dict[int, PackedLinear]
) -> None:
    """Replace each linear layer with its packed layer, and restore the linear layers without a packed layer."""
    for path, linear in linears.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, packed_layers.get(id(linear), linear))


def _restore_uncalled_linears(
    model: PreTrainedModel,
    linears: dict[str, nn.Linear],
    packed_layers: dict[int, PackedLinear],
    inputs: dict[str, Any],
) -> None:
    """Run the model, and restore each linear layer that is not called because its weight is read directly.

    Args:
        model: The model with packed layers.
        linears: The linear layers, as {path: layer}.
        packed_layers: The packed layers. The entries for restored layers are removed.
        inputs: The keyword arguments for a call of the model.

    Raises:
        ValueError: If the model fails for another reason. In this case, it is left unchanged.
    """
    while True:
        with record_weight_reads() as reads, torch.no_grad():
            try:
                model(**inputs)
                return
            except Exception as error:  # reading the weight of a packed layer may raise any error
                cause = reads[-1] if reads else None
                # Layers at the same path in other blocks are also restored.
                patterns = {
                    re.sub(r"\d+", "", path)
                    for path, linear in linears.items()
                    if packed_layers.get(id(linear)) is cause
                }
                if cause is None or not patterns:
                    packed_layers.clear()
                    _replace_linears(model, linears, packed_layers)
                    raise ValueError(
                        f"{type(model).__name__} does not run with int8 layers: {error}. The model was left unchanged."
                    ) from error
        for path, linear in linears.items():
            if re.sub(r"\d+", "", path) in patterns:
                packed_layers.pop(id(linear), None)
        _replace_linears(model, linears, packed_layers)


def _log_summary(
    model: PreTrainedModel, linears: dict[str, nn.Linear], packed_layers: dict[int, PackedLinear]
) -> None:
    """Log the number of quantized layers, and warn if int8 is slower than float32 on this processor."""
    kinds, plan = Counter(type(packed).__name__ for packed in packed_layers.values()), get_current_plan()
    num_unchanged = len({id(linear) for linear in linears.values()}) - len(packed_layers)
    message = "Quantized %d linear layers to int8 (%d-bit inputs, multiplied with %s) and %d to bfloat16. "
    message += "%d remain in float32."
    logger.info(message, kinds["Int8Linear"], plan.bits, plan, kinds["Bfloat16Linear"], num_unchanged)
    layers: list[tuple[nn.Linear, Any]] = [(linear, packed_layers.get(id(linear))) for linear in linears.values()]
    pairs = [(linear, packed) for linear, packed in layers if isinstance(packed, Int8Linear)]
    if not pairs:
        return
    common = Counter(linear.weight.shape for linear, _ in pairs).most_common(1)[0][0]
    linear, packed = next(pair for pair in pairs if pair[0].weight.shape == common)
    ratios = {}
    for product_name, rows in TIMED_ROWS.items():
        states = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0))
        ratios[product_name] = _measure_slowdown(partial(linear, states), partial(packed, states))
    if min(ratios.values()) > 1 or max(ratios.values()) > INT8_WARNING_RATIO:
        message = "int8 is not always faster than float32 on this processor: a %d x %d layer takes %s. The model "
        message += "still requires less memory."
        logger.warning(message, linear.out_features, linear.in_features, _format_ratios(ratios))


def _measure_slowdown(float32_call: Callable[[], Any], call: Callable[[], Any]) -> float:
    """Return the ratio of the time of a call to the time of the same call in float32."""
    with torch.no_grad():
        float32, seconds = time_calls_in_turn(float32_call, call)
    return seconds / float32


def _format_ratios(ratios: dict[str, float]) -> str:
    return ", ".join(
        f"{ratio:.1f} times as long as in float32 for {product_name}" for product_name, ratio in ratios.items()
    )


def _raise_unsupported(method: str, *args: Any, **kwargs: Any) -> None:
    """Raise `ValueError` instead of running a model method that requires float32 weights."""
    raise ValueError(
        f"`{method}` requires the float32 model, because the weights of this model are packed as int8. Call it before "
        "`quantize`, or load the model again. (`state_dict()` contains the int8 weights.)"
    )


def _num_parameters(module: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Return the number of parameters, including the elements of the packed layers, which are not trainable."""
    packed = sum(linear.count_elements() for linear in module.modules() if isinstance(linear, PackedLinear))
    parameters = type(module).num_parameters(module, only_trainable, exclude_embeddings)
    return parameters if only_trainable else parameters + packed


def _get_memory_footprint(module: PreTrainedModel, return_buffers: bool = True) -> int:
    """Return the size of the model in bytes, including its packed layers."""
    packed = sum(linear.count_bytes() for linear in module.modules() if isinstance(linear, PackedLinear))
    return int(type(module).get_memory_footprint(module, return_buffers)) + packed


def _apply_without_cast(
    module: PreTrainedModel, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Check that a function preserves the dtype and device, and apply it to each tensor.

    `to` and `bfloat16` call this method.

    Raises:
        ValueError: If the function changes the dtype or device. In this case, no tensor is modified.
    """
    result = fn(torch.empty(0, dtype=torch.float32, device="cpu"))
    if result.dtype != torch.float32 or result.device.type != "cpu":
        raise ValueError(
            f"{type(module).__name__} has int8 layers and must therefore remain in float32 on a CPU, got "
            f"{result.dtype} on {result.device}. Load the model again to convert it."
        )
    return type(module)._apply(module, fn, *args, **kwargs)


# The methods that are replaced in quantized models.
REPLACED_METHODS: dict[str, Callable[..., Any]] = {
    "_apply": _apply_without_cast,
    "num_parameters": _num_parameters,
    "get_memory_footprint": _get_memory_footprint,
}


def _check_model_type(model: Any) -> None:
    """Raise `ValueError` if an object is not a Transformers model or is compiled."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"`model` must be a Transformers model, got {type(model).__name__}. Load the model first, compile it "
            "afterwards, and merge adapters with `merge_and_unload()`."
        )
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is compiled. Call `quantize` before compiling the model.")


def _check_state(model: PreTrainedModel) -> None:
    """Check that a model is in evaluation mode, in float32, on a CPU, and not quantized.

    Raises:
        ValueError: If one of these conditions is not met.
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
    """Return whether a quantization library or this package has replaced modules or parameters of a model."""
    classes = {type(module) for module in model.modules()}
    is_replaced = any(issubclass(c, PackedLinear) or c.__module__.startswith(QUANTIZATION_LIBRARIES) for c in classes)
    return is_replaced or any(type(parameter) is not nn.Parameter for parameter in model.parameters())


def _check_linears(model: PreTrainedModel, linears: dict[str, nn.Linear]) -> None:
    """Check that there are linear layers to quantize, and that they are ordinary layers with finite weights.

    Raises:
        ValueError: If this is not the case.
    """
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ValueError(f"`{path}` is a PEFT module ({type(module).__name__}). Call `merge_and_unload()` first.")
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no linear layers with at least {MIN_WEIGHTS} weights. Smaller layers do not "
            "benefit from int8."
        )
    for path, linear in linears.items():
        if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
            raise ValueError(
                f"`{path}` has a hook or a replaced `forward` (from Accelerate offloading, for example), which "
                "would be lost. Remove it first."
            )
        if not linear.weight.isfinite().all():
            raise ValueError(f"`{path}.weight` must be finite. Check the checkpoint.")


# The row counts and sizes of the timed products, for a decoding step and a text in a feed-forward layer of T5-small.
TIMED_ROWS, WIDTH, INNER = {"a step with 4 rows": 4, "a text with 64 tokens": 64}, 512, 2048
# A warning is logged if the ratio of bfloat16 time to float32 time exceeds this value. Smaller ratios may be noise.
BFLOAT16_WARNING_RATIO = 1.1


def convert_to_bfloat16(model: PreTrainedModel) -> None:
    """Convert a model to bfloat16 in place, and warn if bfloat16 is slower than float32 on this processor.

    Parameters and buffers that `from_pretrained(dtype=torch.bfloat16)` keeps in float32 remain in float32.
    """
    ratios = measure_bfloat16_slowdowns(torch.get_num_threads())
    if max(ratios.values()) > BFLOAT16_WARNING_RATIO:
        message = "bfloat16 is slow on this processor: a product takes %s. The model requires half the memory, but "
        message += 'more time. `quantize(model, "int8")` may reduce both.'
        logger.warning(message, _format_ratios(ratios))
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    float32_parameters: dict[Any, torch.Tensor] = {
        parameter: parameter.data for path, parameter in model.named_parameters() if contains_module_name(path, names)
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
    """Return the paths of the buffers that remain float32 in a bfloat16 model, such as RoPE frequencies.

    Like `from_pretrained`, this function creates the model with bfloat16 as the default torch dtype, but on the meta
    device, which does not allocate memory.
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
    """Return the ratio of the bfloat16 time to the float32 time for each timed product, as {product: ratio}.

    The products are timed once per process and number of threads.

    Args:
        threads: The current number of torch threads, which is only used as a cache key.
    """
    ratios = {}
    for product_name, rows in TIMED_ROWS.items():
        states, weight = (torch.full((size, WIDTH), 0.01, dtype=torch.float32) for size in (rows, INNER))
        float32 = partial(nn.functional.linear, states, weight)
        ratios[product_name] = _measure_slowdown(
            float32, partial(nn.functional.linear, states.bfloat16(), weight.bfloat16())
        )
    return ratios
