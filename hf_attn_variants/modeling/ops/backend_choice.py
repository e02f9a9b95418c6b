"""Trials of kernels, and the choice between the Triton kernels and the blocked path for talking-heads attention.

The kernels were tested on one kind of GPU (benchmarks/gpu/README.md), and compilers change. Therefore, each kind of
call (device, dtypes, head counts, masks, row length) starts with a trial, which runs once per process. A small forward
pass, and a backward pass if gradients are needed, must agree with plain torch in float32 on the CPU. If the kernel
fails or disagrees, plain torch computes this kind of call and a warning is printed. Dropout is random and is not
compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint
from transformers.utils import logging

from .blocked_attention import Operands, blocked_backward, blocked_forward
from .triton_attention import allows_tf32, is_supported, triton_backward, triton_forward

__all__ = [
    "BACKENDS",
    "NOT_KERNEL_FAILURES",
    "choose_backend",
    "compute_largest_error",
    "describe_disagreement",
    "describe_failure",
    "get_tolerance",
    "passes_trial",
    "record_trial_result",
]

# Follows the Transformers verbosity, also in Hub repositories
logger = logging.get_logger("transformers.attn_variants")

# These exceptions are not kernel failures: memory that other processes use, and a checkpoint that has finished
# recomputing.
NOT_KERNEL_FAILURES = (torch.OutOfMemoryError, *filter(None, [getattr(checkpoint, "_StopRecomputationError", None)]))
# The tolerated relative error per query or key. It is above rounding errors and far below the error of one missing
# key.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 1e-1


def passes_trial(known: dict[Any, bool], kind: Any, trial: Callable[[], str | None], fallback_message: str) -> bool:
    """Return True if a kernel supports a kind of call, and run the trial the first time.

    Args:
        known: the previous answers by kind. The function adds the new answer.
        kind: the properties that the kernel depends on, including its `device`.
        trial: returns the reason if the kernel does not work, else None.
        refusal: the beginning of the warning, which precedes the reason.
    """
    if kind not in known:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # a trial cannot run while a CUDA graph is captured; it runs later
        record_trial_result(known, kind, trial(), fallback_message)
    return known[kind]


def record_trial_result(known: dict[Any, bool], kind: Any, reason: str | None, fallback_message: str) -> None:
    """Store the result of a trial and print a warning if it failed; the arguments are those of `passes_trial`."""
    known[kind] = reason is None
    if reason is not None:
        logger.warning(f"{fallback_message}: {reason}.")


def describe_disagreement(kernels: str, errors: Callable[[], dict[str, float]], most: float) -> str | None:
    """Return the reason if kernels must not be used, or None if they agree with the reference.

    Args:
        kernels: the name of the kernels.
        errors: computes a small call and returns named relative errors. It may raise any exception of a compiler or
            driver.
        most: the largest error that rounding can cause.
    """
    try:
        measured = errors()
    except NOT_KERNEL_FAILURES:
        raise
    except Exception as error:  # plain torch can still compute the call
        return describe_failure(kernels, error)
    wrong = [f"{name} by {value:.1e}" for name, value in measured.items() if not value <= most]  # NaN is also an error
    return f"{kernels} gave other numbers (relative errors: {', '.join(wrong)})" if wrong else None


def describe_failure(kernels: str, error: Exception) -> str:
    """Return the reason text for kernels that raised an exception."""
    return f"{kernels} failed with {type(error).__name__}: {str(error)[:500]}"


def get_tolerance(dtype: torch.dtype) -> float:
    """Return the largest rounding error of outputs and gradients in a dtype."""
    return TOLERANCE if dtype == torch.float32 and not allows_tf32() else HALF_PRECISION_TOLERANCE


def compute_largest_error(actual: Tensor, expected: Tensor, name: str) -> float:
    """Return the largest error of a query or key, relative to the root mean square over all of them."""
    difference = (actual.float().cpu() - expected).square()
    axis = {"output": 1, "query": 2, "key": 2, "value": 2}.get(name)
    if axis is None:  # gradients of parameters are sums over all queries and keys
        return float((difference.sum() / expected.square().sum().clamp_min(1e-30)).sqrt())
    others = [i for i in range(expected.dim()) if i != axis]
    per_position = expected.square().sum(others).mean().clamp_min(1e-30)
    return float((difference.sum(others).max() / per_position).sqrt())


BACKENDS = {"blocked": (blocked_forward, blocked_backward), "triton": (triton_forward, triton_backward)}
QUERIES, MOST_KEYS = 16, 4096  # sizes of the trial; longer rows use the same code in more blocks

_trial_results: dict["_Kind", bool] = {}


class _Kind(NamedTuple):
    """The properties that a compiled kernel depends on; the dtype of a missing input is None."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int, int, int, int]  # h_k, h, h_v, key heads, value heads
    sizes: tuple[int, int]  # d of queries and keys, of values
    keys: int
    logits_proj: torch.dtype | None
    weights_proj: torch.dtype | None
    bias: torch.dtype | None
    mask: torch.dtype | None
    bias_layout: str
    mask_layout: str
    is_causal: bool
    dropout: bool
    with_backward: bool


def choose_backend(operands: Operands, with_backward: bool) -> str:
    """Return "triton" or "blocked"; the only possible exception is an out-of-memory error.

    The answer for a kind of call does not change within a process.

    Args:
        operands: the operands of the call
        with_backward: if True, gradients are needed
    """
    if not is_supported(operands):
        return "blocked"
    query, key, value, mask, bias, logits_proj, weights_proj, *_ = operands
    block = max(16, 1 << (key.shape[2] - 1).bit_length())  # equal to the key block of the kernels
    kind = _Kind(
        device=query.device,
        dtype=query.dtype,
        heads=(operands.heads_in, operands.heads, operands.heads_out, key.shape[1], value.shape[1]),
        sizes=(query.shape[3], value.shape[3]),
        keys=min(block, MOST_KEYS) - 3,  # the last block of keys is incomplete
        logits_proj=_get_dtype(logits_proj),
        weights_proj=_get_dtype(weights_proj),
        bias=_get_dtype(bias),
        mask=_get_dtype(mask),
        bias_layout=_describe_layout(bias),
        mask_layout=_describe_layout(mask),
        is_causal=operands.is_causal,
        dropout=operands.dropout > 0,
        with_backward=with_backward,
    )
    fallback_message = (
        f"Talking heads on {kind.device} in {kind.dtype}, {kind.heads[1]} heads, rows of up to {block} keys, are "
        f"computed by the blocked path, which is exact and slower"
    )
    return (
        "triton"
        if passes_trial(_trial_results, kind, partial(_describe_triton_disagreement, kind), fallback_message)
        else "blocked"
    )


def _get_dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _describe_layout(tensor: Tensor | None) -> str:
    """Return the strides of heads and keys as far as kernels specialize on them: "0", "1" or "n"."""
    if tensor is None:
        return ""
    steps = ((tensor.shape[axis] > 1) * tensor.stride(axis) for axis in (1, 3))
    return "".join(str(step) if step < 2 else "n" for step in steps)


def _describe_triton_disagreement(kind: _Kind) -> str | None:
    """Run a trial with both backends and return the reason if the kernels disagree, else None."""

    def errors() -> dict[str, float]:
        actual, expected = _run_random_call(kind, "triton"), _run_random_call(kind, "blocked")
        return {name: compute_largest_error(actual[name], tensor, name) for name, tensor in expected.items()}

    return describe_disagreement("the Triton kernels", errors, get_tolerance(kind.dtype))


def _run_random_call(kind: _Kind, backend: str) -> dict[str, Tensor]:
    """Return the output and gradients of a random call; the blocked path uses float32 on the CPU."""
    forward, backward = BACKENDS[backend]
    d_output, operands = _random_call(kind)
    if backend == "blocked":
        # Nothing is dropped at probability 0, so a seed is not needed.
        tensors = (None if tensor is None else _to_float32_on_cpu(tensor) for tensor in operands[:7])
        d_output, operands = _to_float32_on_cpu(d_output), Operands._make((*tensors, None, *operands[8:]))
    output, for_backward = forward(operands)
    outcome = {"output": output}
    if kind.with_backward:
        names = ("query", "key", "value", "position_bias", "logits_proj", "weights_proj")
        gradients = backward(d_output, for_backward, kind.bias is not None, operands)
        outcome |= {name: grad for name, grad in zip(names, gradients, strict=True) if grad.numel() > 0}
    return outcome


def _to_float32_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.dtype == torch.bool else tensor.cpu().float()


def _random_call(kind: _Kind) -> tuple[Tensor, Operands]:
    """Return the output gradient and the operands of a small call, in which dropout keeps all weights."""
    # A separate generator keeps the random state of a training run unchanged.
    generator = torch.Generator(kind.device).manual_seed(0)
    heads_in, heads, heads_out, key_heads, value_heads = kind.heads
    (size, value_size), m = kind.sizes, kind.keys

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device).to(dtype)

    def added(dtype: torch.dtype | None, layout: str) -> Tensor | None:
        if dtype is None:
            return None
        shape = (1, QUERIES, m if layout[1] != "0" else 1, heads if layout[0] != "0" else 1)
        tensor = new(torch.float32 if dtype == torch.bool else dtype, *shape).permute(0, 3, 1, 2)
        tensor = tensor > -1 if dtype == torch.bool else tensor
        return tensor if layout[0] == "1" else tensor.contiguous()

    mask = added(kind.mask, kind.mask_layout)
    if mask is not None and mask.dtype != torch.bool:
        mask[:, :, 0] = -torch.inf  # a query without any allowed key
    projs = ((kind.logits_proj, heads_in, heads), (kind.weights_proj, heads, heads_out))
    logits_proj, weights_proj = (
        None if dtype is None else new(dtype, rows, columns) * rows**-0.5 for dtype, rows, columns in projs
    )
    d_output = new(kind.dtype, 1, QUERIES, heads_out, value_size)
    operands = Operands(
        query=new(kind.dtype, 1, heads_in, QUERIES, size),
        key=new(kind.dtype, 1, key_heads, m, size),
        value=new(kind.dtype, 1, value_heads, m, value_size),
        mask=mask,
        position_bias=added(kind.bias, kind.bias_layout),
        logits_proj=logits_proj,
        weights_proj=weights_proj,
        # The seed makes the kernels draw random numbers. At probability 0, they keep all weights.
        seed=torch.zeros(1, dtype=torch.int64, device=kind.device) if kind.dropout else None,
        scaling=size**-0.5,
        is_causal=kind.is_causal,
    )
    return d_output, operands
