"""A linear map whose weight is int8: the one place that knows how torch multiplies by int8 on a CPU.

The weight has a scale for each of its rows. The inputs of a call are rounded as it comes. torch's operator gives all
of them one scale and zero point, and as many values as their products have room for: on x86 two of these are added in
16 bits, so inputs have 7 bits there, as in `torch.ao`. One large token would leave the others few of these values, so
each is divided by its largest number before, and its outputs are multiplied by that. A token that comes alone, as in a
greedy step of one sentence, has the scale for itself. Sums are int32, outputs float32.

The operator is FBGEMM's on x86 and QNNPACK's on ARM. Of torch's three ways it is the one that gains anything in a
step of decoding on a processor without VNNI (tried with torch 2.13 and AVX2, 1 to 256 rows): `_int_mm`, which torchao
calls, is many times slower than float32, and oneDNN's, which `torch.compile` makes, is faster for many rows alone. It
asks for a tensor of a dtype (qint8) that torch means to remove: here alone that would have to be answered, by
`torch.ops.onednn.qlinear_pointwise`, which takes plain int8.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Int8Linear", "check_engine"]

# Weights are symmetric about zero; -128 has no counterpart.
LARGEST = 127
# The engine that keeps 8 bits of the inputs whatever it is asked.
EIGHT_BITS = "qnnpack"
# What a token of zeros is divided by.
TINY = 1e-30
# The operator knows no step of its inputs below 6.1e-5, which a token of small numbers needs: a token that comes alone
# is multiplied by this, and all weights are divided by it. A power of two rounds nothing.
LIFT = 2.0**10
_linear_dynamic: Any = getattr(getattr(torch.ops.quantized, "linear_dynamic", None), "default", None)


class Int8Linear(nn.Module):
    """y = W x + b with W [out, in] in int8 and a scale a row, inputs rounded at each call.

    It has no parameters and computes no gradients. Of half-precision inputs (autocast) it makes float32 and puts out
    what came in.

    Args:
        linear: the map of float32 that it stands for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scales = weight.abs().amax(1) / LARGEST
        scales[scales == 0] = 1.0
        self._bias = None if linear.bias is None else linear.bias.detach().clone()
        self._pack((weight / scales[:, None]).round(), scales)
        self.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out].

        Raises:
            RuntimeError: for inputs that record gradients, or that are not on a CPU.
        """
        if states.requires_grad or not states.is_cpu:
            raise RuntimeError(
                f"{self} computes on a CPU and without gradients; its inputs "
                + ("record gradients." if states.is_cpu else f"are on {states.device}.")
            )
        if states.dtype != torch.float32 or states.dim() < 2:
            made: torch.Tensor = self(states.float().view(-1, self.in_features))
            return made.view(*states.shape[:-1], self.out_features).to(states.dtype)
        if states.numel() == self.in_features:  # a token that comes alone: the operator's scale is its own
            made = _linear_dynamic(states * LIFT, self._packed, self._reduces_range)
            return made if self._bias is None else made.add_(self._bias)
        largest = torch.linalg.vector_norm(states, torch.inf, -1, True).clamp_(min=TINY)
        made = _linear_dynamic(states / largest, self._packed, self._reduces_range)
        largest *= LIFT
        return made.mul_(largest) if self._bias is None else torch.addcmul(self._bias, made, largest, out=made)

    # Methods, as of torch's own quantized modules: what reads a float weight of a map (T5 asks for its dtype) must not
    # take these for one.
    def weight(self) -> torch.Tensor:
        """Return W [out, in] in float32, as it is computed with."""
        numbers, scales = self._unpacked()
        return numbers * scales[:, None]

    def bias(self) -> torch.Tensor | None:
        """Return b [out]."""
        return self._bias

    def extra_repr(self) -> str:
        """Return what stands in the brackets of its description."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype=int8"

    def _pack(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Have the engine keep a weight: int8 numbers [out, in], and what each row is multiplied by, float32 [out]."""
        scales, zeros = scales.double() / LIFT, torch.zeros_like(scales, dtype=torch.long)
        with _deprecations_kept_quiet():
            weight = torch.quantize_per_channel((numbers * scales[:, None]).float(), scales, zeros, 0, torch.qint8)
            self._packed: Any = torch.ops.quantized.linear_prepack(weight, None)
        self._reduces_range = torch.backends.quantized.engine != EIGHT_BITS

    def _unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        with _deprecations_kept_quiet():
            weight = torch.ops.quantized.linear_unpack(self._packed)[0]
            return weight.int_repr(), (weight.q_per_channel_scales() * LIFT).float()

    def __getstate__(self) -> dict[str, Any]:
        # Of a copy, or a pickle: what was packed for this processor is packed anew.
        return vars(self) | {"_packed": self._unpacked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack(*state["_packed"])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"], destination[f"{prefix}scales"] = self._unpacked()
        if self._bias is not None:
            destination[f"{prefix}bias"] = self._bias

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
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        shapes["scales"] = (self.out_features,)
        if self._bias is not None:
            shapes["bias"] = (self.out_features,)
        missing_keys += [prefix + name for name in shapes if prefix + name not in state_dict]
        given = {name: state_dict[prefix + name] for name in shapes if prefix + name in state_dict}
        found = {name: tuple(each.shape) for name, each in given.items()}
        if (dtype := getattr(given.get("weight"), "dtype", torch.int8)) != torch.int8:
            error_msgs.append(f"{prefix}weight is {dtype}, and the model's is int8: load before `quantize`.")
        elif found.keys() == shapes.keys() and found != shapes:
            error_msgs.append(f"{prefix}: the model has {shapes}, what is loaded {found}.")
        elif found == shapes:
            self._pack(given["weight"], given["scales"])
            if self._bias is not None:
                self._bias = given["bias"].detach().clone()


def check_engine() -> None:
    """Check that torch multiplies by int8 on this processor.

    Raises:
        ValueError: where it does not.
    """
    engine = torch.backends.quantized.engine
    if engine == "none" or _linear_dynamic is None or not hasattr(torch, "qint8"):
        raise ValueError(
            f"torch {torch.__version__} has no int8 products for this processor "
            f'(`torch.backends.quantized.engine` is "{engine}"): `quantize(model, "bfloat16")` needs none.'
        )


@contextmanager
def _deprecations_kept_quiet() -> Iterator[None]:
    # torch 2.13 says so of each such tensor, which a user could do nothing about.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*torch\.quantize_per_", category=UserWarning)
        yield
