"""Selects the backend for talking-heads attention, and tests each GPU kernel in a trial before it is used.

The kernels were tested on only one type of GPU (benchmarks/gpu/README.md), and compilers change. The first call of
each kind (device, dtypes, head counts, masks and row length) in a process is therefore preceded by a trial. In a small
forward pass, and in a backward pass if gradients are needed, the kernel must agree with plain torch in float32 on the
CPU. If the kernel fails or disagrees, plain torch computes all calls of this kind, and a warning is logged. Dropout is
random and is not compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint
from transformers.utils import logging

from .blocked_attention import AttentionOperands, blocked_backward, blocked_forward
from .triton_attention import allows_tf32, supports_operands, triton_backward, triton_forward

__all__ = [
    "BACKENDS",
    "choose_backend",
    "compute_largest_error",
    "describe_kernel_mismatch",
    "get_tolerance",
    "run_after_trial",
]

# Follows the verbosity level of Transformers, even in Hub repositories
logger = logging.get_logger("transformers.attn_variants")

# Exceptions that do not indicate a kernel failure. Other processes may use the memory, and gradient checkpointing
# raises an exception to stop the recomputation.
NOT_KERNEL_FAILURES = (torch.OutOfMemoryError, *filter(None, [getattr(checkpoint, "_StopRecomputationError", None)]))
# The tolerated relative error per query or key. It is larger than rounding errors and much smaller than the error that
# a single missing key would cause.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 1e-1


def passes_trial(
    trial_results: dict[Any, bool], kind: Any, trial: Callable[[], str | None], fallback_message: str
) -> bool:
    """Return True if a kernel can be used for a kind of call. The first call of each kind runs the trial.

    Args:
        trial_results: the results of previous trials by kind. The function adds the new result.
        kind: the properties of a call that the kernel depends on, including its `device`.
        trial: a function that returns None if the kernel works, and otherwise the reason why it does not.
        fallback_message: the first part of the warning, before the reason.
    """
    if kind not in trial_results:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # a trial cannot run while a CUDA graph is captured, so a later call runs it
        _record_trial_result(trial_results, kind, trial(), fallback_message)
    return trial_results[kind]


def run_after_trial(
    trial_results: dict[Any, bool],
    kind: Any,
    trial: Callable[[], str | None],
    run: Callable[[], Tensor],
    fallback_message: str,
) -> Tensor | None:
    """Return the result of `run`, or None if the kernel cannot be used for this kind of call.

    If `run` raises an error, such as a compiler error for a shape that the trial did not cover, the kernel is not used
    again. See `passes_trial` for the other arguments.
    """
    if not passes_trial(trial_results, kind, trial, fallback_message):
        return None
    try:
        return run()
    except NOT_KERNEL_FAILURES:
        raise
    except Exception as error:
        _record_trial_result(trial_results, kind, _describe_failure(error), fallback_message)
        return None


def _record_trial_result(trial_results: dict[Any, bool], kind: Any, reason: str | None, fallback_message: str) -> None:
    trial_results[kind] = reason is None
    if reason is not None:
        logger.warning(f"{fallback_message}: {reason}.")


def describe_kernel_mismatch(
    kernel_name: str, compute_errors: Callable[[], dict[str, float]], tolerance: float
) -> str | None:
    """Return the reason why kernels must not be used, or None if they agree with the reference.

    Args:
        kernel_name: the name of the kernels.
        compute_errors: a function that runs a small call and returns the relative error of each result, {name: error}.
            It may raise any compiler or driver exception.
        tolerance: the largest error that rounding can cause.
    """
    try:
        measured = compute_errors()
    except NOT_KERNEL_FAILURES:
        raise
    except Exception as error:  # the call can still be computed by plain torch
        return _describe_failure(error)
    wrong_outputs = [
        f"{name} by {value:.1e}" for name, value in measured.items() if not value <= tolerance
    ]  # NaN is also an error
    return (
        f"{kernel_name} returned different values (relative errors: {', '.join(wrong_outputs)})"
        if wrong_outputs
        else None
    )


def _describe_failure(error: Exception) -> str:
    return f"the call failed with {type(error).__name__}: {str(error)[:500]}"


def get_tolerance(dtype: torch.dtype) -> float:
    """Return the largest error that is tolerated in outputs and gradients of a dtype."""
    return TOLERANCE if dtype == torch.float32 and not allows_tf32() else HALF_PRECISION_TOLERANCE


def compute_largest_error(actual: Tensor, expected: Tensor, name: str) -> float:
    """Return the largest error at any query or key position, relative to the root mean square over all positions."""
    difference = (actual.float().cpu() - expected).square()
    axis = {"output": 1, "query": 2, "key": 2, "value": 2}.get(name)
    if axis is None:  # parameter gradients are sums over all queries and keys
        return float((difference.sum() / expected.square().sum().clamp_min(1e-30)).sqrt())
    other_axes = [i for i in range(expected.dim()) if i != axis]
    mean_square = expected.square().sum(other_axes).mean().clamp_min(1e-30)
    return float((difference.sum(other_axes).max() / mean_square).sqrt())


BACKENDS = {"blocked": (blocked_forward, blocked_backward), "triton": (triton_forward, triton_backward)}
NUM_TRIAL_QUERIES, MAX_TRIAL_KEYS = 16, 4096  # sizes in the trial; longer rows only require more blocks

_trial_results: dict["_TritonKernelKey", bool] = {}


class _TritonKernelKey(NamedTuple):
    """The properties of a call that a compiled kernel depends on. A missing input has the dtype None."""

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


def choose_backend(operands: AttentionOperands, with_backward: bool) -> str:
    """Return the backend for a call, "triton" or "blocked".

    The backend for a kind of call does not change within a process. The only exception that this function can raise is
    an out-of-memory error.

    Args:
        operands: the operands of the call.
        with_backward: True if gradients are needed.
    """
    if not supports_operands(operands):
        return "blocked"
    query, key, value, mask, bias, logits_proj, weights_proj, *_ = operands
    block = max(16, 1 << (key.shape[2] - 1).bit_length())  # the size of a block of keys in the kernels
    kind = _TritonKernelKey(
        device=query.device,
        dtype=query.dtype,
        heads=(
            operands.num_query_heads,
            operands.num_softmax_heads,
            operands.num_output_heads,
            key.shape[1],
            value.shape[1],
        ),
        sizes=(query.shape[3], value.shape[3]),
        keys=min(block, MAX_TRIAL_KEYS) - 3,  # the last block of keys is incomplete
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
        f"The slower blocked backend computes talking-heads attention on {kind.device} in {kind.dtype} with "
        f"{kind.heads[1]} heads and rows of up to {block} keys. Its results are exact. Reason"
    )
    return (
        "triton"
        if passes_trial(_trial_results, kind, partial(_run_triton_trial, kind), fallback_message)
        else "blocked"
    )


def _get_dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _describe_layout(tensor: Tensor | None) -> str:
    """Describe the strides of heads and keys with "0", "1" or "n", because kernels are specialized for 0 and 1."""
    if tensor is None:
        return ""
    steps = ((tensor.shape[axis] > 1) * tensor.stride(axis) for axis in (1, 3))
    return "".join(str(step) if step < 2 else "n" for step in steps)


def _run_triton_trial(kind: _TritonKernelKey) -> str | None:
    """Run a trial with both backends. Return the reason why the kernels must not be used, or None if they agree."""

    def compute_errors() -> dict[str, float]:
        actual, expected = _compute_trial_outputs(kind, "triton"), _compute_trial_outputs(kind, "blocked")
        return {name: compute_largest_error(actual[name], tensor, name) for name, tensor in expected.items()}

    return describe_kernel_mismatch("the Triton kernels", compute_errors, get_tolerance(kind.dtype))


def _compute_trial_outputs(kind: _TritonKernelKey, backend: str) -> dict[str, Tensor]:
    """Return the output and the gradients of a random call. The blocked backend uses float32 on the CPU."""
    forward, backward = BACKENDS[backend]
    d_output, operands = _make_random_operands(kind)
    if backend == "blocked":
        # The dropout probability is 0, so no seed is needed.
        tensors = (None if tensor is None else _to_float32_on_cpu(tensor) for tensor in operands[:7])
        d_output, operands = _to_float32_on_cpu(d_output), AttentionOperands._make((*tensors, None, *operands[8:]))
    output, for_backward = forward(operands)
    outcome = {"output": output}
    if kind.with_backward:
        names = ("query", "key", "value", "position_bias", "logits_proj", "weights_proj")
        gradients = backward(d_output, for_backward, kind.bias is not None, operands)
        outcome |= {name: grad for name, grad in zip(names, gradients, strict=True) if grad.numel() > 0}
    return outcome


def _to_float32_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.dtype == torch.bool else tensor.cpu().float()


def _make_random_operands(kind: _TritonKernelKey) -> tuple[Tensor, AttentionOperands]:
    """Return the output gradient and the operands of a small call. Its dropout probability is 0."""
    # A separate generator leaves the random state of the training run unchanged.
    generator = torch.Generator(kind.device).manual_seed(0)
    num_query_heads, heads, num_output_heads, key_heads, value_heads = kind.heads
    (size, value_size), m = kind.sizes, kind.keys

    def make_random(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device).to(dtype)

    def make_bias_or_mask(dtype: torch.dtype | None, layout: str) -> Tensor | None:
        if dtype is None:
            return None
        shape = (1, NUM_TRIAL_QUERIES, m if layout[1] != "0" else 1, heads if layout[0] != "0" else 1)
        tensor = make_random(torch.float32 if dtype == torch.bool else dtype, *shape).permute(0, 3, 1, 2)
        tensor = tensor > -1 if dtype == torch.bool else tensor
        return tensor if layout[0] == "1" else tensor.contiguous()

    mask = make_bias_or_mask(kind.mask, kind.mask_layout)
    if mask is not None and mask.dtype != torch.bool:
        mask[:, :, 0] = -torch.inf  # a query without any allowed key
    projs = ((kind.logits_proj, num_query_heads, heads), (kind.weights_proj, heads, num_output_heads))
    logits_proj, weights_proj = (
        None if dtype is None else make_random(dtype, rows, columns) * rows**-0.5 for dtype, rows, columns in projs
    )
    d_output = make_random(kind.dtype, 1, NUM_TRIAL_QUERIES, num_output_heads, value_size)
    operands = AttentionOperands(
        query=make_random(kind.dtype, 1, num_query_heads, NUM_TRIAL_QUERIES, size),
        key=make_random(kind.dtype, 1, key_heads, m, size),
        value=make_random(kind.dtype, 1, value_heads, m, value_size),
        mask=mask,
        position_bias=make_bias_or_mask(kind.bias, kind.bias_layout),
        logits_proj=logits_proj,
        weights_proj=weights_proj,
        # With a seed, the kernels run their dropout code, but the dropout probability is 0.
        seed=torch.zeros(1, dtype=torch.int64, device=kind.device) if kind.dropout else None,
        scaling=size**-0.5,
        is_causal=kind.is_causal,
    )
    return d_output, operands
