"""Kernels are tried before they are trusted: once for each kind of call, for the life of the process.

They have run on one kind of GPU (benchmarks/gpu/README.md), and compilers change. So before a kind of call (device,
dtypes, head counts, masks) goes to a kernel for the first time, it computes a small one, which must agree with plain
torch in float32 on the CPU. Where it fails, or disagrees, that kind of call stays with plain torch, and a
warning says so.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from transformers.utils import logging

from .triton_attention import allows_tf32

__all__ = ["NO_FAILURES", "agrees", "disagreement_of", "failure", "largest_error", "note", "tolerance"]

logger = logging.get_logger("transformers.attn_variants")  # ruled by transformers' verbosity, in a Hub repository too

# What is no failure of a kernel: memory that others fill, and a checkpoint that has recomputed what it needs.
NO_FAILURES = (torch.OutOfMemoryError, *filter(None, [getattr(checkpoint, "_StopRecomputationError", None)]))
# Relative errors of any one query's or key's numbers: beyond rounding, far below what one forgotten key would make.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 1e-1


def agrees(known: dict[Any, bool], kind: Any, trial: Callable[[], str | None], refusal: str) -> bool:
    """Say whether a kernel serves a kind of call, which is tried the first time.

    Args:
        known: the answers so far, by kind; one more is written into it.
        kind: what the kernel depends on, with its `device`.
        trial: returns what is wrong with the kernel, or None.
        refusal: what the warning says, before the reason.
    """
    if kind not in known:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # inside the capture of a CUDA graph nothing can be tried: later
        note(known, kind, trial(), refusal)
    return known[kind]


def note(known: dict[Any, bool], kind: Any, reason: str | None, refusal: str) -> None:
    """Keep whether a kernel serves a kind of call, and say why where it does not; arguments: those of `agrees`."""
    known[kind] = reason is None
    if reason is not None:
        logger.warning(f"{refusal}: {reason}.")


def disagreement_of(kernels: str, errors: Callable[[], dict[str, float]], most: float) -> str | None:
    """Return why kernels are not used; None: they are right, as far as the numbers tell.

    Args:
        kernels: their name.
        errors: computes a small call and returns relative errors by name; it may raise whatever a compiler or a driver
            raises.
        most: the largest error that is rounding.
    """
    try:
        found = errors()
    except NO_FAILURES:
        raise
    except Exception as error:  # the call itself can still be served
        return failure(kernels, error)
    wrong = [f"{name} by {value:.1e}" for name, value in found.items() if not value <= most]  # NaN is wrong too
    return f"{kernels} gave other numbers (relative errors: {', '.join(wrong)})" if wrong else None


def failure(kernels: str, error: Exception) -> str:
    """Return why kernels that raised an error are not used."""
    return f"{kernels} failed with {type(error).__name__}: {str(error)[:500]}"


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest error that is rounding, of outputs and gradients in a dtype."""
    return TOLERANCE if dtype == torch.float32 and not allows_tf32() else HALF_PRECISION_TOLERANCE


def largest_error(found: Tensor, expected: Tensor, name: str) -> float:
    """Return the error at the worst query or key, as a part of the root mean square over all of them."""
    difference = (found.float().cpu() - expected).square()
    axis = {"output": 1, "query": 2, "key": 2, "value": 2}.get(name)
    if axis is None:  # gradients of parameters: sums over all queries and keys
        return float((difference.sum() / expected.square().sum().clamp_min(1e-30)).sqrt())
    others = [i for i in range(expected.dim()) if i != axis]
    per_position = expected.square().sum(others).mean().clamp_min(1e-30)
    return float((difference.sum(others).max() / per_position).sqrt())
