"""Trials of kernels, which run once per kind of call and process.

The kernels were tested on one kind of GPU (benchmarks/gpu/README.md), and compilers change. Therefore, each kind of
call (device, dtypes, head counts, masks) starts with a small trial call. Its result must agree with plain torch in
float32 on the CPU. If the kernel fails or disagrees, plain torch computes this kind of call and a warning is printed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from transformers.utils import logging

from .triton_attention import allows_tf32

__all__ = ["NO_FAILURES", "agrees", "disagreement_of", "failure", "largest_error", "note", "tolerance"]

# Follows the Transformers verbosity, also in Hub repositories
logger = logging.get_logger("transformers.attn_variants")

# These exceptions are not kernel failures: memory that other processes use, and a checkpoint that has finished
# recomputing.
NO_FAILURES = (torch.OutOfMemoryError, *filter(None, [getattr(checkpoint, "_StopRecomputationError", None)]))
# The tolerated relative error per query or key. It is above rounding errors and far below the error of one missing
# key.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 1e-1


def agrees(known: dict[Any, bool], kind: Any, trial: Callable[[], str | None], refusal: str) -> bool:
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
        note(known, kind, trial(), refusal)
    return known[kind]


def note(known: dict[Any, bool], kind: Any, reason: str | None, refusal: str) -> None:
    """Store the result of a trial and print a warning if it failed; the arguments are those of `agrees`."""
    known[kind] = reason is None
    if reason is not None:
        logger.warning(f"{refusal}: {reason}.")


def disagreement_of(kernels: str, errors: Callable[[], dict[str, float]], most: float) -> str | None:
    """Return the reason if kernels must not be used, or None if they agree with the reference.

    Args:
        kernels: the name of the kernels.
        errors: computes a small call and returns named relative errors. It may raise any exception of a compiler or
            driver.
        most: the largest error that rounding can cause.
    """
    try:
        found = errors()
    except NO_FAILURES:
        raise
    except Exception as error:  # plain torch can still compute the call
        return failure(kernels, error)
    wrong = [f"{name} by {value:.1e}" for name, value in found.items() if not value <= most]  # NaN is also an error
    return f"{kernels} gave other numbers (relative errors: {', '.join(wrong)})" if wrong else None


def failure(kernels: str, error: Exception) -> str:
    """Return the reason text for kernels that raised an exception."""
    return f"{kernels} failed with {type(error).__name__}: {str(error)[:500]}"


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest rounding error of outputs and gradients in a dtype."""
    return TOLERANCE if dtype == torch.float32 and not allows_tf32() else HALF_PRECISION_TOLERANCE


def largest_error(found: Tensor, expected: Tensor, name: str) -> float:
    """Return the largest error of a query or key, relative to the root mean square over all of them."""
    difference = (found.float().cpu() - expected).square()
    axis = {"output": 1, "query": 2, "key": 2, "value": 2}.get(name)
    if axis is None:  # gradients of parameters are sums over all queries and keys
        return float((difference.sum() / expected.square().sum().clamp_min(1e-30)).sqrt())
    others = [i for i in range(expected.dim()) if i != axis]
    per_position = expected.square().sum(others).mean().clamp_min(1e-30)
    return float((difference.sum(others).max() / per_position).sqrt())
