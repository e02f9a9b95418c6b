"""A custom op for talking-heads attention that does not store n x m tensors.

The op has two backends, "triton" (CUDA) and "blocked" (any device), which give the same results as
`attention_with_weights`. It supports `torch.compile`, gradient checkpointing and autocast. `backend_choice` selects
the backend for each call. If a `key_range` is passed, the op computes sliding-window attention, with or without
talking-heads projections (see `key_ranges`). The symbols are defined in `softmax_attention`.

Source: arXiv 2003.02436, section 3.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..variant_names import NAME_SUFFIX
from .backend_choice import BACKENDS, choose_backend
from .blocked_attention import AttentionOperands
from .key_ranges import KeyRange
from .triton_attention import supports_device, supports_operands
from .variant_attention import check_mask

__all__ = ["NAMESPACE", "cast_to_common_dtype", "get_registered_op", "is_autocast_enabled", "talking_heads_attention"]

# Follows the verbosity level of Transformers, even in Hub repositories
logger = logging.get_logger("transformers.attn_variants")

# The namespace contains the version, because the installed package and a Hub repository with another version of this
# code may be loaded in the same process.
NAMESPACE = f"attn_variants_{NAME_SUFFIX}"
# torch requires a flat list of arguments. It contains the fields of `AttentionOperands`, followed by the backend
# options.
SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", bool: "bool", list[int] | None: "int[]?"}
_OPERANDS = [f"{SCHEMA_TYPES[kind]} {name}" for name, kind in AttentionOperands.__annotations__.items()]
ARGUMENTS = ", ".join([*_OPERANDS, "str backend", "bool with_backward"])


def talking_heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
    logits_proj: Tensor | None = None,
    weights_proj: Tensor | None = None,
    key_range: KeyRange | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute talking-heads attention with first-order gradients. Memory grows linearly with n and m.

    Args:
        query, key, value, mask, position_bias, scaling, is_causal, logits_proj, weights_proj: see
            `attention_with_weights`. Gradients are computed for the bias, but not for the mask.
        dropout: the dropout probability of the mixed weights.
        key_range: the key range, or None for all keys. With a key range, attention is computed in blocks, the mask is
            boolean, [b, 1, 1, m or more], and the bias is a table indexed by distance (see `look_up_relative_bias`).
        backend: "blocked", "triton" or "auto". "auto" selects the Triton kernels on a GPU if they support the inputs
            and agree with the blocked backend in a trial. Otherwise, it selects "blocked".

    Returns:
        The outputs [b, n, h_v, d_v].

    Raises:
        ValueError: if the backend is unknown, "triton" does not support the inputs, the mask contains integers, or
            dropout is outside [0, 1).

    Source: arXiv 2003.02436, section 3.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be at least 0 and below 1, got {dropout}.")
    check_mask(mask)
    query, key, value = cast_to_common_dtype(query, key, value)
    mask, position_bias = _unsqueeze_to_4d(mask), _unsqueeze_to_4d(position_bias)
    window: list[int] | None = None
    if key_range is not None:
        # The cache may contain only the most recent of the keys that the mask covers.
        mask, window = None if mask is None else mask[..., :1, -key.shape[2] :], list(key_range)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"`backend` must be one of {['auto', *BACKENDS]}, got {backend!r}.")
    # A tensor seed avoids a synchronization with the device and a graph break.
    seed = torch.randint(2**31, (1,), device=query.device) if dropout > 0 else None
    operands = AttentionOperands(
        query, key, value, mask, position_bias, logits_proj, weights_proj, seed, scaling, is_causal, dropout, window
    )
    if backend == "auto" and (key_range is not None or not supports_device(query.device)):
        backend = "blocked"
    if backend == "triton" and not supports_operands(operands):
        raise ValueError('`backend` must be "blocked" or "auto" for these inputs, got "triton".')
    learned = (query, key, value, position_bias, logits_proj, weights_proj)
    with_backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    # Tracing repeats the call without gradients and compares the outputs.
    with_backward = with_backward and not torch.jit.is_tracing()
    return _forward_op(*operands, backend, with_backward)[0]


def is_autocast_enabled(device: str) -> bool:
    """Return True if autocast is enabled for a device type."""
    return device != "meta" and torch.is_autocast_enabled(device)  # torch does not support autocast on "meta"


def cast_to_common_dtype(*states: Tensor) -> list[Tensor]:
    """Cast query, key and value to the autocast dtype if autocast is enabled, and otherwise to the dtype of the value.

    As in autocast itself, float64 tensors are not cast to the autocast dtype.
    """
    device = states[0].device.type
    if is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [state.to(dtype) if state.dtype != torch.float64 else state for state in states]
    dtype = states[2].dtype
    return [state.to(dtype) for state in states]


def _unsqueeze_to_4d(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]


def disable_autocast(tensor: Tensor) -> Any:
    """Return a context manager that disables autocast on a tensor's device."""
    # Inside the op, autocast would round values that must stay in float32.
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if is_autocast_enabled(device) else nullcontext()


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, (backend, with_backward) = AttentionOperands(*arguments[:-2]), arguments[-2:]
    with disable_autocast(operands.query):
        chosen = _resolve_backend(backend, operands, with_backward)
        if operands.key_range is None:
            logger.info_once(f"Talking heads on {operands.query.device.type} use the {chosen} backend.")
        output, for_backward = BACKENDS[chosen][0](operands)
    shape = _get_backward_state_shape(operands, backend)
    if for_backward.shape != shape:  # the blocked backend returns a single number
        for_backward = for_backward.expand(shape).contiguous()
    return output, for_backward


def _resolve_backend(backend: str, operands: AttentionOperands, with_backward: bool) -> str:
    # The backend is chosen inside the op, where sizes and tensors are concrete. Both passes make the same choice.
    return backend if backend != "auto" else choose_backend(operands, with_backward)


def _get_backward_state_shape(operands: AttentionOperands, backend: str) -> tuple[int, ...]:
    batches, _, length, _ = operands.query.shape
    return (1,) if backend == "blocked" else (2, batches, operands.num_softmax_heads, length)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, backend = AttentionOperands(*arguments[:-2]), arguments[-2]
    for_backward = operands.query.new_empty(_get_backward_state_shape(operands, backend), dtype=torch.float32)
    return operands.allocate_output(), for_backward


def _backward(d_output: Tensor, for_backward: Tensor, needs_bias_gradient: bool, *arguments: Any) -> list[Tensor]:
    operands, (backend, with_backward) = AttentionOperands(*arguments[:-2]), arguments[-2:]
    with disable_autocast(d_output):
        chosen = _resolve_backend(backend, operands, with_backward)
        return BACKENDS[chosen][1](d_output, for_backward, needs_bias_gradient, operands)


def _backward_fake(d_output: Tensor, for_backward: Tensor, needs_bias_gradient: bool, *arguments: Any) -> list[Tensor]:
    query, key, value, _, bias, logits_proj, weights_proj, *_ = arguments
    dtype = torch.promote_types(query.dtype, torch.float32)
    sums = [bias if needs_bias_gradient else None, logits_proj, weights_proj]
    return [
        *(tensor.new_empty(tensor.shape) for tensor in (query, key, value)),
        *(query.new_empty((0,) if tensor is None else tensor.shape, dtype=dtype) for tensor in sums),
    ]


def _save_inputs_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], output[1])
    ctx.others = inputs[8:]


def _compute_gradients(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple:
    *tensors, for_backward = ctx.saved_tensors
    needs_bias_gradient = ctx.needs_input_grad[4]
    d_query, d_key, d_value, *sums = _backward_op(d_output, for_backward, needs_bias_gradient, *tensors, *ctx.others)
    bias_and_projections = (tensors[4] if needs_bias_gradient else None, tensors[5], tensors[6])
    d_bias, *d_projs = (None if t is None else d.to(t.dtype) for d, t in zip(sums, bias_and_projections, strict=True))
    return d_query, d_key, d_value, None, d_bias, *d_projs, *(None,) * 7


def get_registered_op(name: str) -> Any:
    """Return the operator with this name, or None if this version of the code has not registered it yet."""
    # Two copies of the same version contain identical code, so both can use the operator of the first copy.
    return getattr(getattr(torch.ops, NAMESPACE), name, None)


_backward_op = get_registered_op("talking_heads_backward")
if _backward_op is None:
    _backward_op = torch.library.custom_op(
        f"{NAMESPACE}::talking_heads_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor d_output, Tensor for_backward, bool needs_bias_gradient, {ARGUMENTS}) -> Tensor[]",
    )
    _backward_op.register_fake(_backward_fake)

_forward_op = get_registered_op("talking_heads")
if _forward_op is None:
    _forward_op = torch.library.custom_op(
        f"{NAMESPACE}::talking_heads", _forward, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
    )
    _forward_op.register_fake(_forward_fake)
    _forward_op.register_autograd(_compute_gradients, setup_context=_save_inputs_for_backward)
