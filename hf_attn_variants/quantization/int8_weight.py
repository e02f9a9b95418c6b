"""A product with an int8 weight: the one place that knows how torch multiplies by int8 on a CPU.

A weight has a scale for each of its rows. The inputs of a call are rounded as it comes, each token by its own largest
number, so that one large token leaves the others their precision. Sums are int32, outputs float32. There are two ways:

- `EngineProduct`: FBGEMM's operator on x86, QNNPACK's on ARM. Without VNNI it is the one of torch's ways that gains
  anything in a step of decoding (torch 2.13, AVX2, 1 to 256 rows): `_int_mm`, which torchao calls, is many times
  slower than float32, and oneDNN's is faster for many rows alone.
- `OneDnnProduct`, for `MANY_ROWS` or more where the processor adds products of 8 bits in 32 (VNNI, AMX). With 512 rows
  it takes half of the first's time (torch 2.13, AVX-512 and AMX); with fewer than 16 it takes longer.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .processor import processor_has

__all__ = ["LARGEST", "Int8Weight", "check_engine", "has_vnni"]

# Numbers are symmetric about zero; -128 has no counterpart.
LARGEST = 127
# The engine that keeps 8 bits of the inputs on every processor.
EIGHT_BITS = "qnnpack"
# What a token of zeros is divided by.
TINY = 1e-30
# FBGEMM's operator knows no step of its inputs below 6.1e-5, which a token of small numbers needs: a token that comes
# alone is multiplied by this, and all weights are divided by it. A power of two rounds nothing.
LIFT = 2.0**10
MANY_ROWS = 16
# Inputs that a thread rounds at a time: a megabyte, which a processor's second cache holds with what is made of it.
BLOCK_NUMBERS = 2**18
# Of a weight that is rounded: an output layer may be as large as all other maps together, its quotients four times.
ROWS_AT_ONCE = 1024
# The names that processors and torch have for it; AMX has it for tiles.
VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")

_linear_dynamic: Any = getattr(getattr(torch.ops.quantized, "linear_dynamic", None), "default", None)
_qlinear: Any = getattr(getattr(torch.ops.onednn, "qlinear_pointwise", None), "default", None)


class Int8Weight:
    """A weight W [out, in], packed for few rows, for many, or both: each when it is first asked for.

    Most maps meet one of the two: an encoder's many, those of a decoder that writes a sentence or two few.

    Args:
        weight: int8, of at most 127 in magnitude [out, in].
        scales: what each row is multiplied by, float32 [out].
    """

    dtype = torch.int8

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers: Callable[[], torch.Tensor] = lambda: weight  # int8 [out, in]
        self._scales, self._in_features = scales, weight.shape[1]
        self._packed: dict[type, EngineProduct | OneDnnProduct] = {}

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> "Int8Weight":
        """Return the nearest to a weight of float32 [out, in]."""
        numbers, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight))
        parts = (each.split(ROWS_AT_ONCE) for each in (weight, numbers, scales))
        for rows, into, scale in zip(*parts, strict=True):
            scale.copy_(rows.abs().amax(1) / LARGEST)
            scale[scale == 0] = 1.0
            into.copy_((rows / scale[:, None]).round_())
        return cls(numbers, scales)

    def product(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return W x + b [..., out] for states x [..., in] of two dimensions or more, float32."""
        is_many = states.numel() >= MANY_ROWS * self._in_features
        kind = OneDnnProduct if is_many and has_vnni() else EngineProduct
        if (packed := self._packed.get(kind)) is None:
            packed = self._packed[kind] = kind(self.numbers(), self._scales)
            self.numbers = packed.numbers  # no other copy is kept
        return packed(states, bias)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arguments that it was made of."""
        return {"weight": self.numbers(), "scales": self._scales}

    def whole(self) -> torch.Tensor:
        """Return W in float32 [out, in]."""
        return self.numbers() * self._scales[:, None]


@functools.cache
def has_vnni() -> bool:
    """Say whether this processor adds products of int8 in 32 bits, and torch's oneDNN makes use of it.

    Elsewhere oneDNN adds two of them in 16 bits, where large ones overflow.
    """
    if _qlinear is None or not torch.backends.mkldnn.is_available() or not processor_has(*VNNI):
        return False
    # What torch calls by this name has changed before: it must be the product.
    try:
        return _is_right(OneDnnProduct)
    except (RuntimeError, TypeError):
        return False


@functools.cache
def _keeps_8_bits(engine: str) -> bool:
    """Say whether torch's quantized engine of a name adds products of 8 bits in 32 on this processor.

    FBGEMM does so with `avx512_vnni`, and has nothing for other processors' VNNI.
    """
    return engine == EIGHT_BITS or _is_right(functools.partial(EngineProduct, reduces_range=False))


@torch.autocast("cpu", enabled=False)  # what it compares with is a product of float32
def _is_right(make: Callable[..., Any]) -> bool:
    """Say whether a product of the largest numbers comes out, which overflows in 16 bits."""
    numbers = torch.full((2, 64), LARGEST, dtype=torch.float32, device="cpu")
    numbers[1, ::2] *= -1
    product = make(numbers.to(torch.int8), torch.ones(2, dtype=torch.float32, device="cpu"))
    right = numbers @ numbers.t()
    return all(
        torch.allclose(product(numbers[rows], None), right[rows], rtol=0.02, atol=0.02 * float(right.max()))
        for rows in (slice(0, 1), slice(1, 2), slice(0, 2))
    )


class OneDnnProduct:
    """By `torch.ops.onednn.qlinear_pointwise`. Inputs have 8 bits; what a token makes depends on no other."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        weight = torch.ops.onednn.qlinear_prepack(numbers.contiguous(), None)
        self._packed = (weight, scales, torch.zeros_like(scales, dtype=torch.long))

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        numbers, step = _divided(states, self._round, torch.int8)
        made = _qlinear(numbers, 1.0, 0, *self._packed, None, 1.0, 0, torch.float32, "none", [], "")
        return _scaled(made, step, bias)

    @staticmethod
    def _round(states: torch.Tensor, numbers: torch.Tensor, step: torch.Tensor) -> None:
        # `amax` takes a ninth of the time of `vector_norm`. A token of zeros makes 0 / 0, then anything times 0.
        torch.amax(states.abs(), -1, keepdim=True, out=step).div_(LARGEST)
        numbers.copy_((states / step).round_())

    def numbers(self) -> torch.Tensor:
        return self._packed[0].to_dense().t().contiguous()


class EngineProduct:
    """By torch's quantized engine.

    The operator gives all inputs of a call one scale and zero point, so each token is divided by its largest number
    before. A token that comes alone, as in a greedy step of one sentence, has the scale for itself. Without
    `avx512_vnni` two products are added in 16 bits on x86, so inputs have 7 bits there, as in `torch.ao`. The operator
    asks for a tensor of a dtype (qint8) that torch means to remove.
    """

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, reduces_range: bool | None = None) -> None:
        scales, zeros = scales.double() / LIFT, torch.zeros_like(scales, dtype=torch.long)
        with _deprecations_kept_quiet():
            # From the numbers as they are. `quantize_per_channel` would round them anew, from twelve bytes for each.
            weight = torch._make_per_channel_quantized_tensor(numbers, scales, zeros, 0)
            self._packed: Any = torch.ops.quantized.linear_prepack(weight, None)
        engine = torch.backends.quantized.engine
        self._reduces_range = not _keeps_8_bits(engine) if reduces_range is None else reduces_range
        self._in_features = numbers.shape[1]

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if states.numel() == self._in_features:
            made = _linear_dynamic(states * LIFT, self._packed, self._reduces_range)
            return made if bias is None else made.add_(bias)
        numbers, largest = _divided(states, self._divide, states.dtype)
        made = _linear_dynamic(numbers, self._packed, self._reduces_range)
        return _scaled(made, largest.mul_(LIFT), bias)

    @staticmethod
    def _divide(states: torch.Tensor, numbers: torch.Tensor, largest: torch.Tensor) -> None:
        torch.amax(states.abs(), -1, keepdim=True, out=largest).clamp_(min=TINY)
        torch.div(states, largest, out=numbers)

    def numbers(self) -> torch.Tensor:
        with _deprecations_kept_quiet():
            return torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()


def _divided(
    states: torch.Tensor, divide: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [..., in] divided token by token, in a dtype, and by what [..., 1].

    Many tokens go block by block. What is made on the way would be several times as large as the states; it would come
    from memory again and, with glibc as it is, cost a page fault for each of its pages.

    Args:
        divide: takes states, and writes what they become and what they were divided by.
    """
    size = states.shape[-1]
    numbers = torch.empty(states.shape, dtype=dtype, device=states.device)
    divisors = states.new_empty(*states.shape[:-1], 1)
    rows = max(1, BLOCK_NUMBERS * torch.get_num_threads() // size)
    if states.numel() <= rows * size:
        divide(states, numbers, divisors)
        return numbers, divisors
    parts = states.reshape(-1, size), numbers.view(-1, size), divisors.view(-1, 1)
    for block in zip(*(each.split(rows) for each in parts), strict=True):
        divide(*block)
    return numbers, divisors


def _scaled(made: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return made.mul_(largest) if bias is None else torch.addcmul(bias, made, largest, out=made)


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
