"""Sliding-window attention on CUDA with torch's FlexAttention, or in blocks with plain torch.

FlexAttention compiles a kernel that reads only the blocks of keys that overlap the windows of a block of queries:

    key blocks         0   1   2   3   4
    query block 2      .   /   x   /   .      x: read completely, /: read with a mask, .: not read

FlexAttention supports neither dropout nor talking heads, and it has no backward pass on CPUs. `blocked_attention` is
used in these cases. The first call of each kind is preceded by a trial (see `backend_choice`), in which small calls
must agree with the blocked backend, including their gradients if they are needed. The symbols are defined in
`softmax_attention`. l is the length of the longest text that a bias supports.

Sources: arXiv 2412.05496 (FlexAttention); arXiv 2004.05150, section 3.1 (windows).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend_choice import compute_largest_error, describe_kernel_mismatch, get_tolerance, run_after_trial
from .key_ranges import KeyRange
from .memory_efficient_attention import cast_to_common_dtype, talking_heads_attention

__all__ = ["FlexCallKind", "find_attended_blocks", "run_flex_trial", "windowed_attention"]

DEVICES = ("cuda",)
_SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_HEAD_DIM = 16
BLOCK = 128  # the number of queries or keys per block, the default of FlexAttention
# The batch sizes, lengths and numbers of global tokens of the small calls in a trial. For the second call, torch
# compiles a kernel for arbitrary sizes. This call also has queries whose windows contain only padding.
TRIAL_CALLS = ((2, 300, 2), (3, 421, 0))
# The number of keys on each side of a query in the small calls. With this window, some blocks are read completely,
# some partly and some not at all.
TRIAL_WINDOW = 140
# The number of compiled kernels that torch stores, one per kind of call. The default in torch is eight.
MAX_COMPILED_KERNELS = 64


class FlexCallKind(NamedTuple):
    """The properties of a call for which a separate kernel is compiled."""

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


_flex_trial_results: dict[FlexCallKind, bool] = {}


def windowed_attention(
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
    """Compute attention within a key range, with memory that grows linearly with n and m.

    Only first-order gradients are supported.

    Args:
        query, key, value, mask, position_bias, key_range, dropout: see `talking_heads_attention` with a key range.
        options: the remaining arguments of `talking_heads_attention`.

    Returns:
        The outputs [b, n, h_v, d_v].

    Raises:
        ValueError: under the same conditions as in `talking_heads_attention`.
    """
    kind = None
    uses_talking_heads = any(options.get(name) is not None for name in ("logits_proj", "weights_proj"))
    if query.device.type in DEVICES and dropout == 0 and not uses_talking_heads:
        query, key, value = cast_to_common_dtype(query, key, value)
        kind = _get_call_kind(query, key, value, mask, position_bias, key_range, options["scaling"])
    if kind is not None:
        fallback_message = (
            f"Slower blocks in plain torch compute sliding-window attention on {kind.device} in {kind.dtype} with "
            f"{kind.heads[0]} heads. The results are exact. Reason"
        )
        call = (query, key, value, mask, position_bias, key_range, options["scaling"])
        trial, run = partial(run_flex_trial, kind), partial(_attend_with_flex_attention, *call)
        output = run_after_trial(_flex_trial_results, kind, trial, run, fallback_message)
        if output is not None:
            return output
    options |= {"position_bias": position_bias, "dropout": dropout, "key_range": key_range}
    return talking_heads_attention(query, key, value, mask, **options)


def _get_call_kind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_range: KeyRange,
    scaling: float,
) -> FlexCallKind | None:
    """Return the kind of a call, or None if FlexAttention does not support the call."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or query.numel() == 0:
        return None
    # A captured CUDA graph would read masks that have already been freed.
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if query.dtype not in _SUPPORTED_DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return None
    if key.shape[1] != value.shape[1] or not _supports_partial_blocks():
        return None
    if min(query.shape[3], value.shape[3]) < MIN_HEAD_DIM:
        return None
    trains = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (query, key, value, bias)]
    return FlexCallKind(
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
def _supports_partial_blocks() -> bool:
    """Return True if this torch release supports block masks for lengths that are not multiples of the block size."""
    from torch.nn.attention.flex_attention import BlockMask

    return "seq_lengths" in BlockMask.from_kv_blocks.__code__.co_varnames


def _attend_with_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    table: Tensor | None,
    key_range: KeyRange,
    scaling: float,
) -> Tensor:
    """Compute `windowed_attention` with FlexAttention and return the outputs [b, n, h, d_v].

    The bias is a table that is indexed by distance, [1, h, 1, 2 l - 1].
    """
    length, key_length = query.shape[2], key.shape[2]
    key_mask = None if mask is None else mask[:, 0, 0, -key_length:].expand(query.shape[0], key_length)
    # This is a copy, because torch loses the gradient of a view that is used in a `score_mod`.
    table = None if table is None else table[0, :, 0].clone()
    # The inputs already have the autocast dtype (see `cast_to_common_dtype`). Under autocast, torch would compile
    # another kernel.
    with torch.autocast(query.device.type, enabled=False):
        output = _get_compiled_flex_attention()(
            query,
            key,
            value,
            score_mod=_create_score_mod(
                key_mask, table, _get_scalar_tensor("offset", key_length - length, query.device)
            ),
            block_mask=_create_block_mask(key_range, length, key_length, query.device),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            # torch has a different kernel for few queries, which the trial did not cover.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
    return output.transpose(1, 2)


@lru_cache(maxsize=1)
def _get_compiled_flex_attention() -> Callable[..., Tensor]:
    """Return a compiled FlexAttention function.

    The function raises an error instead of computing all n x m weights without a kernel.
    """
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, fullgraph=True)

    def attend(*states: Any, **options: Any) -> Tensor:
        with torch._dynamo.config.patch(cache_size_limit=MAX_COMPILED_KERNELS):
            return compiled(*states, **options)

    return attend


@lru_cache(maxsize=64)
def _get_scalar_tensor(role: str, value: int, device: torch.device) -> Tensor:
    """Return an integer as a scalar tensor, because torch would compile a separate kernel for each Python integer.

    The role is part of the cache key, so that two roles never share a tensor. Otherwise, torch would compile another
    kernel if their values were equal.
    """
    with torch.inference_mode(False):  # the same tensor is used in later calls, which may need gradients
        return torch.tensor(value, device=device)


def _create_score_mod(
    key_mask: Tensor | None, bias_table: Tensor | None, offset: Tensor
) -> Callable[..., Tensor] | None:
    """Return a `score_mod` for FlexAttention that adds the position bias and excludes padding.

    Args:
        key_mask: a mask [b, m] that is True for keys that are not padding.
        bias_table: the bias [h, 2 l - 1] for the distances -(l - 1) .. l - 1 from a query to a key.
        offset: the position of the first query, as a scalar tensor.
    """
    if key_mask is None and bias_table is None:
        return None
    middle: Any = (
        None if bias_table is None else _get_scalar_tensor("middle", bias_table.shape[-1] // 2, bias_table.device)
    )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if bias_table is not None:
            score = score + bias_table[h, j - i - offset + middle]
        return score if key_mask is None else torch.where(key_mask[b, j], score, -torch.inf)

    return score_mod


@lru_cache(maxsize=4)  # a mask has (n / 128)^2 elements
def _create_block_mask(key_range: KeyRange, length: int, key_length: int, device: torch.device) -> Any:
    """Return the `BlockMask` of a key range, with the key blocks to read and a function that masks their elements."""
    from torch.nn.attention.flex_attention import BlockMask

    # Distances beyond the text length have no effect, and the kernel uses 32-bit integers.
    before, after, step, global_tokens, offset = (
        _get_scalar_tensor(role, min(number, length + key_length), device)
        for role, number in zip((*KeyRange._fields, "first query"), (*key_range, key_length - length), strict=True)
    )

    is_dilated = key_range.step > 1

    def is_read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - offset
        in_window = (distance >= -before) & (distance <= after)
        in_window = in_window & (distance % step == 0) if is_dilated else in_window
        return in_window | (j < global_tokens) | (i + offset < global_tokens)

    with torch.inference_mode(False):  # as in `_get_scalar_tensor`
        read_blocks, full_blocks = (
            blocks.to(device)[None, None] for blocks in find_attended_blocks(key_range, length, key_length)
        )
        count, order = _get_block_counts_and_indices(read_blocks & ~full_blocks)
        full_block_indices = _get_block_counts_and_indices(full_blocks)
        lengths = (length, key_length)
        return BlockMask.from_kv_blocks(
            count,
            order,
            full_block_indices[0],
            full_block_indices[1],
            BLOCK_SIZE=BLOCK,
            mask_mod=is_read,
            seq_lengths=lengths,
        )


def _get_block_counts_and_indices(attended_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks that each query block reads, and the indices of all key blocks.

    The indices of the blocks that are read come first.
    """
    return attended_blocks.sum(-1, dtype=torch.int32), (~attended_blocks).int().argsort(dim=-1, stable=True).int()


def find_attended_blocks(
    key_range: KeyRange, length: int, key_length: int, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Return the key blocks that each query block reads, and those that it reads completely.

    A key block is read completely if all queries in the query block attend to all of its keys. The last blocks may be
    shorter than the others.

    Args:
        key_range: the key range of the attention module.
        length, key_length: n and m. The queries are at the last n of the m positions.
        block: the number of queries or keys per block.

    Returns:
        Two boolean tensors [query blocks, key blocks].
    """
    first_row = torch.arange(0, length, block)[:, None]
    first, last = first_row + key_length - length, (first_row + block).clamp(max=length) - 1 + key_length - length
    low = torch.arange(0, key_length, block)
    high = (low + block).clamp(max=key_length) - 1
    is_read = (high - first >= -key_range.before) & (low - last <= key_range.after)
    is_fully_read = (low - last >= -key_range.before) & (high - first <= key_range.after) & (key_range.step == 1)
    is_read |= (low < key_range.global_tokens) | (first < key_range.global_tokens)
    is_fully_read |= (high < key_range.global_tokens) | (last < key_range.global_tokens)
    return is_read, is_fully_read


def run_flex_trial(kind: FlexCallKind) -> str | None:
    """Compare FlexAttention with the blocked backend in small calls of this kind.

    Returns:
        The reason why FlexAttention must not be used, or None if the results agree.
    """

    def compute_errors() -> dict[str, float]:
        largest_errors: dict[str, float] = {}
        for batch, length, global_tokens in TRIAL_CALLS:
            states = _make_random_window_inputs(kind, batch, length)
            # Gradient-checkpointing hooks around this call must not see the tensors in the trial.
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                actual, expected = (
                    _compute_flex_trial_outputs(kind, states, global_tokens, uses_flex) for uses_flex in (True, False)
                )
            for name, tensor in expected.items():
                largest_errors[name] = max(
                    largest_errors.get(name, 0.0), compute_largest_error(actual[name], tensor, name)
                )
        return largest_errors

    return describe_kernel_mismatch("FlexAttention", compute_errors, get_tolerance(kind.dtype))


def _make_random_window_inputs(kind: FlexCallKind, batch: int, length: int) -> dict[str, Tensor]:
    """Return the tensors for a small call. From row to row, the padding grows by a third of the text length."""
    # A separate generator leaves the random state of the training run unchanged.
    generator = torch.Generator(kind.device).manual_seed(0)

    def make_random(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device).to(dtype)

    (heads, kv_heads), (size, value_size) = kind.heads, kind.sizes
    states = {  # with the same strides as in models
        "query": make_random(kind.dtype, batch, length, heads, size).transpose(1, 2),
        "key": make_random(kind.dtype, batch, length, kv_heads, size).transpose(1, 2),
        "value": make_random(kind.dtype, batch, length, kv_heads, value_size).transpose(1, 2),
        "d_output": make_random(kind.dtype, batch, length, heads, value_size),
    }
    if kind.has_padding:
        ends = length - torch.arange(batch, device=kind.device) * (length // 3)
        states["mask"] = (torch.arange(length, device=kind.device) < ends[:, None])[:, None, None]
    if kind.bias is not None:
        states["position_bias"] = make_random(kind.bias, 1, heads, 1, 2 * length - 1)
    return states


def _compute_flex_trial_outputs(
    kind: FlexCallKind, states: dict[str, Tensor], global_tokens: int, uses_flex: bool
) -> dict[str, Tensor]:
    """Return the output and the gradients for small trial inputs. The blocked backend uses float32 on the CPU."""
    key_range = KeyRange(TRIAL_WINDOW, TRIAL_WINDOW, 1 + kind.is_dilated, global_tokens)
    states = {name: tensor.detach() for name, tensor in states.items()}
    if not uses_flex:
        states = {name: t.cpu() if t.dtype == torch.bool else t.cpu().float() for name, t in states.items()}
    trained = [name for name in ("query", "key", "value", "position_bias") if name in states]
    trained = trained[: 3 + kind.trains_bias] if kind.with_backward else []
    for name in trained:
        states[name].requires_grad_()
    d_output = states.pop("d_output")
    with torch.set_grad_enabled(kind.with_backward), torch.autocast(kind.device.type, enabled=False):
        if uses_flex:
            query, key, value = (states[name] for name in ("query", "key", "value"))
            output = _attend_with_flex_attention(
                query, key, value, states.get("mask"), states.get("position_bias"), key_range, kind.scaling
            )
        else:
            call: dict[str, Any] = {**states, "scaling": kind.scaling, "key_range": key_range}
            output = talking_heads_attention(**call, backend="blocked")
        outcome = {"output": output}
        if trained:
            gradients = torch.autograd.grad(output, [states[name] for name in trained], d_output)
            outcome |= dict(zip(trained, gradients, strict=True))
    return {name: tensor.detach() for name, tensor in outcome.items()}
