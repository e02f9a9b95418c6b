"""Linear layers with packed int8 or bfloat16 weights, and the choice of layers that are quantized."""

import functools
import itertools
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..shared_memory.attention import ENCODER_OUTPUTS, SharesMemory
from .int8_weight import LARGEST, Int8Weight, least_seconds, processor_has, round_inputs

__all__ = [
    "LEAST_WEIGHTS",
    "MOST_ERROR",
    "Bfloat16Linear",
    "Bfloat16Weight",
    "Int8Linear",
    "PackedLinear",
    "has_bfloat16",
    "has_fast_bfloat16",
    "is_named",
    "large_linears",
    "make_example_inputs",
    "recorded_reads",
    "rounding_errors",
]

# A smaller layer gains no time in a call of few tokens, and it needs little memory. (With AVX-512 VNNI, int8 layers of
# 256 x 256 made a batch of 16 texts of a small T5 1.16 times as fast.)
LEAST_WEIGHTS = 2**16
# The largest relative error that rounding the inputs may make in the outputs of an int8 layer. Inputs without
# outliers make 0.01, and the layers of MiniLM up to 0.04. In a flan-T5 (small), it is 0.16 for the output layer, which
# then names another likeliest token in one case of seven.
MOST_ERROR = 0.05
# The example batch, and the most rows of it that a layer is measured on.
EXAMPLE_TEXTS, EXAMPLE_TOKENS, MEASURED_ROWS = 4, 16, 64


def large_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that gain from fewer bits, by their paths.

    Layers of a class of their own (those that make latents) are not among them. Nor are those whose weight an
    attention reads together with a latent or with the encoder's outputs, instead of calling the layer.
    """
    read = {id(linear) for linear in _read_linears(model)}
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and id(module) not in read and module.weight.numel() >= LEAST_WEIGHTS
    }


def is_named(path: str, names: Iterable[str]) -> bool:
    """Return whether a path of a module or parameter has one of the names among its parts."""
    return any(re.search(rf"(^|\.){name}(\.|$)", path) for name in names)


def make_example_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a small random batch for a model of texts, sounds or images, from its configuration."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name

    def text_batch(size: int) -> torch.Tensor:
        # The first ids are special tokens; models with positions from 2 on (RoBERTa) need two more.
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
        ids = text_batch(config.get_text_config().vocab_size)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder and model.get_decoder() is not model:
        inputs["decoder_input_ids"] = text_batch(config.get_text_config(decoder=True).vocab_size)
    return inputs


def rounding_errors(model: nn.Module, linears: dict[str, nn.Linear], inputs: dict[str, Any]) -> dict[str, float]:
    """Run a model once and return the error that rounding the inputs of each linear layer makes in its outputs.

    The error is relative to what differs between the outputs of the tokens: a part that all tokens share, as of one
    very large input, carries nothing. Layers that the model does not call are not in the result.
    """
    errors: dict[int, float] = {}

    def measure(linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].is_nested:
            return
        states = args[0].detach().float().reshape(-1, args[0].shape[-1])
        states = states[:: max(1, len(states) // MEASURED_ROWS)].contiguous()
        numbers, step = round_inputs(states, LARGEST)
        weight: Any = linear.weight
        outputs = nn.functional.linear(states, weight)
        error = nn.functional.linear((numbers.float() - LARGEST - 1) * step - states, weight)
        spread = (outputs - outputs.mean(0)).norm()
        if spread > 0:
            ratio = float((error - error.mean(0)).norm() / spread)
            errors[id(linear)] = max(errors.get(id(linear), 0.0), ratio)

    hooks = [
        linear.register_forward_pre_hook(measure) for linear in {id(each): each for each in linears.values()}.values()
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: errors[id(linear)] for path, linear in linears.items() if id(linear) in errors}


def _read_linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, SharesMemory) and module.cross_cache == ENCODER_OUTPUTS:
            yield from module.key_and_value_maps()
        if isinstance(module, AttnVariantModelMixin):
            for site, _, attention in module.named_attentions():
                core: Any = attention.get_submodule(site.core)
                if core.heads.rank is not None:
                    yield from (attention.get_submodule(path) for path in (site.key, site.value))


# The names that processors have for products of bfloat16.
BFLOAT16 = ("amx_bf16", "avx512_bf16")
# The layout is for so many rows; it costs other numbers of rows nothing (torch 2.13, AMX: 1 to 2048).
ROWS = 16
# A product that takes this many times as long as in float32 runs a reference kernel, whatever the noise of the clock.
SLOW_KERNEL = 2.0
_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_pack: Any = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", None)


class Bfloat16Weight:
    """A weight W [out, in] in bfloat16, which has float32's range: large inputs are no harm to the others.

    Args:
        weight: in bfloat16 [out, in].
    """

    dtype = torch.bfloat16

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _pack(weight.contiguous(), ROWS)
        self._out_features = len(weight)

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> "Bfloat16Weight":
        """Return the nearest to a weight of float32 [out, in]."""
        return cls(weight.to(torch.bfloat16))

    def product(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return W x + b [..., out] for states x [..., in] of two dimensions or more, float32."""
        if not states.numel():
            return states.new_empty(*states.shape[:-1], self._out_features)
        made: torch.Tensor = _linear(states.to(torch.bfloat16), self._packed, None, "none", [], "").float()
        return made if bias is None else made.add_(bias)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arguments that it was made of."""
        return {"weight": self._packed.to_dense()}

    def whole(self) -> torch.Tensor:
        """Return W in float32 [out, in]."""
        return self.tensors()["weight"].float()


@functools.cache
@torch.autocast("cpu", enabled=False)
def has_bfloat16() -> bool:
    """Say whether this processor multiplies numbers of bfloat16, and torch's oneDNN makes use of it."""
    if _linear is None or _pack is None or not torch.backends.mkldnn.is_available() or not processor_has(*BFLOAT16):
        return False
    # What torch calls by these names promises nothing: it must be the product.
    numbers = torch.tensor([[3.0, -2.0, 0.5], [1.0, 2.0, -4.0]], device="cpu", dtype=torch.float32)
    try:
        weight = Bfloat16Weight.rounded(numbers)
        made, kept = weight.product(numbers, None), weight.whole()
    except (RuntimeError, TypeError):
        return False
    return torch.equal(made, numbers @ numbers.t()) and torch.equal(kept, numbers)


@functools.cache
@torch.autocast("cpu", enabled=False)
@torch.no_grad()
def has_fast_bfloat16() -> bool:
    """Return whether a product in bfloat16 is correct here and does not run a slow reference kernel."""
    if not has_bfloat16():
        return False
    states, weight = torch.full((16, 512), 0.5), torch.full((512, 512), 0.5)
    packed = Bfloat16Weight.rounded(weight)
    float32, bfloat16 = least_seconds(
        lambda: torch.nn.functional.linear(states, weight), lambda: packed.product(states, None)
    )
    return bfloat16 < SLOW_KERNEL * float32


# The maps that there are, by numbers that none had before.
_linears: "weakref.WeakValueDictionary[int, PackedLinear]" = weakref.WeakValueDictionary()
_keys = itertools.count()


def _registered(linear: "PackedLinear") -> torch.Tensor:
    """Return its number: a tensor, so that one graph serves all maps of a shape, as those of a decoder's layers."""
    key = next(_keys)
    _linears[key] = linear
    return torch.tensor(key, device="cpu")


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _from_array(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


class PackedLinear(nn.Module):
    """y = W x + b with a packed W [out, in]; inputs are rounded at each call.

    It has no parameters and computes no gradients. It computes in float32 and puts out the type of its inputs or,
    under autocast, that of autocast, as `nn.Linear` does.

    Args:
        linear: the map of float32 that it stands for.
    """

    kind: ClassVar[type[Int8Weight] | type[Bfloat16Weight]]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias: torch.Tensor | None = None if linear.bias is None else linear.bias.detach().clone()
        self._weight = self.kind.rounded(linear.weight.detach())
        self._key = _registered(self)
        self.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out].

        Raises:
            RuntimeError: for inputs that record gradients, or that are not on a CPU, and in `torch.export`.
        """
        if states.requires_grad or not states.is_cpu:
            raise RuntimeError(
                f"{self} computes on a CPU and without gradients; its inputs "
                + ("record gradients." if states.is_cpu else f"are on {states.device}.")
            )
        if states.dtype == torch.float32 and states.dim() >= 2:
            made = self._product(states)
        else:
            made = self._product(states.float().reshape(-1, self.in_features))
            made = made.view(*states.shape[:-1], self.out_features).to(states.dtype)
        return made.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else made

    def _product(self, states: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self._weight.product(states, self._bias)
        if torch.compiler.is_exporting():
            raise RuntimeError(f"{self} is not exported, for its packed weight lives in this process alone.")
        product: torch.Tensor = torch.ops.hf_attn_variants.packed_linear(states, self._key, self.out_features)
        return product

    # Methods, as of torch's own quantized modules: what reads a float weight of a map (T5 asks for its dtype) must not
    # take these for one.
    def weight(self) -> torch.Tensor:
        """Return W [out, in] in float32, as it is computed with."""
        return self._weight.whole()

    def bias(self) -> torch.Tensor | None:
        """Return b [out]."""
        return self._bias

    def num_numbers(self) -> int:
        """Return how many numbers W and b have."""
        return self.out_features * (self.in_features + (self._bias is not None))

    def num_bytes(self) -> int:
        """Return the memory of W, packed once, its scales and b."""
        return sum(each.numel() * each.element_size() for each in self._tensors().values())

    def extra_repr(self) -> str:
        """Return what stands in the brackets of its description."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self._dtype_name()}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle packs again, for its own processor. The numbers are arrays, because torch's
        # multiprocessing sends a tensor as a file descriptor, and these tensors would be gone before it is opened.
        arrays = {name: _to_array(tensor) for name, tensor in self._weight.tensors().items()}
        return {name: value for name, value in vars(self).items() if name != "_key"} | {"_weight": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._weight = self.kind(**{name: _from_array(array) for name, array in state["_weight"].items()})
        self._key = _registered(self)

    def _dtype_name(self) -> str:
        return str(self.kind.dtype).removeprefix("torch.")

    def _tensors(self) -> dict[str, torch.Tensor]:
        return self._weight.tensors() | ({} if self._bias is None else {"bias": self._bias})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._tensors().items()})

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        shapes = {name: tuple(each.shape) for name, each in self._tensors().items()}
        missing_keys += [prefix + name for name in shapes if prefix + name not in state_dict]
        given = {name: state_dict[prefix + name] for name in shapes if prefix + name in state_dict}
        found = {name: tuple(each.shape) for name, each in given.items()}
        own = self.kind.dtype
        if (dtype := getattr(given.get("weight"), "dtype", own)) != own:
            error_msgs.append(
                f"{prefix}weight is {dtype}, and the model's is {self._dtype_name()}: load before `quantize`."
            )
        elif found.keys() == shapes.keys() and found != shapes:
            error_msgs.append(f"{prefix}: the model has {shapes}, what is loaded {found}.")
        elif found == shapes:
            if "bias" in given:
                self._bias = given.pop("bias").detach().clone()
            self._weight = self.kind(**given)


def _compute(states: torch.Tensor, key: torch.Tensor, out_features: int) -> torch.Tensor:
    linear = _linears[int(key)]
    return linear._weight.product(states, linear._bias)


def _shape_of(states: torch.Tensor, key: torch.Tensor, out_features: int) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], out_features)


# A graph has no place for a packed weight: it holds one operator a map, and the map's number.
_library = torch.library.Library("hf_attn_variants", "FRAGMENT")
_library.define("packed_linear(Tensor states, Tensor key, int out_features) -> Tensor")
_library.impl("packed_linear", _compute, "CPU")
torch.library.register_fake("hf_attn_variants::packed_linear", _shape_of, lib=_library)


class Int8Linear(PackedLinear):
    """A map in int8, with a scale for each row of W (`int8_weight.py`)."""

    kind = Int8Weight


class Bfloat16Linear(PackedLinear):
    """A map in bfloat16 (`bfloat16_weight.py`)."""

    kind = Bfloat16Weight


@contextmanager
def recorded_reads() -> Iterator[list[PackedLinear]]:
    """Record the packed layers whose `weight` or `bias` is read inside the block, in the order of the reads.

    Code that reads the weight of a layer instead of calling the layer fails on a packed one, where `weight` is a
    method. The last read before the failure is the cause.
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
