"""Few queries that attend to a latent on a GPU: by Triton kernels that read it once, where they proved themselves.

In the absorbed form of `latent_attention` a step of a decoder reads one latent [b, 1, m, r], which is key and value of
all heads. Torch's fused kernels on CUDA read it twice, and slowly where r > 256: in a batch of 64 they take three
times as long as with keys and values of every head (benchmarks/gpu/README.md). Letters as in `softmax_attention`; the
n rows here are those of all heads and beams.

A kind of call is tried first (`kernel_trials`): a small one must agree with the formula.

Sources: arXiv 2405.04434, section 2.1.2 (the absorbed form); those of `latent_kernels`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .backend_choice import NO_FAILURES, agrees, disagreement_of, failure, largest_error, note
from .memory_efficient_attention import NAMESPACE, autocasts, registered_op
from .triton_attention import covers_device, kind_of_mask
from .variant_attention import is_exporting

__all__ = [
    "Launch",
    "attend_to_one_latent",
    "combine_kernel",
    "launch_of",
    "one_latent_by_kernels",
    "one_latent_serves",
    "partial_kernel",
    "triton",
]

partial_kernel: Any
combine_kernel: Any
try:
    import triton
    import triton.language as tl
except ImportError:  # the package and its Hub repositories must load without a GPU
    triton = partial_kernel = combine_kernel = None


# These numbers change between calls. The kernels are compiled without specialization on them.
ANY_LATENT_NUMBER = ["rows", "length", "keys_of_part", "parts", "mask_stride_b", "mask_stride_r"]

if triton is not None:

    @triton.jit
    def _read_rows(at, stride, rows, end, columns, WIDTH: tl.constexpr):
        """Load [rows, w] of a matrix with row stride `stride`; positions outside the matrix are zero."""
        inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        return tl.load(at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)

    @triton.jit
    def _where_there(logits, inside, at, offs_r, rows, stride_r, MASK: tl.constexpr, MASK_OF_ROWS: tl.constexpr):
        """Return logits [c, r], times log2(e), with minus infinity for keys that are not allowed."""
        if MASK > 0:
            if MASK_OF_ROWS:
                at += offs_r[None, :] * stride_r
                mask = tl.load(at, mask=inside & (offs_r < rows)[None, :], other=0)
            else:
                mask = tl.load(at, mask=inside, other=0)
        if MASK == 1:
            inside = inside & (mask != 0)
        if MASK == 2:
            # The lowest finite number times log2(e) would overflow to minus infinity, which would exclude the key.
            added = mask.to(tl.float32)
            scaled = tl.maximum(added * 1.4426950408889634, -1e38)
            logits += tl.where(added == float("-inf"), added, scaled)
        return tl.where(inside, logits, float("-inf"))

    @triton.jit(do_not_specialize=ANY_LATENT_NUMBER)
    def partial_kernel(
        query_ptr, latent_ptr, mask_ptr, output_ptr, sums_ptr,
        scale, rows, length, keys_of_part, parts,
        query_stride_b, query_stride_r, latent_stride_b, latent_stride_m,
        mask_stride_b, mask_stride_r, mask_stride_m,
        WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
        MASK: tl.constexpr, MASK_OF_ROWS: tl.constexpr, IN_PARTS: tl.constexpr,
    ):  # fmt: skip
        """Attend to a part of the keys; the program axes are batch, part and block of rows.

        The kernel writes the outputs of the part, [b, parts, rows, w]. It also writes its largest logits (times
        log2(e)) and its sums of exponentials, [b, parts, rows, 2]. A single log-sum-exp would lose the sums if all
        logits are the lowest finite number.
        """
        batch, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        offs_r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        first, second = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
        query_at, latent_at = query_ptr + batch * query_stride_b, latent_ptr + batch * latent_stride_b
        query = tl.trans(_read_rows(query_at, query_stride_r, offs_r, rows, first, WIDTH))  # [w, r]
        dtype = query.dtype
        output = tl.zeros([FIRST, ROWS], tl.float32)
        if WIDTH > FIRST:
            query_2 = tl.trans(_read_rows(query_at, query_stride_r, offs_r, rows, second, WIDTH))
            output_2 = tl.zeros([SECOND, ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        begin = part * keys_of_part
        end = tl.minimum(begin + keys_of_part, length)
        for start in range(begin, end, BLOCK):
            keys = start + tl.arange(0, BLOCK)
            block = _read_rows(latent_at, latent_stride_m, keys, end, first, WIDTH)  # [c, w]
            logits = tl.dot(block, query)  # [c, r]
            if WIDTH > FIRST:
                block_2 = _read_rows(latent_at, latent_stride_m, keys, end, second, WIDTH)
                logits = tl.dot(block_2, query_2, logits)
            logits = logits * scale
            mask_at = mask_ptr + batch * mask_stride_b + keys[:, None] * mask_stride_m
            logits = _where_there(
                logits, (keys < end)[:, None], mask_at, offs_r, rows, mask_stride_r, MASK, MASK_OF_ROWS
            )
            new_top = tl.maximum(top, tl.max(logits, 0))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # for a row without any allowed key so far
            factor = tl.exp2(top - safe)
            weights = tl.exp2(logits - safe[None, :])
            total = total * factor + tl.sum(weights, 0)
            weights = weights.to(dtype)
            output = tl.dot(tl.trans(block), weights, output * factor[None, :])  # [w, r]
            if WIDTH > FIRST:
                output_2 = tl.dot(tl.trans(block_2), weights, output_2 * factor[None, :])
            top = new_top
        share = 1.0 / tl.where(total == 0.0, 1.0, total)[None, :]
        at = (batch * parts + part) * rows + offs_r
        output_at = output_ptr + at[None, :] * WIDTH
        written = (offs_r < rows)[None, :]
        tl.store(output_at + first[:, None], output * share, mask=written & (first < WIDTH)[:, None])
        if WIDTH > FIRST:
            tl.store(output_at + second[:, None], output_2 * share, mask=written & (second < WIDTH)[:, None])
        if IN_PARTS:
            tl.store(sums_ptr + 2 * at, top, mask=offs_r < rows)
            tl.store(sums_ptr + 2 * at + 1, total, mask=offs_r < rows)

    @triton.jit(do_not_specialize=["rows", "parts"])
    def combine_kernel(
        part_ptr, sums_ptr, output_ptr, rows, parts,
        WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MOST_PARTS: tl.constexpr,
    ):  # fmt: skip
        """Combine the parts of a row; the program axes are batch and row."""
        batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
        offs_p, columns = tl.arange(0, MOST_PARTS), tl.arange(0, COLUMNS)
        sums_at = sums_ptr + 2 * ((batch * parts + offs_p) * rows + row)
        tops = tl.load(sums_at, mask=offs_p < parts, other=float("-inf"))
        sums = tl.load(sums_at + 1, mask=offs_p < parts, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(top == float("-inf"), 0.0, top)  # for a row without any allowed key
        total = tl.sum(tl.exp2(tops - top) * sums, 0)
        total = tl.where(total == 0.0, 1.0, total)
        output = tl.zeros([COLUMNS], tl.float32)
        for part in range(parts):
            at = (batch * parts + part) * rows + row
            weight = tl.exp2(tl.load(sums_ptr + 2 * at) - top) * tl.load(sums_ptr + 2 * at + 1) / total
            output += weight * tl.load(part_ptr + at * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        tl.store(output_ptr + (batch * rows + row) * WIDTH + columns, output, mask=columns < WIDTH)


LATENT_DTYPES = (torch.bfloat16, torch.float16)
MOST_LATENT_ROWS, LEAST_WIDTH, MOST_WIDTH = 16, 16, 1024
# The launches are measured on Hopper alone: other GPUs have less shared memory, or other matrix units.
MEASURED_CAPABILITY = 9
# Outside a compiled graph Python takes longer to launch two kernels of Triton's, some 0.1 ms, than one of torch's.
# That is worth it from so many bytes on, which take longer to read.
LEAST_BYTES = 2**29
# The largest error of a row in the trial, relative to a typical row: far above rounding, far below what one key makes.
LATENT_TOLERANCE = 2e-2
LOG2_E = 1.4426950408889634


class Launch(NamedTuple):
    """How the first kernel is launched: keys of a block, rows of a program, warps, stages, most programs."""

    block: int
    rows: int
    warps: int
    stages: int
    programs: int


class _LatentKind(NamedTuple):
    """Properties of a call that need their own compiled kernel."""

    device: torch.device
    dtype: torch.dtype
    width: int
    rows: int
    mask: torch.dtype | None
    has_mask_of_rows: bool
    in_parts: bool


_latents_agreed: dict[_LatentKind, bool] = {}


def one_latent_serves(query: Tensor, latent: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Say whether the kernels are to serve a call, if they agree; never raises.

    Args:
        query: [b, 1, n, r].
        latent: c [b, 1, m, r].
        mask: as in `attend_to_one_latent`.
        dropout: the probability that a weight is dropped.
    """
    if triton is None or dropout or is_exporting() or torch.jit.is_tracing() or not _is_measured(query.device):
        return False
    if type(query) is not Tensor or type(latent) is not Tensor or query.numel() == 0 or latent.numel() == 0:
        return False
    if query.dtype not in LATENT_DTYPES or latent.dtype != query.dtype or latent.device != query.device:
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, latent, mask) if each is not None):
        return False
    if autocasts(query.device.type) and torch.get_autocast_dtype(query.device.type) != query.dtype:
        return False
    if query.shape[2] > MOST_LATENT_ROWS or not LEAST_WIDTH <= latent.shape[-1] <= MOST_WIDTH:
        return False
    # A compiled step is most often the content of a CUDA graph, which no launch holds up.
    return torch.compiler.is_compiling() or latent.numel() * latent.element_size() >= LEAST_BYTES


@torch.compiler.assume_constant_result
def _is_measured(device: torch.device) -> bool:
    if device.type != "cuda":
        return covers_device(device)
    return covers_device(device) and torch.cuda.get_device_capability(device)[0] == MEASURED_CAPABILITY


def attend_to_one_latent(query: Tensor, latent: Tensor, mask: Tensor | None = None, *, scaling: float) -> Tensor:
    """Attend to a latent that is key and value of all rows; not differentiable.

    Args:
        query: [b, 1, n, r], the rows of all heads and beams that read one memory.
        latent: c [b, 1, m, r].
        mask: boolean (True = attend) or additive, of four dimensions, broadcastable to [b, 1, n, m]. A row that may
            attend to nothing gets zeros.
        scaling: the factor of the dot products.

    Returns:
        The outputs [b, 1, n, r].
    """
    if torch.compiler.is_compiling():
        return _op(query, latent, mask, scaling)
    return _attend(query, latent, mask, scaling)


def _attend(query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(query):
        return _attend_here(query, latent, mask, scaling)


def _attend_here(query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    launch = launch_of(query, latent)
    kind = _LatentKind(
        device=query.device,
        dtype=query.dtype,
        width=query.shape[-1],
        rows=query.shape[2],
        mask=None if mask is None else mask.dtype,
        has_mask_of_rows=mask is not None and _row_stride(mask) != 0,
        in_parts=_parts(query, latent, launch)[0] > 1,
    )
    refusal = (
        f"Attention to a latent of {kind.width} on {kind.device} in {kind.dtype}, {kind.rows} rows, is computed by "
        f"torch's kernels, which are slower"
    )
    if agrees(_latents_agreed, kind, partial(_latent_disagreement, kind, launch), refusal):
        try:
            return one_latent_by_kernels(query, latent, mask, scaling, launch)
        except NO_FAILURES:
            raise
        except Exception as error:  # a compiler's, for steps from row to row that the trial had not
            note(_latents_agreed, kind, failure("the Triton kernels", error), refusal)
    return scaled_dot_product_attention(query, latent, latent, mask, scale=scaling).contiguous()


def launch_of(query: Tensor, latent: Tensor) -> Launch:
    """Return how the kernels are launched for these inputs; chosen on an H200 (benchmarks/gpu/latent_kernel.py)."""
    if latent.shape[-1] <= 256:
        return Launch(block=64, rows=16, warps=4, stages=2, programs=528)
    return Launch(block=32, rows=16, warps=4, stages=3 if latent.shape[-1] <= 640 else 2, programs=264)


def _parts(query: Tensor, latent: Tensor, launch: Launch) -> tuple[int, int]:
    """Return the parts in which a memory is read, and the keys of a part, whole blocks."""
    programs = query.shape[0] * -(-query.shape[2] // launch.rows)
    blocks = -(-latent.shape[2] // launch.block)
    parts = max(1, min(launch.programs // programs, blocks))
    keys = -(-blocks // parts) * launch.block
    return -(-latent.shape[2] // keys), keys


def _row_stride(mask: Tensor) -> int:
    return mask.stride(2) if mask.shape[2] > 1 else 0


def one_latent_by_kernels(
    query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float, launch: Launch
) -> Tensor:
    """Return what `attend_to_one_latent` does, by the kernels, launched as asked."""
    (batches, _, rows, width), length = query.shape, latent.shape[2]
    first = 1 << (width.bit_length() - 1)
    second = max(16, triton.next_power_of_2(width - first))
    parts, keys_of_part = _parts(query, latent, launch)
    query, latent = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, latent))
    output = torch.empty((batches, 1, rows, width), dtype=query.dtype, device=query.device)
    found, sums = output, output
    if parts > 1:
        found = torch.empty((batches, parts, rows, width), dtype=torch.float32, device=query.device)
        sums = torch.empty((batches, parts, rows, 2), dtype=torch.float32, device=query.device)
    mask_strides = (0, 0, 0)
    if mask is not None:
        steps = mask.expand(batches, 1, rows, length).stride()
        mask_strides = (steps[0], _row_stride(mask), steps[3])
    partial_kernel[(batches, parts, -(-rows // launch.rows))](
        query, latent, query if mask is None else mask, found, sums,
        scaling * LOG2_E, rows, length, keys_of_part, parts,
        query.stride(0), query.stride(2), latent.stride(0), latent.stride(2), *mask_strides,
        WIDTH=width, FIRST=first, SECOND=second, ROWS=launch.rows, BLOCK=launch.block, MASK=kind_of_mask(mask),
        MASK_OF_ROWS=mask_strides[1] != 0, IN_PARTS=parts > 1, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if parts > 1:
        sizes = {"COLUMNS": triton.next_power_of_2(width), "MOST_PARTS": triton.next_power_of_2(parts)}
        combine_kernel[(batches, rows)](found, sums, output, rows, parts, WIDTH=width, **sizes)
    return output


def _latent_disagreement(kind: _LatentKind, launch: Launch) -> str | None:
    """Compute a small call of this kind by the kernels and by the formula; return what is wrong with them, or None."""
    # In one part, or two, of several blocks each; the last block is not a whole one.
    length = 5 * launch.block - 3
    launch = launch._replace(programs=4 if kind.in_parts else 1)

    def errors() -> dict[str, float]:
        query, latent, mask = _random_latent_call(kind, length, launch.block)
        scaling, added = kind.width**-0.5, torch.zeros(())
        if mask is not None:
            there = mask.cpu()
            added = torch.where(there, 0.0, -torch.inf) if mask.dtype == torch.bool else there.float()
        found = one_latent_by_kernels(query, latent, mask, scaling, launch)
        exact_query, exact_latent = query.cpu().float(), latent.cpu().float()
        expected = torch.softmax(exact_query @ exact_latent.mT * scaling + added, -1) @ exact_latent
        # But for the first column, which is huge.
        found, expected = (each[..., 1:].transpose(1, 2) for each in (found, expected))
        return {"output": largest_error(found, expected, "output")}

    return disagreement_of("the Triton kernels", errors, LATENT_TOLERANCE)


def _random_latent_call(kind: _LatentKind, length: int, block: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the queries, the latent and the mask of a small call; of the first block of keys nothing may be read."""
    # A generator of its own: trying the kernels must not move the random numbers of who calls.
    generator = torch.Generator(kind.device).manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device)

    query, latent, mask = new(2, 1, kind.rows, kind.width), new(2, 1, length, kind.width), None
    # Logits of some -4, so that a key that is not there, of zeros, would outweigh all that are.
    query[..., 0], latent[..., 0] = 2 * kind.width**0.25, -2 * kind.width**0.25
    if kind.mask is not None:
        mask = new(2, 1, kind.rows if kind.has_mask_of_rows else 1, length)
        mask = mask > -1 if kind.mask == torch.bool else mask.to(kind.mask)
        mask[..., :block] = False if kind.mask == torch.bool else -torch.inf
    return query.to(kind.dtype), latent.to(kind.dtype), mask


def _attend_fake(query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return query.new_empty(query.shape)


_op = registered_op("attend_to_one_latent")
if _op is None:
    _op = torch.library.custom_op(
        f"{NAMESPACE}::attend_to_one_latent",
        _attend,
        mutates_args=(),
        schema="(Tensor query, Tensor latent, Tensor? mask, float scaling) -> Tensor",
    )
    _op.register_fake(_attend_fake)
