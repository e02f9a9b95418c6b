"""Linear maps whose weights are packed for a processor: in int8, and in bfloat16."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from .bfloat16_weight import Bfloat16Weight
from .int8_weight import Int8Weight

__all__ = ["Bfloat16Linear", "Int8Linear", "PackedLinear", "recorded_reads"]


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
