"""Attention from a few queries to a latent on GPUs, with Triton kernels that read the latent only once.

In the absorbed form of `latent_attention`, a decoding step reads one latent [b, 1, m, r], which serves as both the key
and the value of all heads. The fused CUDA kernels in torch read it twice, and they are slow for r > 256. With a batch
size of 64, they take three times as long as with separate keys and values for each head (benchmarks/gpu/README.md). In
this module, n is the number of query rows from all heads and beams. The attention is computed by two kernels:

    partial_kernel    a program reads a part of the keys for a block of rows, one block of keys at a time
    combine_kernel    combines the parts of a row, weighted by their sums of exponentials

A block of keys stays in shared memory and is used in both products. The long side of a product is the number of keys
in the first product and the latent width in the second. The matrix units of Hopper GPUs read this side from shared
memory. The short side is the small number of rows. The width is split into two powers of two, such as 768 = 512 + 256,
because padding it to a single power of two would waste a quarter of the computation.

The first call of each kind is preceded by a trial (see `backend_choice`), in which a small call must agree with the
formula. The symbols are defined in `softmax_attention`. c is the number of keys per block, and w is a width. If Triton
is not installed, the kernels are None.

Sources: arXiv 2405.04434, section 2.1.2 (the absorbed form); arXiv 2205.14135 (sequential blocks of keys);
"Flash-Decoding for long-context inference" (Stanford CRFM, 2023; parallel parts of the keys).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .backend_choice import compute_largest_error, describe_kernel_mismatch, run_after_trial
from .memory_efficient_attention import NAMESPACE, get_registered_op, is_autocast_enabled
from .triton_attention import get_mask_type, supports_device
from .variant_attention import is_exporting

__all__ = [
    "LaunchSettings",
    "attend_to_one_latent",
    "choose_launch_settings",
    "run_latent_kernels",
    "should_use_latent_kernels",
    "triton",
]

partial_kernel: Any
combine_kernel: Any
try:
    import triton
    import triton.language as tl
except ImportError:  # the package and its Hub repositories must also load without Triton
    triton = partial_kernel = combine_kernel = None


# Arguments that change between calls. The kernels are not specialized for their values.
ANY_LATENT_NUMBER = ["rows", "length", "keys_per_part", "parts", "mask_stride_b", "mask_stride_r"]

if triton is not None:

    @triton.jit
    def _load_rows(pointers, stride, rows, end, columns, WIDTH: tl.constexpr):
        """Load a block [rows, w] of a matrix with row stride `stride`. Positions outside the matrix are zero."""
        inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        return tl.load(pointers + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)

    @triton.jit
    def _mask_logits(logits, inside, pointers, offs_r, rows, stride_r, MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr):
        """Return the logits [c, r] times log2(e), with minus infinity for keys that are not allowed."""
        if MASK > 0:
            if MASK_PER_ROW:
                pointers += offs_r[None, :] * stride_r
                mask = tl.load(pointers, mask=inside & (offs_r < rows)[None, :], other=0)
            else:
                mask = tl.load(pointers, mask=inside, other=0)
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
        scale, rows, length, keys_per_part, parts,
        query_stride_b, query_stride_r, latent_stride_b, latent_stride_m,
        mask_stride_b, mask_stride_r, mask_stride_m,
        WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
        MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IN_PARTS: tl.constexpr,
    ):  # fmt: skip
        """Attend to a part of the keys. The program axes are batch, part and block of rows.

        The kernel writes the outputs of the part, [b, parts, rows, w], with its largest logits (times log2(e)) and
        sums of exponentials, [b, parts, rows, 2]. A single log-sum-exp would lose the sums if all logits are the
        lowest finite number.
        """
        batch, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        offs_r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        first, second = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
        query_ptrs, latent_ptrs = query_ptr + batch * query_stride_b, latent_ptr + batch * latent_stride_b
        query = tl.trans(_load_rows(query_ptrs, query_stride_r, offs_r, rows, first, WIDTH))  # [w, r]
        dtype = query.dtype
        output = tl.zeros([FIRST, ROWS], tl.float32)
        if WIDTH > FIRST:
            query_2 = tl.trans(_load_rows(query_ptrs, query_stride_r, offs_r, rows, second, WIDTH))
            output_2 = tl.zeros([SECOND, ROWS], tl.float32)
        max_logit = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        begin = part * keys_per_part
        end = tl.minimum(begin + keys_per_part, length)
        for start in range(begin, end, BLOCK):
            keys = start + tl.arange(0, BLOCK)
            block = _load_rows(latent_ptrs, latent_stride_m, keys, end, first, WIDTH)  # [c, w]
            logits = tl.dot(block, query)  # [c, r]
            if WIDTH > FIRST:
                block_2 = _load_rows(latent_ptrs, latent_stride_m, keys, end, second, WIDTH)
                logits = tl.dot(block_2, query_2, logits)
            logits = logits * scale
            mask_ptrs = mask_ptr + batch * mask_stride_b + keys[:, None] * mask_stride_m
            logits = _mask_logits(
                logits, (keys < end)[:, None], mask_ptrs, offs_r, rows, mask_stride_r, MASK, MASK_PER_ROW
            )
            new_max_logit = tl.maximum(max_logit, tl.max(logits, 0))
            finite_max_logit = tl.where(
                new_max_logit == float("-inf"), 0.0, new_max_logit
            )  # for rows without any allowed keys so far
            factor = tl.exp2(max_logit - finite_max_logit)
            weights = tl.exp2(logits - finite_max_logit[None, :])
            total = total * factor + tl.sum(weights, 0)
            weights = weights.to(dtype)
            output = tl.dot(tl.trans(block), weights, output * factor[None, :])  # [w, r]
            if WIDTH > FIRST:
                output_2 = tl.dot(tl.trans(block_2), weights, output_2 * factor[None, :])
            max_logit = new_max_logit
        share = 1.0 / tl.where(total == 0.0, 1.0, total)[None, :]
        offset = (batch * parts + part) * rows + offs_r
        output_ptrs = output_ptr + offset[None, :] * WIDTH
        written = (offs_r < rows)[None, :]
        tl.store(output_ptrs + first[:, None], output * share, mask=written & (first < WIDTH)[:, None])
        if WIDTH > FIRST:
            tl.store(output_ptrs + second[:, None], output_2 * share, mask=written & (second < WIDTH)[:, None])
        if IN_PARTS:
            tl.store(sums_ptr + 2 * offset, max_logit, mask=offs_r < rows)
            tl.store(sums_ptr + 2 * offset + 1, total, mask=offs_r < rows)

    @triton.jit(do_not_specialize=["rows", "parts"])
    def combine_kernel(
        part_ptr, sums_ptr, output_ptr, rows, parts,
        WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MAX_PARTS: tl.constexpr,
    ):  # fmt: skip
        """Combine the parts of a row. The program axes are batch and row."""
        batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
        offs_p, columns = tl.arange(0, MAX_PARTS), tl.arange(0, COLUMNS)
        sums_ptrs = sums_ptr + 2 * ((batch * parts + offs_p) * rows + row)
        max_logits = tl.load(sums_ptrs, mask=offs_p < parts, other=float("-inf"))
        sums = tl.load(sums_ptrs + 1, mask=offs_p < parts, other=0.0)
        max_logit = tl.max(max_logits, 0)
        max_logit = tl.where(max_logit == float("-inf"), 0.0, max_logit)  # for rows without any allowed keys
        total = tl.sum(tl.exp2(max_logits - max_logit) * sums, 0)
        total = tl.where(total == 0.0, 1.0, total)
        output = tl.zeros([COLUMNS], tl.float32)
        for part in range(parts):
            offset = (batch * parts + part) * rows + row
            weight = tl.exp2(tl.load(sums_ptr + 2 * offset) - max_logit) * tl.load(sums_ptr + 2 * offset + 1) / total
            output += weight * tl.load(part_ptr + offset * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        tl.store(output_ptr + (batch * rows + row) * WIDTH + columns, output, mask=columns < WIDTH)


LATENT_DTYPES = (torch.bfloat16, torch.float16)
MAX_LATENT_ROWS, MIN_LATENT_WIDTH, MAX_LATENT_WIDTH = 16, 16, 1024
# The launch settings were only measured on Hopper GPUs. Other GPUs have less shared memory or different matrix units.
MEASURED_CAPABILITY = 9
# Outside compiled graphs, Python takes about 0.1 ms longer to launch two Triton kernels than to launch one torch
# kernel. The Triton kernels are faster if the latent has at least this number of bytes.
MIN_LATENT_BYTES = 2**29
# The tolerated relative error of a row in the trial. It is much larger than rounding errors and much smaller than the
# error that a single missing key would cause.
LATENT_TOLERANCE = 2e-2
LOG2_E = 1.4426950408889634


class LaunchSettings(NamedTuple):
    """Launch settings for `partial_kernel`: keys per block, rows per program, warps, stages, and maximum programs."""

    block: int
    rows: int
    warps: int
    stages: int
    programs: int


class _LatentKernelKey(NamedTuple):
    """The properties of a call for which a separate kernel is compiled."""

    device: torch.device
    dtype: torch.dtype
    width: int
    rows: int
    mask: torch.dtype | None
    has_mask_per_row: bool
    in_parts: bool


_latent_trial_results: dict[_LatentKernelKey, bool] = {}


def should_use_latent_kernels(query: Tensor, latent: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return True if a call should use these kernels, provided that their trial succeeds.

    This function never raises an error.

    Args:
        query: [b, 1, n, r].
        latent: c [b, 1, m, r].
        mask: see `attend_to_one_latent`.
        dropout: the dropout probability.
    """
    if (
        triton is None
        or dropout
        or is_exporting()
        or torch.jit.is_tracing()
        or not _has_measured_capability(query.device)
    ):
        return False
    if type(query) is not Tensor or type(latent) is not Tensor or query.numel() == 0 or latent.numel() == 0:
        return False
    if query.dtype not in LATENT_DTYPES or latent.dtype != query.dtype or latent.device != query.device:
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, latent, mask) if tensor is not None):
        return False
    if is_autocast_enabled(query.device.type) and torch.get_autocast_dtype(query.device.type) != query.dtype:
        return False
    if query.shape[2] > MAX_LATENT_ROWS or not MIN_LATENT_WIDTH <= latent.shape[-1] <= MAX_LATENT_WIDTH:
        return False
    # A compiled step usually runs in a CUDA graph, in which launches take no additional time.
    return torch.compiler.is_compiling() or latent.numel() * latent.element_size() >= MIN_LATENT_BYTES


@torch.compiler.assume_constant_result
def _has_measured_capability(device: torch.device) -> bool:
    if device.type != "cuda":
        return supports_device(device)
    return supports_device(device) and torch.cuda.get_device_capability(device)[0] == MEASURED_CAPABILITY


def attend_to_one_latent(query: Tensor, latent: Tensor, mask: Tensor | None = None, *, scaling: float) -> Tensor:
    """Attend to a latent that serves as the key and the value for all rows. This function is not differentiable.

    Args:
        query: the rows of all heads and beams that read the same latent, [b, 1, n, r].
        latent: c [b, 1, m, r].
        mask: a boolean mask (True = attend) or an additive mask with four dimensions, broadcastable to [b, 1, n, m].
            The output is zero for rows without any allowed keys.
        scaling: the factor by which the dot products are multiplied.

    Returns:
        The outputs [b, 1, n, r].
    """
    if torch.compiler.is_compiling():
        return _op(query, latent, mask, scaling)
    return _attend(query, latent, mask, scaling)


def _attend(query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    launch = choose_launch_settings(query, latent)
    kind = _LatentKernelKey(
        device=query.device,
        dtype=query.dtype,
        width=query.shape[-1],
        rows=query.shape[2],
        mask=None if mask is None else mask.dtype,
        has_mask_per_row=mask is not None and _get_row_stride(mask) != 0,
        in_parts=_partition_keys(query, latent, launch)[0] > 1,
    )
    fallback_message = (
        f"The slower kernels in torch compute attention to a latent of dimension {kind.width} on {kind.device} in "
        f"{kind.dtype} with {kind.rows} rows. Reason"
    )
    trial = partial(_run_latent_trial, kind, launch)
    run = partial(run_latent_kernels, query, latent, mask, scaling, launch)
    # Triton launches kernels on the current device, which may differ from the device of the tensors.
    with torch.cuda.device_of(query):
        output = run_after_trial(_latent_trial_results, kind, trial, run, fallback_message)
    if output is None:
        return scaled_dot_product_attention(query, latent, latent, mask, scale=scaling).contiguous()
    return output


def choose_launch_settings(query: Tensor, latent: Tensor) -> LaunchSettings:
    """Return the fastest launch settings for these inputs, measured on an H200 (benchmarks/gpu/latent_kernel.py)."""
    if latent.shape[-1] <= 256:
        return LaunchSettings(block=64, rows=16, warps=4, stages=2, programs=528)
    return LaunchSettings(block=32, rows=16, warps=4, stages=3 if latent.shape[-1] <= 640 else 2, programs=264)


def _partition_keys(query: Tensor, latent: Tensor, launch: LaunchSettings) -> tuple[int, int]:
    """Return the number of parts into which a latent is divided, and the number of keys per part.

    The number of keys per part is a multiple of the block size.
    """
    programs = query.shape[0] * -(-query.shape[2] // launch.rows)
    blocks = -(-latent.shape[2] // launch.block)
    parts = max(1, min(launch.programs // programs, blocks))
    keys = -(-blocks // parts) * launch.block
    return -(-latent.shape[2] // keys), keys


def _get_row_stride(mask: Tensor) -> int:
    return mask.stride(2) if mask.shape[2] > 1 else 0


def run_latent_kernels(
    query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float, launch: LaunchSettings
) -> Tensor:
    """Compute `attend_to_one_latent` with the kernels and the given launch settings."""
    (batches, _, rows, width), length = query.shape, latent.shape[2]
    first = 1 << (width.bit_length() - 1)
    second = max(16, triton.next_power_of_2(width - first))
    parts, keys_per_part = _partition_keys(query, latent, launch)
    query, latent = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, latent))
    output = torch.empty((batches, 1, rows, width), dtype=query.dtype, device=query.device)
    partial_output, sums = output, output
    if parts > 1:
        partial_output = torch.empty((batches, parts, rows, width), dtype=torch.float32, device=query.device)
        sums = torch.empty((batches, parts, rows, 2), dtype=torch.float32, device=query.device)
    mask_strides = (0, 0, 0)
    if mask is not None:
        steps = mask.expand(batches, 1, rows, length).stride()
        mask_strides = (steps[0], _get_row_stride(mask), steps[3])
    partial_kernel[(batches, parts, -(-rows // launch.rows))](
        query, latent, query if mask is None else mask, partial_output, sums,
        scaling * LOG2_E, rows, length, keys_per_part, parts,
        query.stride(0), query.stride(2), latent.stride(0), latent.stride(2), *mask_strides,
        WIDTH=width, FIRST=first, SECOND=second, ROWS=launch.rows, BLOCK=launch.block, MASK=get_mask_type(mask),
        MASK_PER_ROW=mask_strides[1] != 0, IN_PARTS=parts > 1, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if parts > 1:
        sizes = {"COLUMNS": triton.next_power_of_2(width), "MAX_PARTS": triton.next_power_of_2(parts)}
        combine_kernel[(batches, rows)](partial_output, sums, output, rows, parts, WIDTH=width, **sizes)
    return output


def _run_latent_trial(kind: _LatentKernelKey, launch: LaunchSettings) -> str | None:
    """Compare the kernels with the formula in a small call of this kind.

    Returns:
        The reason why the kernels must not be used, or None if the results agree.
    """
    # The keys form one or two parts with several blocks each, and the last block is incomplete.
    length = 5 * launch.block - 3
    launch = launch._replace(programs=4 if kind.in_parts else 1)

    def compute_errors() -> dict[str, float]:
        query, latent, mask = _make_random_latent_inputs(kind, length, launch.block)
        scaling, added = kind.width**-0.5, torch.zeros(())
        if mask is not None:
            mask_on_cpu = mask.cpu()
            added = torch.where(mask_on_cpu, 0.0, -torch.inf) if mask.dtype == torch.bool else mask_on_cpu.float()
        actual = run_latent_kernels(query, latent, mask, scaling, launch)
        exact_query, exact_latent = query.cpu().float(), latent.cpu().float()
        expected = torch.softmax(exact_query @ exact_latent.mT * scaling + added, -1) @ exact_latent
        # The first column is not compared, because its values are much larger.
        actual, expected = (tensor[..., 1:].transpose(1, 2) for tensor in (actual, expected))
        return {"output": compute_largest_error(actual, expected, "output")}

    return describe_kernel_mismatch("the Triton kernels", compute_errors, LATENT_TOLERANCE)


def _make_random_latent_inputs(
    kind: _LatentKernelKey, length: int, block: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the queries, the latent and the mask for a small call. The mask excludes the first block of keys."""
    # A separate generator leaves the caller's random state unchanged.
    generator = torch.Generator(kind.device).manual_seed(0)

    def make_random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device)

    query, latent, mask = make_random(2, 1, kind.rows, kind.width), make_random(2, 1, length, kind.width), None
    # The logits are about -4, so that a key that is wrongly read as zeros would have a larger weight than all real
    # keys.
    query[..., 0], latent[..., 0] = 2 * kind.width**0.25, -2 * kind.width**0.25
    if kind.mask is not None:
        mask = make_random(2, 1, kind.rows if kind.has_mask_per_row else 1, length)
        mask = mask > -1 if kind.mask == torch.bool else mask.to(kind.mask)
        mask[..., :block] = False if kind.mask == torch.bool else -torch.inf
    return query.to(kind.dtype), latent.to(kind.dtype), mask


def _attend_fake(query: Tensor, latent: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return query.new_empty(query.shape)


_op = get_registered_op("attend_to_one_latent")
if _op is None:
    _op = torch.library.custom_op(
        f"{NAMESPACE}::attend_to_one_latent",
        _attend,
        mutates_args=(),
        schema="(Tensor query, Tensor latent, Tensor? mask, float scaling) -> Tensor",
    )
    _op.register_fake(_attend_fake)
