"""Products of float32 inputs and int8 weights on a CPU, computed by torch operators.

A weight W [out, in] is `scales[:, None] * N`, with integers N in [-127, 127] and one scale per row. In each call, the
inputs are rounded separately for each token, relative to the largest magnitude in the token: x = step * n, with
integers n. Then

    W x = scales * step * (N n)

where N n is summed exactly in int32. The operators read n as unsigned integers u = n + z with the zero point z = 128
(64 for 7 bits), where u is `round(x / step + z)`, as in FBGEMM.

Several torch operators can compute this sum. Each has its own backend class below, and all backends return bit-for-bit
identical results. The fastest backend depends on the processor and the number of tokens. A slow backend can take
hundreds of times as long as float32. Therefore, the backends are checked and timed once per process, and
`ExecutionPlan.get_fastest_backend` returns the fastest correct backend.
"""

import bisect
import functools
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch


def has_instruction_set(*names: str) -> bool:
    """Return whether this processor supports at least one of the given instruction sets.

    Args:
        names: The names used by torch, such as "avx512_vnni". If torch does not report the instruction sets of the
            processor, the result is False.
    """
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name, False) for name in names)


def time_calls_in_turn(*calls: Callable[[], Any], num_rounds: int = 5) -> list[float]:
    """Time several functions, and return the shortest time of each in seconds.

    The functions are called in turn, so that other load on the machine affects all of them. The first turn is a
    warm-up and is not counted.

    Example:
        >>> float32, int8 = time_calls_in_turn(lambda: linear(states), lambda: int8_linear(states))
    """
    shortest = [math.inf] * len(calls)
    for round_index in range(num_rounds + 1):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if round_index:
                shortest[number] = min(shortest[number], time.perf_counter() - start)
    return shortest


# The range of the weights is symmetric, so -128 is not used.
MAX_WEIGHT = 127
# The largest magnitude of a rounded input, by its number of bits. Without VNNI, FBGEMM adds two products in 16 bits,
# which would overflow for inputs with more than 7 bits.
MAX_MAGNITUDES = {8: 127, 7: 63}
# A backend is chosen for each range of row counts. These are the lower bounds of the ranges.
ROW_COUNTS = (1, 16, 64, 256, 1024, 4096)
# The shape of the linear layer that is timed. At this size, the multiplication takes longer than the call overhead.
TIMED_SHAPE = (512, 512)
# A backend that is slower than another one by this factor is assumed to run a reference kernel, because timing noise
# is smaller.
REFERENCE_KERNEL_RATIO = 4.0
# For a larger row count, the backend changes only if the new backend takes at most this fraction of the time, because
# each backend packs the weight separately.
MAX_TIME_RATIO = 0.95
# The number of input elements that a thread rounds at a time. The temporary results are several times larger than the
# inputs, and would not fit into the processor caches without this limit.
ROUNDED_ELEMENTS = 2**19
# The number of weight rows that are rounded at a time, because an output layer may be as large as all other layers
# together.
ROWS_PER_BLOCK = 1024

_linear_dynamic: Any = getattr(getattr(torch.ops.quantized, "linear_dynamic", None), "default", None)
_qlinear: Any = getattr(getattr(torch.ops.onednn, "qlinear_pointwise", None), "default", None)


class Int8Weight:
    """An int8 weight W [out, in], which is packed for a backend when that backend is first used.

    Args:
        weight: The integers N, int8 [out, in], with magnitudes of at most 127.
        scales: The factor of each row, float32 [out].
    """

    dtype = torch.int8

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self.unpack: Callable[[], torch.Tensor] = lambda: weight  # int8 [out, in]
        self._scales, self._in_features = scales, weight.shape[1]
        self._packed: dict[type[LinearBackend], LinearBackend] = {}

    @classmethod
    def from_float32(cls, weight: torch.Tensor) -> "Int8Weight":
        """Round a float32 weight [out, in] to an int8 weight."""
        integers, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight))
        parts = (tensor.split(ROWS_PER_BLOCK) for tensor in (weight, integers, scales))
        for rows, target, scale in zip(*parts, strict=True):
            scale.copy_(rows.abs().amax(1) / MAX_WEIGHT)
            scale[scale == 0] = 1.0
            target.copy_((rows / scale[:, None]).round_())
        return cls(integers, scales)

    def compute_linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return W x + b [..., out] for float32 inputs x [..., in] with at least two dimensions."""
        plan = get_current_plan()
        backend = plan.get_fastest_backend(states.numel() // self._in_features)
        if (packed := self._packed.get(backend)) is None:
            packed = self._packed[backend] = backend(self.unpack(), self._scales)
            self.unpack = packed.unpack  # the packed weight replaces the unpacked one
        return packed(states, bias, plan.bits)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return the constructor arguments for an identical weight."""
        return {"weight": self.unpack(), "scales": self._scales}

    def to_float32(self) -> torch.Tensor:
        """Return W in float32 [out, in]."""
        return self.unpack() * self._scales[:, None]


class LinearBackend(ABC):
    """Base class of the backends, each of which packs a weight for one torch operator and calls this operator.

    Args:
        integers: The integers N, int8 [out, in].
        scales: The factor of each row, float32 [out].
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, integers: torch.Tensor, scales: torch.Tensor) -> None: ...

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None, bits: int = 8) -> torch.Tensor:
        """Return W x + b [..., out] for inputs x [..., in], which are rounded to `bits` bits."""
        integers, step = round_inputs(states, MAX_MAGNITUDES[bits])
        product = self.multiply(integers, MAX_MAGNITUDES[bits] + 1)
        return product.mul_(step) if bias is None else torch.addcmul(bias, product, step, out=product)

    @abstractmethod
    def multiply(self, activations: torch.Tensor, zero_point: int) -> torch.Tensor:
        """Return scales * N (u - z), float32 [..., out]. The inputs u, uint8 [..., in], may be overwritten."""

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """Unpack the weight and return N, int8 [out, in]."""


class QuantizedEngineBackend(LinearBackend):
    """The dynamically quantized linear operator in torch, which uses QNNPACK on ARM.

    The operator derives a single scale and zero point from the range of all inputs. An additional row that spans the
    whole range makes the scale 1, so that the integers do not change.
    """

    name = "torch.ops.quantized.linear_dynamic"

    def __init__(self, integers: torch.Tensor, scales: torch.Tensor) -> None:
        zeros = torch.zeros_like(scales, dtype=torch.long)
        with _without_deprecation_warnings():
            # `quantize_per_channel` would round the integers again and use twelve bytes per integer.
            weight = torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)
            self._packed: Any = torch.ops.quantized.linear_prepack(weight, None)
        self._out_features = len(scales)

    def multiply(self, activations: torch.Tensor, zero_point: int) -> torch.Tensor:
        size = activations.shape[-1]
        padded = torch.zeros(activations.numel() // size + 1, size)
        padded[:-1] = activations.view(-1, size)
        padded[:-1].sub_(zero_point).clamp_(max=zero_point - 1)  # a token with NaN may have larger values
        padded[-1, 0], padded[-1, -1] = -zero_point, zero_point - 1
        product: torch.Tensor = _linear_dynamic(padded, self._packed, zero_point == MAX_MAGNITUDES[7] + 1)
        return product[:-1].view(*activations.shape[:-1], self._out_features)

    def unpack(self) -> torch.Tensor:
        with _without_deprecation_warnings():
            return torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()


# A single TorchScript call replaces seven Python calls, which take longer than the product itself for a few tokens.
FBGEMM_SOURCE = """
def multiply(states: Tensor, step: Tensor, numbers: Tensor, level: int,
             packed: __torch__.torch.classes.quantized.LinearPackedParamsBase) -> Tensor:
    numbers = torch.div(states, step, out=numbers)
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(numbers, 1.0, level + 1, packed)

def product(states: Tensor, packed: __torch__.torch.classes.quantized.LinearPackedParamsBase, bias: Optional[Tensor],
            level: int) -> Tensor:
    numbers = torch.abs(states)
    step = torch.amax(numbers, [-1], True).div_(level)
    output = multiply(states, step, numbers, level, packed)
    if bias is None:
        return output.mul_(step)
    return torch.addcmul(bias, output, step, out=output)

def product_in_blocks(states: Tensor, packed: __torch__.torch.classes.quantized.LinearPackedParamsBase,
                      bias: Optional[Tensor], level: int, blocks: int, out_features: int) -> Tensor:
    output = torch.empty([states.size(0), out_features])
    first = 0
    for block in states.chunk(blocks):
        last = first + block.size(0)
        numbers = torch.abs(block)
        step = torch.amax(numbers, [-1], True).div_(level)
        part = multiply(block, step, numbers, level, packed)
        if bias is None:
            torch.mul(part, step, out=output[first:last])
        else:
            torch.addcmul(bias, part, step, out=output[first:last])
        first = last
    return output
"""


class FbgemmBackend(QuantizedEngineBackend):
    """The FBGEMM operator, which rounds the inputs with a given scale. It is the fastest backend for few tokens."""

    name = "FBGEMM"

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None, bits: int = 8) -> torch.Tensor:
        functions = _compile_fbgemm_functions()
        output: torch.Tensor
        if (blocks := _count_rounding_blocks(states)) == 1:
            output = functions.product(states, self._packed, bias, MAX_MAGNITUDES[bits])
            return output
        rows = states.reshape(-1, states.shape[-1])
        output = functions.product_in_blocks(
            rows, self._packed, bias, MAX_MAGNITUDES[bits], blocks, self._out_features
        )
        return output.view(*states.shape[:-1], self._out_features)


class OneDnnBackend(LinearBackend):
    """The oneDNN operator with unsigned inputs n + 2^(bits - 1), which uses VNNI and is fast for many tokens."""

    name = "oneDNN, unsigned inputs"

    def __init__(self, integers: torch.Tensor, scales: torch.Tensor) -> None:
        weight = torch.ops.onednn.qlinear_prepack(integers.contiguous(), None)
        self._packed = (weight, scales, torch.zeros_like(scales, dtype=torch.long))

    def multiply(self, activations: torch.Tensor, zero_point: int) -> torch.Tensor:
        product: torch.Tensor = _qlinear(
            activations, 1.0, zero_point, *self._packed, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product

    def unpack(self) -> torch.Tensor:
        return self._packed[0].to_dense().t().contiguous()


class OneDnnSignedBackend(OneDnnBackend):
    """The oneDNN operator with signed inputs, which uses AMX. Processors without AMX run a reference kernel."""

    name = "oneDNN, signed inputs"

    def multiply(self, activations: torch.Tensor, zero_point: int) -> torch.Tensor:
        return super().multiply(activations.sub_(zero_point).view(torch.int8), 0)


INT8_BACKENDS: tuple[type[LinearBackend], ...] = (
    FbgemmBackend,
    OneDnnBackend,
    OneDnnSignedBackend,
    QuantizedEngineBackend,
)


class ExecutionPlan(NamedTuple):
    """The number of bits for rounded inputs, and the backend to use for each row count.

    Args:
        bits: 8, or 7 if no 8-bit operator is fast on this processor.
        backends: The backend for each entry in `ROW_COUNTS`.
    """

    bits: int
    backends: tuple[type[LinearBackend], ...]

    def get_fastest_backend(self, rows: int) -> type[LinearBackend]:
        """Return the backend for inputs with the given number of rows."""
        return self.backends[max(0, bisect.bisect_right(ROW_COUNTS, rows) - 1)]

    def __str__(self) -> str:
        """Return the name of each backend with the minimum number of tokens for which it is used."""
        pairs = zip(ROW_COUNTS[::-1], self.backends[::-1], strict=True)
        names = {backend: f"{backend.name} from {first} tokens" for first, backend in pairs}
        return ", ".join(list(names.values())[::-1]).replace(" from 1 tokens", "")


def get_current_plan() -> ExecutionPlan:
    """Return the plan for the current quantized engine in torch and the current number of threads.

    The first call in a process times the backends.
    """
    return _make_execution_plan(torch.backends.quantized.engine, torch.get_num_threads())


@functools.cache
@torch.autocast("cpu", enabled=False)
@torch.no_grad()
def _make_execution_plan(engine: str, threads: int) -> ExecutionPlan:
    """Time the backends and return the plan. The torch engine and the number of threads are only cache keys."""
    bits = _choose_input_bits(engine)
    backends, chosen = _find_correct_backends(engine, bits), list[type[LinearBackend]]()
    for rows in ROW_COUNTS:
        calls = [_make_timed_call(backend, bits, rows) for backend in backends]
        seconds = dict(zip(backends, time_calls_in_turn(*calls), strict=True))
        backends = tuple(
            backend for backend in backends if seconds[backend] < REFERENCE_KERNEL_RATIO * min(seconds.values())
        )
        fastest = min(backends, key=lambda backend: seconds[backend])
        if chosen and chosen[-1] in backends and seconds[fastest] > MAX_TIME_RATIO * seconds[chosen[-1]]:
            fastest = chosen[-1]
        chosen.append(fastest)
    return ExecutionPlan(bits, tuple(chosen))


@functools.cache
def _choose_input_bits(engine: str) -> int:
    """Return 8, or 7 if a correct 7-bit backend is several times faster (on x86 without VNNI)."""
    seconds = dict.fromkeys(MAX_MAGNITUDES, math.inf)
    for bits in MAX_MAGNITUDES:
        calls = [_make_timed_call(backend, bits, ROW_COUNTS[0]) for backend in _find_correct_backends(engine, bits)]
        seconds[bits] = min(time_calls_in_turn(*calls, num_rounds=1), default=math.inf)
    return 8 if seconds[8] < REFERENCE_KERNEL_RATIO * seconds[7] else 7


@functools.cache
def _find_correct_backends(engine: str, bits: int) -> tuple[type[LinearBackend], ...]:
    """Return the backends that compute correct products. The torch engine is only used as a cache key."""
    return tuple(backend for backend in INT8_BACKENDS if _computes_correct_products(backend, bits))


def _computes_correct_products(backend: type[LinearBackend], bits: int) -> bool:
    """Return whether a backend computes correct products of the largest values, whose sums overflow in 16 bits.

    The operators are private in torch, so any torch release may change or remove them.
    """
    max_magnitude = MAX_MAGNITUDES[bits]
    generator = torch.Generator().manual_seed(0)
    extreme_weights = torch.full((2, 64), MAX_WEIGHT, dtype=torch.int8)
    extreme_weights[1, ::2] *= -1
    random_weights = torch.randint(-MAX_WEIGHT, MAX_WEIGHT + 1, (30, 64), generator=generator, dtype=torch.int8)
    integers = torch.cat([extreme_weights, random_weights])
    states = (integers.double() / MAX_WEIGHT * max_magnitude).round().float()
    states[:, 0] = max_magnitude  # so that the step is 1
    expected = (states.double() @ integers.double().t()).float()
    try:
        product = backend(integers, torch.ones(len(integers)))
        return all(torch.equal(product(states[:rows], None, bits), expected[:rows]) for rows in (1, 2, len(states)))
    except (RuntimeError, TypeError, AttributeError):
        return False


def _make_timed_call(backend: type[LinearBackend], bits: int, rows: int) -> Callable[[], torch.Tensor]:
    """Return a function that computes a product of random values with a backend."""
    generator = torch.Generator().manual_seed(0)
    weight = Int8Weight.from_float32(torch.randn(TIMED_SHAPE, generator=generator))
    product = backend(weight.unpack(), weight._scales)
    states, bias = torch.randn(rows, TIMED_SHAPE[1], generator=generator), torch.zeros(TIMED_SHAPE[0])
    return lambda: product(states, bias, bits)


@functools.cache
def _compile_fbgemm_functions() -> Any:
    """Compile `FBGEMM_SOURCE`, and return an object with its functions."""
    return torch.jit.CompilationUnit(FBGEMM_SOURCE)


def _count_rounding_blocks(states: torch.Tensor) -> int:
    """Return the number of blocks into which inputs are split for rounding."""
    return max(1, -(-states.numel() // (ROUNDED_ELEMENTS * torch.get_num_threads())))


def round_inputs(states: torch.Tensor, max_magnitude: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs to integers with one step size per token.

    If all inputs of a token are 0, its step is 0. Its integers are then arbitrary, because their product is multiplied
    by 0. If a token contains NaN, its step is NaN, and so is its product.

    Args:
        states: The inputs [..., in].
        max_magnitude: The largest magnitude of the integers n.

    Returns:
        The integers u = n + max_magnitude + 1, uint8 [..., in], and the steps, float32 [..., 1].
    """
    rows = states.reshape(-1, states.shape[-1])
    parts = [_round_block(block, max_magnitude) for block in rows.chunk(_count_rounding_blocks(states))]
    integers, step = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return integers.view(states.shape), step.view(*states.shape[:-1], 1)


def _round_block(states: torch.Tensor, max_magnitude: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round one block of inputs (see `round_inputs`)."""
    rounded = states.abs()
    step = rounded.amax(-1, keepdim=True).div_(max_magnitude)
    # In torch, only the quantization operator converts float32 to uint8 with vector instructions.
    quantized = torch.quantize_per_tensor(torch.div(states, step, out=rounded), 1.0, max_magnitude + 1, torch.quint8)
    integers = torch.empty(0, dtype=torch.uint8)
    return integers.set_(quantized.untyped_storage(), 0, quantized.shape, quantized.stride()), step


def check_int8_support() -> None:
    """Check that torch computes correct int8 products on this processor.

    Raises:
        ValueError: If no backend is correct.
    """
    engine = torch.backends.quantized.engine
    if not any(_find_correct_backends(engine, bits) for bits in MAX_MAGNITUDES):
        raise ValueError(
            f"torch {torch.__version__} does not support int8 products on this processor "
            f'(`torch.backends.quantized.engine` is "{engine}"). Use `quantize(model, "bfloat16")` instead.'
        )


@contextmanager
def _without_deprecation_warnings() -> Iterator[None]:
    """Suppress the torch 2.13 warnings about quantized tensors, which users cannot avoid."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*torch\.quantize_per_", category=UserWarning)
        yield
