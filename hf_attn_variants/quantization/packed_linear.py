"""Linear layers with packed int8 or bfloat16 weights, and the selection of layers to quantize."""

import functools
import itertools
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..shared_memory.attention import ENCODER_OUTPUTS, SharedMemoryMixin
from .int8_weight import MAX_WEIGHT, Int8Weight, has_instruction_set, round_inputs, time_calls_in_turn

# The minimum number of weights in a layer to quantize. For a few tokens, smaller layers are not faster in int8, and
# they require little memory. (With AVX-512 VNNI, 256 x 256 layers in int8 made a small T5 model 1.16 times as fast for
# 16 texts.)
MIN_WEIGHTS = 2**16
# The maximum relative error that rounding the inputs of an int8 layer may cause in its outputs. The error is 0.01 for
# inputs without outliers, and up to 0.04 in MiniLM. For the output layer in flan-T5 (small), it is 0.16, which changes
# the most likely token in one of seven cases.
MAX_ERROR = 0.05
# The size of the example batch, and the maximum number of its rows on which the error of a layer is measured.
EXAMPLE_TEXTS, EXAMPLE_TOKENS, MEASURED_ROWS = 4, 16, 64


def find_large_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers in a model that are large enough to be quantized, as {path: layer}.

    Subclasses of `nn.Linear` (the latent projections) are not included. The same applies to layers that are not called
    because an attention module that attends to latents or encoder outputs reads their weight directly.
    """
    directly_read_ids = {id(linear) for linear in _iterate_uncalled_linears(model)}
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and id(module) not in directly_read_ids and module.weight.numel() >= MIN_WEIGHTS
    }


def contains_module_name(path: str, names: Iterable[str]) -> bool:
    """Return whether the path of a module or parameter contains one of the names.

    Args:
        path: The path, such as "encoder.block.0.layer.1".
        names: Regular expressions that match one or more parts of a path.
    """
    return any(re.search(rf"(^|\.){name}(\.|$)", path) for name in names)


def make_example_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a small random batch for a text, audio or image model, based on its configuration."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name

    def make_text_batch(size: int) -> torch.Tensor:
        # The first ids are special tokens. Models whose positions begin at 2 (RoBERTa) support two tokens fewer.
        tokens = max(1, min(EXAMPLE_TOKENS, getattr(config, "max_position_embeddings", 512) - 4))
        return torch.randint(min(4, size - 1), size, (EXAMPLE_TEXTS, tokens), generator=generator)

    if name == "input_features":  # Whisper
        size = (1, config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {name: torch.randn(size, generator=generator)}
    elif name == "input_values":
        inputs = {name: torch.randn(1, 16_000, generator=generator)}
    elif name == "pixel_values":
        sides = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        inputs = {name: torch.randn(1, config.num_channels, *sides, generator=generator)}
    else:
        ids = make_text_batch(config.get_text_config().vocab_size)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder and model.get_decoder() is not model:
        inputs["decoder_input_ids"] = make_text_batch(config.get_text_config(decoder=True).vocab_size)
    return inputs


def measure_rounding_errors(
    model: nn.Module, linears: dict[str, nn.Linear], inputs: dict[str, Any]
) -> dict[str, float]:
    """Run a model once, and measure the error that rounding the inputs of each linear layer causes in its outputs.

    The error is relative to the variation of the outputs between tokens, because an output that is the same for all
    tokens (due to a very large input, for example) does not carry information.

    Args:
        model: The model.
        linears: The linear layers, as {path: layer}.
        inputs: The keyword arguments for the call.

    Returns:
        The relative error of each layer, as {path: error}. Layers that are not called are not included.
    """
    errors: dict[int, float] = {}

    def measure(linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].is_nested:
            return
        states = args[0].detach().float().reshape(-1, args[0].shape[-1])
        states = states[:: max(1, len(states) // MEASURED_ROWS)].contiguous()
        integers, step = round_inputs(states, MAX_WEIGHT)
        weight: Any = linear.weight
        outputs = nn.functional.linear(states, weight)
        error = nn.functional.linear((integers.float() - MAX_WEIGHT - 1) * step - states, weight)
        spread = (outputs - outputs.mean(0)).norm()
        if spread > 0:
            ratio = float((error - error.mean(0)).norm() / spread)
            errors[id(linear)] = max(errors.get(id(linear), 0.0), ratio)

    with ExitStack() as stack, torch.no_grad():
        for linear in {*linears.values()}:
            stack.callback(linear.register_forward_pre_hook(measure).remove)
        model(**inputs)
    return {path: errors[id(linear)] for path, linear in linears.items() if id(linear) in errors}


def _iterate_uncalled_linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the linear layers that are not called because an attention module reads their weight directly."""
    for module in model.modules():
        if isinstance(module, SharedMemoryMixin) and module.cross_cache == ENCODER_OUTPUTS:
            yield from module.key_value_projections()
        if isinstance(module, AttnVariantModelMixin):
            for site, _, attention in module.named_attention_modules():
                core: Any = attention.get_submodule(site.core)
                if core.heads.rank is not None:
                    yield from (attention.get_submodule(path) for path in (site.key, site.value))


# The instruction sets for bfloat16 products, named as in torch.
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
# The number of rows for which the weight layout is optimized. Other layouts (1 to 2048 rows) were equally fast with
# torch 2.13 and AMX.
LAYOUT_ROWS = 16
# The number of rows in the products that compare the speed of bfloat16 and float32. With this many rows, arithmetic
# takes most of the time, so the result is not affected by noise. On an Intel Xeon without AMX, bfloat16 took up to 1.9
# times as long as float32.
BFLOAT16_TIMED_ROWS = 256
_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_pack: Any = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", None)


class Bfloat16Weight:
    """A packed bfloat16 weight W [out, in].

    bfloat16 has the same range as float32, so large inputs do not affect the precision of other inputs.

    Args:
        weight: The weight, bfloat16 [out, in].
    """

    dtype = torch.bfloat16

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _pack(weight.contiguous(), LAYOUT_ROWS)
        self._out_features = len(weight)

    @classmethod
    def from_float32(cls, weight: torch.Tensor) -> "Bfloat16Weight":
        """Round a float32 weight [out, in] to a bfloat16 weight."""
        return cls(weight.to(torch.bfloat16))

    def compute_linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return W x + b [..., out] for float32 inputs x [..., in] with at least two dimensions."""
        if not states.numel():
            return states.new_empty(*states.shape[:-1], self._out_features)
        output: torch.Tensor = _linear(states.to(torch.bfloat16), self._packed, None, "none", [], "").float()
        return output if bias is None else output.add_(bias)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return the constructor arguments for an identical weight."""
        return {"weight": self._packed.to_dense()}

    def to_float32(self) -> torch.Tensor:
        """Return W in float32 [out, in]."""
        return self.to_tensors()["weight"].float()


@functools.cache
@torch.autocast("cpu", enabled=False)
def supports_bfloat16() -> bool:
    """Return whether this processor supports bfloat16, and oneDNN in torch computes correct bfloat16 products."""
    has_operators = None not in (_linear, _pack) and torch.backends.mkldnn.is_available()
    if not has_operators or not has_instruction_set(*BFLOAT16_INSTRUCTIONS):
        return False
    # The operators are private in torch, so their result must be checked.
    integers = torch.tensor([[3.0, -2.0, 0.5], [1.0, 2.0, -4.0]], device="cpu", dtype=torch.float32)
    try:
        weight = Bfloat16Weight.from_float32(integers)
        product, unpacked = weight.compute_linear(integers, None), weight.to_float32()
    except (RuntimeError, TypeError):
        return False
    return torch.equal(product, integers @ integers.t()) and torch.equal(unpacked, integers)


@functools.cache
@torch.autocast("cpu", enabled=False)
@torch.no_grad()
def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 products are correct and faster than float32 products on this processor."""
    if not supports_bfloat16():
        return False
    states, weight = torch.full((BFLOAT16_TIMED_ROWS, 512), 0.5), torch.full((512, 512), 0.5)
    packed = Bfloat16Weight.from_float32(weight)
    float32, bfloat16 = time_calls_in_turn(
        lambda: torch.nn.functional.linear(states, weight), lambda: packed.compute_linear(states, None)
    )
    return bfloat16 < float32


# All packed layers in the process, each with a unique number by which compiled graphs refer to the layer.
_registered_layers: "weakref.WeakValueDictionary[int, PackedLinear]" = weakref.WeakValueDictionary()
_layer_keys = itertools.count()


def _register_layer(linear: "PackedLinear") -> torch.Tensor:
    """Register a layer and return its number.

    The number is a tensor, so that layers of the same shape share a compiled graph.
    """
    key = next(_layer_keys)
    _registered_layers[key] = linear
    return torch.tensor(key, device="cpu")


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to an array. bfloat16 becomes int16 because NumPy does not support it."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _from_array(array: np.ndarray) -> torch.Tensor:
    """Convert an array from `_to_array` back to a tensor."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


class PackedLinear(nn.Module):
    """A linear layer y = W x + b that has a packed weight W [out, in] and rounds its inputs in each call.

    The layer has no parameters and does not compute gradients. As with `nn.Linear`, its outputs have the dtype of the
    inputs, or the autocast dtype.

    Args:
        linear: The float32 layer to replace.
    """

    kind: ClassVar[type[Int8Weight] | type[Bfloat16Weight]]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias: torch.Tensor | None = None if linear.bias is None else linear.bias.detach().clone()
        self._weight = self.kind.from_float32(linear.weight.detach())
        self._key = _register_layer(self)
        self.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return y [..., out] for inputs x [..., in].

        Raises:
            RuntimeError: If the inputs require gradients or are not on a CPU, or if `torch.export` runs.
        """
        if states.requires_grad or not states.is_cpu:
            raise RuntimeError(
                f"The inputs of {self} must be on a CPU and must not require gradients, but they "
                + ("require gradients. Use `torch.no_grad()`." if states.is_cpu else f"are on {states.device}.")
            )
        if states.dtype == torch.float32 and states.dim() >= 2:
            output = self._apply_linear(states)
        else:
            output = self._apply_linear(states.float().reshape(-1, self.in_features))
            output = output.view(*states.shape[:-1], self.out_features).to(states.dtype)
        return output.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else output

    def _apply_linear(self, states: torch.Tensor) -> torch.Tensor:
        """Return y in float32, which is computed by a custom operator if the call is compiled."""
        if not torch.compiler.is_compiling():
            return self._weight.compute_linear(states, self._bias)
        if torch.compiler.is_exporting():
            raise RuntimeError(f"{self} cannot be exported because its packed weight only exists in this process.")
        product: torch.Tensor = torch.ops.hf_attn_variants.packed_linear(states, self._key, self.out_features)
        return product

    # `weight` and `bias` are methods, as in the quantized modules in torch, so that code that reads the attributes of
    # an `nn.Linear` (T5 reads the dtype of the weight) does not mistake them for tensors.
    def weight(self) -> torch.Tensor:
        """Return the rounded W [out, in] in float32."""
        return self._weight.to_float32()

    def bias(self) -> torch.Tensor | None:
        """Return b [out], or None if the layer has no bias."""
        return self._bias

    def count_elements(self) -> int:
        """Return the number of elements in W and b."""
        return self.out_features * (self.in_features + (self._bias is not None))

    def count_bytes(self) -> int:
        """Return the size of W, its scales and b in bytes. W is counted once, even if several backends packed it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._get_packed_tensors().values())

    def extra_repr(self) -> str:
        """Return the sizes and the dtype, which are shown when the layer is printed."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self._dtype_name()}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy packs the weight again, because it may run on a different processor. The tensors are converted to
        # arrays, because torch multiprocessing sends tensors as file descriptors, and these tensors would be freed
        # before the receiver opens them.
        arrays = {name: _to_array(tensor) for name, tensor in self._weight.to_tensors().items()}
        return {name: value for name, value in vars(self).items() if name != "_key"} | {"_weight": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._weight = self.kind(**{name: _from_array(array) for name, array in state["_weight"].items()})
        self._key = _register_layer(self)

    def _dtype_name(self) -> str:
        return str(self.kind.dtype).removeprefix("torch.")

    def _get_packed_tensors(self) -> dict[str, torch.Tensor]:
        return self._weight.to_tensors() | ({} if self._bias is None else {"bias": self._bias})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._get_packed_tensors().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, _, missing_keys, _, error_msgs = args
        shapes = {name: tuple(tensor.shape) for name, tensor in self._get_packed_tensors().items()}
        missing_keys += [prefix + name for name in shapes if prefix + name not in state_dict]
        tensors = {name: state_dict[prefix + name] for name in shapes if prefix + name in state_dict}
        loaded_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if (dtype := getattr(tensors.get("weight"), "dtype", self.kind.dtype)) != self.kind.dtype:
            error_msgs.append(
                f"`{prefix}weight` must be {self._dtype_name()}, got {dtype}. Load float32 weights before calling "
                "`quantize`."
            )
        elif loaded_shapes.keys() == shapes.keys() and loaded_shapes != shapes:
            error_msgs.append(f"The tensors in `{prefix}` must have the shapes {shapes}, got {loaded_shapes}.")
        elif loaded_shapes == shapes:
            if "bias" in tensors:
                self._bias = tensors.pop("bias").detach().clone()
            self._weight = self.kind(**tensors)


def _compute_packed_linear(states: torch.Tensor, key: torch.Tensor, out_features: int) -> torch.Tensor:
    """Compute the product with a registered layer. This is the implementation of the custom operator."""
    linear = _registered_layers[int(key)]
    return linear._weight.compute_linear(states, linear._bias)


def _make_fake_output(states: torch.Tensor, key: torch.Tensor, out_features: int) -> torch.Tensor:
    """Return an empty output of the custom operator, from which the compiler reads the shape."""
    return states.new_empty(*states.shape[:-1], out_features)


# A compiled graph cannot contain a packed weight. Instead, it contains this operator and the number of the layer.
_library = torch.library.Library("hf_attn_variants", "FRAGMENT")
_library.define("packed_linear(Tensor states, Tensor key, int out_features) -> Tensor")
_library.impl("packed_linear", _compute_packed_linear, "CPU")
torch.library.register_fake("hf_attn_variants::packed_linear", _make_fake_output, lib=_library)


class Int8Linear(PackedLinear):
    """A linear layer with an int8 weight and one scale per row (see `int8_weight.py`)."""

    kind = Int8Weight


class Bfloat16Linear(PackedLinear):
    """A linear layer with a bfloat16 weight (see `Bfloat16Weight`)."""

    kind = Bfloat16Weight


@contextmanager
def record_weight_reads() -> Iterator[list[PackedLinear]]:
    """Record the packed layers whose `weight` or `bias` is read inside a `with` block, in the order of the reads.

    Code that reads the weight of a layer instead of calling the layer fails for packed layers, whose `weight` is a
    method. The cause is the last read before the failure.
    """
    reads: list[PackedLinear] = []

    def recorder(method: Any) -> property:
        def read(linear: PackedLinear) -> Any:
            reads.append(linear)
            return method.__get__(linear)

        return property(read)

    methods = {name: vars(PackedLinear)[name] for name in ("weight", "bias")}
    for name, method in methods.items():
        setattr(PackedLinear, name, recorder(method))
    try:
        yield reads
    finally:
        for name, method in methods.items():
            setattr(PackedLinear, name, method)
