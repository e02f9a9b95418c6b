"""Which way a talking-heads call is computed: by the Triton kernels where they have proved themselves, else in blocks.

The kernels were written without a GPU at hand, and Triton's compiler changes. So nothing takes them on trust: before a
kind of call (device, dtypes, head counts, masks, length of the rows) goes to them for the first time, they compute a
small one of that kind, forward and, where it is wanted, backward, which must agree with the blocked path. Where they
fail, or disagree, that kind of call stays with the blocked path for the life of the process, and a warning says so.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from .talking_heads_blocked import backward as blocked_backward
from .talking_heads_blocked import forward as blocked_forward
from .talking_heads_triton import backward as triton_backward
from .talking_heads_triton import forward as triton_forward
from .talking_heads_triton import is_supported

__all__ = ["BACKENDS", "choose_backend"]

logger = logging.get_logger("transformers.attn_variants")  # ruled by transformers' verbosity, in a Hub repository too

BACKENDS = {"blocked": (blocked_forward, blocked_backward), "triton": (triton_forward, triton_backward)}
# Relative errors beyond rounding: the two paths round at other places, a wrong kernel is off by all of it.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 5e-2
MOST_QUERIES, MOST_KEYS = 16, 4096  # of the small call; longer rows are read by the same code, in more blocks

_agreed: dict["_Kind", bool] = {}


class _Kind(NamedTuple):
    """What a compiled kernel depends on; dtypes are None where there is no such input."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int, int, int, int]  # h_k, h, h_v, key heads, value heads
    sizes: tuple[int, int]  # d of queries and keys, of values
    queries: int
    keys: int
    logits_proj: torch.dtype | None
    weights_proj: torch.dtype | None
    bias: torch.dtype | None
    mask: torch.dtype | None
    mask_per_head: bool
    is_causal: bool
    dropout: bool
    tf32: bool
    with_backward: bool


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    logits_proj: Tensor | None,
    weights_proj: Tensor | None,
    is_causal: bool,
    dropout: float,
    with_backward: bool,
) -> str:
    """Return "triton" or "blocked"; never raises. The answer for a kind of call never changes within a process.

    Args:
        query, ..., dropout: as in `talking_heads_attention`, mask and bias with four dimensions
        with_backward: whether gradients will be asked for
    """
    if not is_supported(query, key, value, mask, bias, logits_proj=logits_proj, weights_proj=weights_proj):
        return "blocked"
    heads = query.shape[1] if logits_proj is None else logits_proj.shape[1]
    heads_out = heads if weights_proj is None else weights_proj.shape[1]
    block = max(16, 1 << (key.shape[2] - 1).bit_length())  # as the kernels' block of keys
    kind = _Kind(
        device=query.device,
        dtype=query.dtype,
        heads=(query.shape[1], heads, heads_out, key.shape[1], value.shape[1]),
        sizes=(query.shape[3], value.shape[3]),
        queries=min(query.shape[2], MOST_QUERIES),
        keys=min(block, MOST_KEYS) - 3,  # the last block of keys is not a whole one
        logits_proj=_dtype(logits_proj),
        weights_proj=_dtype(weights_proj),
        bias=_dtype(bias),
        mask=_dtype(mask),
        mask_per_head=mask is not None and mask.shape[1] > 1,
        is_causal=is_causal,
        dropout=dropout > 0,
        tf32=torch.backends.cuda.matmul.allow_tf32,
        with_backward=with_backward,
    )
    if kind not in _agreed:
        reason = _disagreement(kind)
        _agreed[kind] = reason is None
        if reason is not None:
            logger.warning(
                f"Talking heads on {kind.device} in {kind.dtype}, {kind.heads[1]} heads, rows of up to {block} keys, "
                f"are computed by the blocked path, which is exact and slower: {reason}."
            )
    return "triton" if _agreed[kind] else "blocked"


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _disagreement(kind: _Kind) -> str | None:
    """Compute a small call of this kind by both paths; return what is wrong with the kernels, or None."""
    if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the first such call is inside the capture of a CUDA graph, where the kernels cannot be tried"
    try:
        found, expected = (_outcome(kind, backend) for backend in ("triton", "blocked"))
        errors = {name: _relative_error(found[name], tensor) for name, tensor in expected.items()}
    except Exception as error:  # whatever a compiler or a driver may raise: the call itself can still be served
        return f"the Triton kernels failed with {type(error).__name__}: {str(error)[:500]}"
    most = TOLERANCE if kind.dtype == torch.float32 and not kind.tf32 else HALF_PRECISION_TOLERANCE
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= most]  # NaN is wrong too
    return f"the Triton kernels gave other numbers (relative errors: {', '.join(wrong)})" if wrong else None


def _relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-20))


def _outcome(kind: _Kind, backend: str) -> dict[str, Tensor]:
    """The output and the gradients of a random call of this kind."""
    forward, backward = BACKENDS[backend]
    inputs, d_output = _random_call(kind, backend)
    output, statistics = forward(*inputs)
    outcome = {"output": output}
    if kind.with_backward:
        names = ("query", "key", "value", "position_bias", "logits_proj", "weights_proj")
        gradients = backward(d_output, statistics, kind.bias is not None, *inputs)
        outcome |= {name: grad for name, grad in zip(names, gradients, strict=True) if grad.numel() > 0}
    return outcome


def _random_call(kind: _Kind, backend: str) -> tuple[tuple[Any, ...], Tensor]:
    # A generator of its own: trying the kernels must not move the random numbers of a training run.
    generator = torch.Generator(kind.device).manual_seed(0)

    def new(dtype: torch.dtype | None, *shape: int) -> Tensor | None:
        if dtype is None:
            return None
        return torch.randn(shape, generator=generator, device=kind.device).to(dtype)

    heads_in, heads, heads_out, key_heads, value_heads = kind.heads
    (size, value_size), n, m = kind.sizes, kind.queries, kind.keys
    query = new(kind.dtype, 1, heads_in, n, size)
    key, value = new(kind.dtype, 1, key_heads, m, size), new(kind.dtype, 1, value_heads, m, value_size)
    mask = new(kind.mask if kind.mask != torch.bool else torch.float32, 1, heads if kind.mask_per_head else 1, n, m)
    if kind.mask == torch.bool:
        mask = mask > -1
    bias = new(kind.bias, 1, heads, n, m)
    logits_proj, weights_proj = new(kind.logits_proj, heads_in, heads), new(kind.weights_proj, heads, heads_out)
    # A seed makes the kernels draw what they drop, but at probability 0 all is kept: the two paths draw differently.
    seed = torch.zeros(1, dtype=torch.int64, device=kind.device) if kind.dropout and backend == "triton" else None
    inputs = (query, key, value, mask, bias, logits_proj, weights_proj, seed, size**-0.5, kind.is_causal, 0.0)
    return inputs, new(kind.dtype, 1, n, heads_out, value_size)
