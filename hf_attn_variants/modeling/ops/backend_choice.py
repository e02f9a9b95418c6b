"""The choice between the Triton kernels and the blocked path for talking-heads attention.

Each kind of call (device, dtypes, head counts, masks, row length) starts with a trial (`kernel_trials`). A small
forward pass, and a backward pass if gradients are needed, must agree with the blocked path. Dropout is random and is
not compared.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_operands import Operands
from .blocked_attention import blocked_backward, blocked_forward
from .kernel_trials import agrees, disagreement_of, largest_error, tolerance
from .triton_attention import is_supported, triton_backward, triton_forward

__all__ = ["BACKENDS", "choose_backend"]

BACKENDS = {"blocked": (blocked_forward, blocked_backward), "triton": (triton_forward, triton_backward)}
QUERIES, MOST_KEYS = 16, 4096  # sizes of the trial; longer rows use the same code in more blocks

_agreed: dict["_Kind", bool] = {}


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
        logits_proj=_dtype(logits_proj),
        weights_proj=_dtype(weights_proj),
        bias=_dtype(bias),
        mask=_dtype(mask),
        bias_layout=_layout(bias),
        mask_layout=_layout(mask),
        is_causal=operands.is_causal,
        dropout=operands.dropout > 0,
        with_backward=with_backward,
    )
    refusal = (
        f"Talking heads on {kind.device} in {kind.dtype}, {kind.heads[1]} heads, rows of up to {block} keys, are "
        f"computed by the blocked path, which is exact and slower"
    )
    return "triton" if agrees(_agreed, kind, partial(_disagreement, kind), refusal) else "blocked"


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _layout(tensor: Tensor | None) -> str:
    """Return the strides of heads and keys as far as kernels specialize on them: "0", "1" or "n"."""
    if tensor is None:
        return ""
    steps = ((tensor.shape[axis] > 1) * tensor.stride(axis) for axis in (1, 3))
    return "".join(str(step) if step < 2 else "n" for step in steps)


def _disagreement(kind: _Kind) -> str | None:
    """Run a trial with both backends and return the reason if the kernels disagree, else None."""

    def errors() -> dict[str, float]:
        found, expected = _outcome(kind, "triton"), _outcome(kind, "blocked")
        return {name: largest_error(found[name], tensor, name) for name, tensor in expected.items()}

    return disagreement_of("the Triton kernels", errors, tolerance(kind.dtype))


def _outcome(kind: _Kind, backend: str) -> dict[str, Tensor]:
    """Return the output and gradients of a random call; the blocked path uses float32 on the CPU."""
    forward, backward = BACKENDS[backend]
    d_output, operands = _random_call(kind)
    if backend == "blocked":
        # Nothing is dropped at probability 0, so a seed is not needed.
        tensors = (None if tensor is None else _exact(tensor) for tensor in operands[:7])
        d_output, operands = _exact(d_output), Operands._make((*tensors, None, *operands[8:]))
    output, for_backward = forward(operands)
    outcome = {"output": output}
    if kind.with_backward:
        names = ("query", "key", "value", "position_bias", "logits_proj", "weights_proj")
        gradients = backward(d_output, for_backward, kind.bias is not None, operands)
        outcome |= {name: grad for name, grad in zip(names, gradients, strict=True) if grad.numel() > 0}
    return outcome


def _exact(tensor: Tensor) -> Tensor:
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
