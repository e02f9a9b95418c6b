"""Attention in windows on CUDA: by torch's FlexAttention where it has proved itself, else by blocks in plain torch.

FlexAttention compiles one kernel that reads, for each block of queries, the blocks of keys that the window touches. It
knows no dropout, and no talking heads; calls with either go by `blocked_attention`. So does everything on a CPU,
where FlexAttention has no backward pass.

A kind of call is tried first (`kernel_trials`): small ones, forward and, where it is wanted, backward, must agree with
the blocks. Letters as in `softmax_attention`; l the longest text that a bias is made for.

Source: arXiv 2412.05496 (FlexAttention); 2004.05150, section 3.1 (the windows).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend_choice import NO_FAILURES, agrees, disagreement_of, failure, largest_error, note, tolerance
from .key_ranges import KeyRange
from .memory_efficient_attention import one_dtype, talking_heads_attention

__all__ = ["Kind", "attention_in_windows", "blocks_that_are_read", "disagreement"]

DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_HEAD_DIM = 16
BLOCK = 128  # queries, and keys, of a block: FlexAttention's own size
# Batches, lengths and global tokens of the small calls. By the second, torch compiles for any number of them; in it
# there are queries whose window contains only padding.
SMALL_CALLS = ((2, 300, 2), (3, 421, 0))
SMALL_WINDOW = 140  # on each side: some blocks are read whole, some in part, some not at all
# Kernels that torch keeps: one for each kind of call. By default it gives up after eight.
MOST_KERNELS = 64


class Kind(NamedTuple):
    """Properties of a call that need their own compiled kernel."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]  # h, k
    sizes: tuple[int, int]  # d of queries and keys, of values
    scaling: float
    has_padding: bool
    bias: torch.dtype | None
    trains_bias: bool
    is_dilated: bool
    with_backward: bool


_flex_agreed: dict[Kind, bool] = {}


def attention_in_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    key_range: KeyRange,
    dropout: float = 0.0,
    **options: Any,
) -> Tensor:
    """Attention that reads what `key_range` says, in memory that grows linearly with n and m; differentiable once.

    Args:
        query, key, value, mask, position_bias, key_range, dropout: as in `talking_heads_attention` with a key range
        options: its other arguments

    Returns:
        The outputs [b, n, h_v, d_v].

    Raises:
        ValueError: as `talking_heads_attention`.
    """
    kind = None
    if query.device.type in DEVICES and dropout == 0 and not _talks(options):
        query, key, value = one_dtype(query, key, value)
        kind = _kind_of(query, key, value, mask, position_bias, key_range, options["scaling"])
    if kind is not None and agrees(_flex_agreed, kind, lambda: disagreement(kind), _refusal(kind)):
        try:
            return _flex(query, key, value, mask, position_bias, key_range, options["scaling"])
        except NO_FAILURES:
            raise
        except Exception as error:  # a compiler's, for a shape that the small calls had not
            note(_flex_agreed, kind, failure("FlexAttention", error), _refusal(kind))
    options |= {"position_bias": position_bias, "dropout": dropout, "key_range": key_range}
    return talking_heads_attention(query, key, value, mask, **options)


def _talks(options: dict[str, Any]) -> bool:
    return any(options.get(name) is not None for name in ("logits_proj", "weights_proj"))


def _kind_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_range: KeyRange,
    scaling: float,
) -> Kind | None:
    """Return the kind of a call; None where FlexAttention cannot serve it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or query.numel() == 0:
        return None
    # A CUDA graph would go on reading masks that are no longer kept.
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return None
    if key.shape[1] != value.shape[1] or not _has_block_masks():
        return None
    if min(query.shape[3], value.shape[3]) < LEAST_HEAD_DIM:
        return None
    trains = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (query, key, value, bias)]
    return Kind(
        device=query.device,
        dtype=query.dtype,
        heads=(query.shape[1], key.shape[1]),
        sizes=(query.shape[3], value.shape[3]),
        scaling=scaling,
        has_padding=mask is not None,
        bias=None if bias is None else bias.dtype,
        trains_bias=trains[3],
        is_dilated=key_range.step > 1,
        with_backward=any(trains),
    )


@lru_cache(maxsize=1)
def _has_block_masks() -> bool:
    """Say whether this torch has masks of blocks for lengths that are not a multiple of the block size."""
    from torch.nn.attention.flex_attention import BlockMask

    return "seq_lengths" in BlockMask.from_kv_blocks.__code__.co_varnames


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    table: Tensor | None,
    key_range: KeyRange,
    scaling: float,
) -> Tensor:
    """Return [b, n, h, d_v]; arguments as in `attention_in_windows`, the bias by distance, [1, h, 1, 2 l - 1]."""
    length, key_length = query.shape[2], key.shape[2]
    readable = None if mask is None else mask[:, 0, 0, -key_length:].expand(query.shape[0], key_length)
    # A copy: torch loses the gradient of a view that a score's function reads.
    table = None if table is None else table[0, :, 0].clone()
    # Autocast has done its work (`one_dtype`), and a kernel compiled under it would be another one.
    with torch.autocast(query.device.type, enabled=False):
        output = _compiled()(
            query,
            key,
            value,
            score_mod=_score_mod(readable, table, _number("offset", key_length - length, query.device)),
            block_mask=_block_mask(key_range, length, key_length, query.device),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            # Few queries have a kernel of their own, which was not tried.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
    return output.transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    """Return FlexAttention, compiled; it raises where torch would go on without a kernel, in memory of n x m."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, fullgraph=True)

    def attend(*states: Any, **options: Any) -> Tensor:
        with torch._dynamo.config.patch(cache_size_limit=MOST_KERNELS):
            return compiled(*states, **options)

    return attend


@lru_cache(maxsize=64)
def _number(role: str, value: int, device: torch.device) -> Tensor:
    """Return a whole number as a tensor []: as a number in the code, each value would have a kernel of its own.

    So would two roles that are one tensor: equal numbers are different tensors.
    """
    with torch.inference_mode(False):  # kept for later calls too, which may train
        return torch.tensor(value, device=device)


def _score_mod(readable: Tensor | None, table: Tensor | None, offset: Tensor) -> Callable[..., Tensor] | None:
    """Return what is done to a score: a bias by distance is added, and keys that are padding are not read.

    Args:
        readable: [b, m].
        table: [h, 2 l - 1], of the distances -(l - 1) .. l - 1 from a query to a key.
        offset: [], the position of the first query.
    """
    if readable is None and table is None:
        return None
    middle: Any = None if table is None else _number("middle", table.shape[-1] // 2, table.device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if table is not None:
            score = score + table[h, j - i - offset + middle]
        return score if readable is None else torch.where(readable[b, j], score, -torch.inf)

    return score_mod


@lru_cache(maxsize=4)  # (n / 128)^2 numbers each
def _block_mask(key_range: KeyRange, length: int, key_length: int, device: torch.device) -> Any:
    """Return FlexAttention's mask of a shape: the blocks that are read, and a formula for those read in part."""
    from torch.nn.attention.flex_attention import BlockMask

    # Distances beyond the text are all alike, and fit the kernel's numbers.
    before, after, step, global_tokens, offset = (
        _number(role, min(number, length + key_length), device)
        for role, number in zip((*KeyRange._fields, "first query"), (*key_range, key_length - length), strict=True)
    )

    is_dilated = key_range.step > 1

    def is_read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - offset
        near = (distance >= -before) & (distance <= after)
        near = near & (distance % step == 0) if is_dilated else near
        return near | (j < global_tokens) | (i + offset < global_tokens)

    with torch.inference_mode(False):  # as in `_number`
        some, whole = (blocks.to(device)[None, None] for blocks in blocks_that_are_read(key_range, length, key_length))
        count, order = _in_order(some & ~whole)
        of_whole = _in_order(whole)
        lengths = (length, key_length)
        return BlockMask.from_kv_blocks(
            count, order, of_whole[0], of_whole[1], BLOCK_SIZE=BLOCK, mask_mod=is_read, seq_lengths=lengths
        )


def _in_order(read: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries reads, and all of them, these first."""
    return read.sum(-1, dtype=torch.int32), (~read).int().argsort(dim=-1, stable=True).int()


def blocks_that_are_read(
    key_range: KeyRange, length: int, key_length: int, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Return which blocks of keys any query of a block reads, and which all of them read whole.

    Blocks at the ends, shorter than the others, count as whole where what there is of them is.

    Args:
        key_range: of the attention.
        length, key_length: n and m; the queries are the last n of the m.
        block: queries, and keys, of a block.

    Returns:
        Two boolean tensors [blocks of queries, blocks of keys].
    """
    first_row = torch.arange(0, length, block)[:, None]
    first, last = first_row + key_length - length, (first_row + block).clamp(max=length) - 1 + key_length - length
    low = torch.arange(0, key_length, block)
    high = (low + block).clamp(max=key_length) - 1
    some = (high - first >= -key_range.before) & (low - last <= key_range.after)
    whole = (low - last >= -key_range.before) & (high - first <= key_range.after) & (key_range.step == 1)
    some |= (low < key_range.global_tokens) | (first < key_range.global_tokens)
    whole |= (high < key_range.global_tokens) | (last < key_range.global_tokens)
    return some, whole


def _refusal(kind: Kind) -> str:
    return (
        f"Windows on {kind.device} in {kind.dtype}, {kind.heads[0]} heads, are computed by blocks in plain torch, "
        f"which is exact and slower"
    )


def disagreement(kind: Kind) -> str | None:
    """Compute small calls of this kind by both ways; return what is wrong with FlexAttention, or None."""

    def errors() -> dict[str, float]:
        worst: dict[str, float] = {}
        for batch, length, global_tokens in SMALL_CALLS:
            states = _random_window_call(kind, batch, length)
            # Not by the hooks of a checkpoint around the call, which would recompute in the midst of it.
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                found, expected = (_flex_outcome(kind, states, global_tokens, by_flex) for by_flex in (True, False))
            for name, tensor in expected.items():
                worst[name] = max(worst.get(name, 0.0), largest_error(found[name], tensor, name))
        return worst

    return disagreement_of("FlexAttention", errors, tolerance(kind.dtype))


def _random_window_call(kind: Kind, batch: int, length: int) -> dict[str, Tensor]:
    """Return the tensors of a small call; padding is at the end, a third of the text more from one to the next."""
    # A generator of its own: trying the kernel must not move the random numbers of a training run.
    generator = torch.Generator(kind.device).manual_seed(0)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device).to(dtype)

    (heads, kv_heads), (size, value_size) = kind.heads, kind.sizes
    states = {  # laid out as models do it
        "query": new(kind.dtype, batch, length, heads, size).transpose(1, 2),
        "key": new(kind.dtype, batch, length, kv_heads, size).transpose(1, 2),
        "value": new(kind.dtype, batch, length, kv_heads, value_size).transpose(1, 2),
        "d_output": new(kind.dtype, batch, length, heads, value_size),
    }
    if kind.has_padding:
        ends = length - torch.arange(batch, device=kind.device) * (length // 3)
        states["mask"] = (torch.arange(length, device=kind.device) < ends[:, None])[:, None, None]
    if kind.bias is not None:
        states["position_bias"] = new(kind.bias, 1, heads, 1, 2 * length - 1)
    return states


def _flex_outcome(kind: Kind, states: dict[str, Tensor], global_tokens: int, by_flex: bool) -> dict[str, Tensor]:
    """Return the output of a small call and its gradients; of the blocks in float32 on the CPU."""
    key_range = KeyRange(SMALL_WINDOW, SMALL_WINDOW, 1 + kind.is_dilated, global_tokens)
    states = {name: tensor.detach() for name, tensor in states.items()}
    if not by_flex:
        states = {name: t.cpu() if t.dtype == torch.bool else t.cpu().float() for name, t in states.items()}
    trained = [name for name in ("query", "key", "value", "position_bias") if name in states]
    trained = trained[: 3 + kind.trains_bias] if kind.with_backward else []
    for name in trained:
        states[name].requires_grad_()
    d_output = states.pop("d_output")
    with torch.set_grad_enabled(kind.with_backward), torch.autocast(kind.device.type, enabled=False):
        if by_flex:
            query, key, value = (states[name] for name in ("query", "key", "value"))
            output = _flex(query, key, value, states.get("mask"), states.get("position_bias"), key_range, kind.scaling)
        else:
            call: dict[str, Any] = {**states, "scaling": kind.scaling, "key_range": key_range}
            output = talking_heads_attention(**call, backend="blocked")
        outcome = {"output": output}
        if trained:
            gradients = torch.autograd.grad(output, [states[name] for name in trained], d_output)
            outcome |= dict(zip(trained, gradients, strict=True))
    return {name: tensor.detach() for name, tensor in outcome.items()}
