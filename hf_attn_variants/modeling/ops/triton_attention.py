"""Talking-heads attention on GPUs, in which a Triton kernel mixes the heads and cuBLAS computes the matrix products.

The query rows are processed in chunks whose scores fit into a workspace of fixed size, so memory grows linearly with n
and m:

    forward    S = Q K^T                               one batched product
               W = P_w(softmax(P_l(S) + bias + mask))  one kernel: a program has all heads of a query row
               O = W V                                 one batched product
    backward   S = Q K^T, G = dO V^T                   two batched products
               S -> dS, G -> W, dP_l, dP_w             one kernel, in place, from the statistics of the forward pass
               dQ = dS K, dK += dS^T Q, dV += W^T dO   three batched products

The forward pass saves two statistics per row and head: the largest logit and the inverse sum of exponentials. The
backward pass recomputes the softmax from them. Each program writes its own contribution to dP_l and dP_w. The
contributions are summed in a fixed order instead of with atomic additions, so that results are reproducible.

In the kernels, the products with P_l and P_w are computed by `tl.dot` on [positions, heads]. The heads are padded to a
power of two, at least 16. The positions provide the long side that the matrix units require.

A single fused kernel would be slower. Because P_w mixes normalized weights, such a kernel would compute each logit
twice (three times in the backward pass). Its h * rows * d outputs would have to fit into registers, which limits it to
about 32 rows if h * d = 1024. It would therefore read the keys and values n / 32 times. This module uses a workspace
in memory instead.

The symbols are defined in `softmax_attention`. c is the number of key positions per block. If Triton is not installed,
the kernels are None.

Sources: arXiv 2003.02436, section 3 (the formula); arXiv 2205.14135 (gradient of the softmax from row statistics).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .blocked_attention import AttentionOperands, add_bias_gradient, stack_groups

__all__ = [
    "allows_tf32",
    "backward_kernel",
    "forward_kernel",
    "get_mask_type",
    "supports_device",
    "supports_operands",
    "triton",
    "triton_backward",
    "triton_forward",
]

try:
    import triton
    import triton.language as tl
except ImportError:  # the package and its Hub repositories must also load without Triton
    triton = backward_kernel = forward_kernel = None


# Arguments that differ between batches. Without these lists, Triton would recompile the kernels for each length.
ANY_NUMBER = ["batch0", "row0", "rows", "length", "key_length"]
ANY_NUMBER += ["bias_stride_b", "bias_stride_n", "mask_stride_b", "mask_stride_n"]
ANY_ALIGNMENT = ["bias_stride_h", "bias_stride_m", "mask_stride_h", "mask_stride_m"]

if triton is not None:

    @triton.jit
    def _load_heads(pointers, stride, offs_c, end, HEADS: tl.constexpr, PAD: tl.constexpr):
        """Load a block [heads, c] up to position `end`, from a tensor whose heads are `stride` elements apart."""
        heads = tl.arange(0, PAD)
        inside = (heads < HEADS)[:, None] & (offs_c < end)[None, :]
        return tl.load(pointers + heads[:, None] * stride + offs_c[None, :], mask=inside, other=0.0)

    @triton.jit
    def _store_heads(pointers, values, stride, offs_c, end, HEADS: tl.constexpr, PAD: tl.constexpr):
        """Store a block [heads, c] at the position from which `_load_heads` loads it."""
        heads = tl.arange(0, PAD)
        inside = (heads < HEADS)[:, None] & (offs_c < end)[None, :]
        tl.store(pointers + heads[:, None] * stride + offs_c[None, :], values, mask=inside)

    @triton.jit
    def _load_bias_or_mask(
        pointers, offs_c, inside, stride_h, stride_m, HEADS: tl.constexpr, PAD: tl.constexpr, PER_HEAD: tl.constexpr
    ):
        """Load a block of a bias or mask as [c, h], or as [c, 1] if all heads share it."""
        if PER_HEAD:
            heads = tl.arange(0, PAD)
            is_inside = (heads < HEADS)[:, None] & inside[None, :]
            values = tl.load(
                pointers + heads.to(tl.int64)[:, None] * stride_h + offs_c[None, :] * stride_m, mask=is_inside, other=0
            )
            return tl.trans(values)
        else:
            return tl.load(pointers + offs_c * stride_m, mask=inside, other=0)[:, None]

    @triton.jit
    def _compute_logits(
        scores_ptrs, proj, bias_ptrs, mask_ptrs, row, scale, end, buffer_length, offs_c,
        score_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
        HEADS_IN: tl.constexpr, HEADS: tl.constexpr, PAD_IN: tl.constexpr, PAD: tl.constexpr,
        MIX: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, MASK_PER_HEAD: tl.constexpr,
        ZEROED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Load a block of scores [c, h_k], and return it together with the logits of the softmax heads [c, h]."""
        inside = offs_c < end
        # The whole padded row is loaded, because this allows wide loads. The padding is uninitialized and must be
        # replaced by zeros for sums over positions (ZEROED). This is not necessary for the logits, because positions
        # outside the row are excluded below.
        scores = tl.trans(_load_heads(scores_ptrs, score_stride, offs_c, buffer_length, HEADS_IN, PAD_IN))  # [c, h_k]
        if ZEROED:
            scores = tl.where(inside[:, None], scores, 0.0).to(scores.dtype)
        if MIX:
            logits = tl.dot(scores, proj, input_precision=PRECISION) * scale  # [c, h]
        else:
            logits = scores.to(tl.float32) * scale
        if BIAS:
            bias = _load_bias_or_mask(bias_ptrs, offs_c, inside, bias_stride_h, bias_stride_m, HEADS, PAD, True)
            logits += bias.to(tl.float32)
        if MASK:
            mask = _load_bias_or_mask(
                mask_ptrs, offs_c, inside, mask_stride_h, mask_stride_m, HEADS, PAD, MASK_PER_HEAD
            )
        if MASK == 1:
            logits = tl.where(mask != 0, logits, float("-inf"))
        if MASK == 2:
            logits += mask.to(tl.float32)
        return scores, tl.where(inside[:, None], logits, float("-inf"))

    @triton.jit
    def _compute_dropout_factors(seed, row, length, offs_c, head_base, dropout, PAD: tl.constexpr):
        """Return the dropout factors [c, h_v], 0 or 1 / (1 - dropout), which are the same in both passes."""
        position = (row * length + offs_c)[:, None].to(tl.int32) + tl.zeros([1, PAD], tl.int32)
        head = (head_base + tl.arange(0, PAD))[None, :].to(tl.int32) + tl.zeros_like(position)
        zero = tl.zeros_like(position)
        bits, _, _, _ = tl.philox(seed, position, head, zero, zero)
        return tl.where(tl.uint_to_uniform_float(bits) >= dropout, 1.0 / (1.0 - dropout), 0.0)

    @triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_ALIGNMENT)
    def forward_kernel(
        scores_ptr, weights_ptr, max_logit_ptr, inverse_ptr, logits_proj_ptr, weights_proj_ptr,
        mask_ptr, bias_ptr, seed_ptr,
        scale, dropout, batch0, row0, rows, length, key_length, buffer_length,
        bias_stride_b, bias_stride_h, bias_stride_n, bias_stride_m,
        mask_stride_b, mask_stride_h, mask_stride_n, mask_stride_m,
        HEADS_IN: tl.constexpr, HEADS: tl.constexpr, HEADS_OUT: tl.constexpr,
        PAD_IN: tl.constexpr, PAD: tl.constexpr, PAD_OUT: tl.constexpr, BLOCK: tl.constexpr,
        MIX_LOGITS: tl.constexpr, MIX_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
        MASK_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, ONE_BLOCK: tl.constexpr,
        ZEROED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Compute the mixed weights of all heads for one query row from its scores, and store the row statistics."""
        local_row, local_batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        row, batch = row0 + local_row, batch0 + local_batch
        offs_h, offs_j = tl.arange(0, PAD), tl.arange(0, PAD_OUT)
        dtype = scores_ptr.dtype.element_ty
        head_stride = rows * buffer_length
        scores_ptrs = scores_ptr + local_batch * HEADS_IN * head_stride + local_row * buffer_length
        weights_ptrs = weights_ptr + local_batch * HEADS_OUT * head_stride + local_row * buffer_length
        bias_ptrs, mask_ptrs = bias_ptr, mask_ptr
        if BIAS:
            bias_ptrs += batch * bias_stride_b + row * bias_stride_n
        if MASK:
            mask_ptrs += batch * mask_stride_b + row * mask_stride_n
        proj = tl.zeros([PAD_IN, PAD], dtype)
        if MIX_LOGITS:
            proj = _load_heads(logits_proj_ptr, HEADS, offs_h, HEADS, HEADS_IN, PAD_IN).to(dtype)
        proj_out = tl.zeros([PAD, PAD_OUT], dtype)
        if MIX_WEIGHTS:
            proj_out = _load_heads(weights_proj_ptr, HEADS_OUT, offs_j, HEADS_OUT, HEADS, PAD).to(dtype)
        if DROPOUT:
            seed = tl.load(seed_ptr)
        end = key_length
        if CAUSAL:
            end = tl.minimum(key_length, row + 1).to(tl.int32)
        if ONE_BLOCK:
            _, logits = _compute_logits(
                scores_ptrs, proj, bias_ptrs, mask_ptrs, row, scale, end, buffer_length, tl.arange(0, BLOCK),
                head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, ZEROED, PRECISION,
            )  # fmt: skip
            max_logit = tl.max(logits, 0)
            max_logit = tl.where(max_logit == float("-inf"), 0.0, max_logit)
            logits = tl.exp(logits - max_logit[None, :])
            total = tl.sum(logits, 0)
        else:
            max_logit = tl.full([PAD], float("-inf"), tl.float32)
            total = tl.zeros([PAD], tl.float32)
            for start in range(0, end, BLOCK):
                _, logits = _compute_logits(
                    scores_ptrs, proj, bias_ptrs, mask_ptrs, row, scale, end, buffer_length,
                    start + tl.arange(0, BLOCK),
                    head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                    HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, ZEROED, PRECISION,
                )  # fmt: skip
                new_max_logit = tl.maximum(max_logit, tl.max(logits, 0))
                finite_max_logit = tl.where(new_max_logit == float("-inf"), 0.0, new_max_logit)
                total = total * tl.exp(max_logit - finite_max_logit) + tl.sum(
                    tl.exp(logits - finite_max_logit[None, :]), 0
                )
                max_logit = new_max_logit
            max_logit = tl.where(max_logit == float("-inf"), 0.0, max_logit)
        # Two numbers are stored, because a single log-sum-exp would lose the sum if all logits are finfo.min.
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        offset = (batch * HEADS + offs_h) * length + row
        tl.store(max_logit_ptr + offset, max_logit, mask=offs_h < HEADS)
        tl.store(inverse_ptr + offset, inverse, mask=offs_h < HEADS)
        for start in range(0, end, BLOCK):
            offs_c = start + tl.arange(0, BLOCK)
            if not ONE_BLOCK:
                _, logits = _compute_logits(
                    scores_ptrs, proj, bias_ptrs, mask_ptrs, row, scale, end, buffer_length, offs_c,
                    head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                    HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, ZEROED, PRECISION,
                )  # fmt: skip
                logits = tl.exp(logits - max_logit[None, :])
            weights = logits * inverse[None, :]  # [c, h]
            if MIX_WEIGHTS:
                weights = tl.dot(weights.to(dtype), proj_out, input_precision=PRECISION)  # [c, h_v]
            if DROPOUT:
                weights *= _compute_dropout_factors(seed, row, key_length, offs_c, batch * HEADS_OUT, dropout, PAD_OUT)
            _store_heads(
                weights_ptrs, tl.trans(weights.to(dtype)), head_stride, offs_c, buffer_length, HEADS_OUT, PAD_OUT
            )
        if CAUSAL:
            # The product with V also reads weights beyond the causal limit, so these must be zero.
            for start in range(tl.cdiv(end, BLOCK) * BLOCK, buffer_length, BLOCK):
                offs_c, zeros = start + tl.arange(0, BLOCK), tl.zeros([PAD_OUT, BLOCK], dtype)
                _store_heads(weights_ptrs, zeros, head_stride, offs_c, buffer_length, HEADS_OUT, PAD_OUT)

    @triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_ALIGNMENT)
    def backward_kernel(
        scores_ptr, weights_ptr, d_bias_ptr, d_logits_proj_ptr, d_weights_proj_ptr, max_logit_ptr, inverse_ptr,
        logits_proj_ptr, weights_proj_ptr, mask_ptr, bias_ptr, seed_ptr,
        scale, dropout, batch0, row0, rows, length, key_length, buffer_length,
        bias_stride_b, bias_stride_h, bias_stride_n, bias_stride_m,
        mask_stride_b, mask_stride_h, mask_stride_n, mask_stride_m,
        HEADS_IN: tl.constexpr, HEADS: tl.constexpr, HEADS_OUT: tl.constexpr,
        PAD_IN: tl.constexpr, PAD: tl.constexpr, PAD_OUT: tl.constexpr, BLOCK: tl.constexpr,
        MIX_LOGITS: tl.constexpr, MIX_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
        MASK_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, D_BIAS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Replace the scores with their gradient, and the gradient of the weights with the weights.

        The kernel also stores this row's contributions to dP_l and dP_w.
        """
        local_row, local_batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        row, batch = row0 + local_row, batch0 + local_batch
        offs_h, offs_j = tl.arange(0, PAD), tl.arange(0, PAD_OUT)
        dtype = scores_ptr.dtype.element_ty
        head_stride = rows * buffer_length
        scores_ptrs = scores_ptr + local_batch * HEADS_IN * head_stride + local_row * buffer_length
        weights_ptrs = weights_ptr + local_batch * HEADS_OUT * head_stride + local_row * buffer_length
        d_bias_ptrs = d_bias_ptr
        if D_BIAS:
            d_bias_ptrs += local_batch * HEADS * head_stride + local_row * buffer_length
        bias_ptrs, mask_ptrs = bias_ptr, mask_ptr
        if BIAS:
            bias_ptrs += batch * bias_stride_b + row * bias_stride_n
        if MASK:
            mask_ptrs += batch * mask_stride_b + row * mask_stride_n
        proj = tl.zeros([PAD_IN, PAD], dtype)
        d_proj = tl.zeros([PAD_IN, PAD], tl.float32)
        if MIX_LOGITS:
            proj = _load_heads(logits_proj_ptr, HEADS, offs_h, HEADS, HEADS_IN, PAD_IN).to(dtype)
        proj_out = tl.zeros([PAD, PAD_OUT], dtype)
        d_proj_out = tl.zeros([PAD, PAD_OUT], tl.float32)
        if MIX_WEIGHTS:
            proj_out = _load_heads(weights_proj_ptr, HEADS_OUT, offs_j, HEADS_OUT, HEADS, PAD).to(dtype)
        if DROPOUT:
            seed = tl.load(seed_ptr)
        offsets = (batch * HEADS + offs_h) * length + row
        max_logit = tl.load(max_logit_ptr + offsets, mask=offs_h < HEADS, other=0.0)
        inverse = tl.load(inverse_ptr + offsets, mask=offs_h < HEADS, other=0.0)
        end = key_length
        if CAUSAL:
            end = tl.minimum(key_length, row + 1).to(tl.int32)
        delta = tl.zeros([PAD], tl.float32)
        for step in tl.static_range(2):
            # The first step sums weight times gradient, which the second step needs for the gradient of the softmax.
            for start in range(0, end, BLOCK):
                offs_c = start + tl.arange(0, BLOCK)
                scores, logits = _compute_logits(
                    scores_ptrs, proj, bias_ptrs, mask_ptrs, row, scale, end, buffer_length, offs_c,
                    head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                    HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, True, PRECISION,
                )  # fmt: skip
                softmax = tl.exp(logits - max_logit[None, :]) * inverse[None, :]  # [c, h]
                gradient = _load_heads(weights_ptrs, head_stride, offs_c, buffer_length, HEADS_OUT, PAD_OUT)
                gradient = tl.where((offs_c < end)[:, None], tl.trans(gradient), 0.0).to(dtype)  # [c, h_v]
                if DROPOUT:
                    keep_factors = _compute_dropout_factors(
                        seed, row, key_length, offs_c, batch * HEADS_OUT, dropout, PAD_OUT
                    )
                    gradient = (gradient * keep_factors).to(dtype)
                if MIX_WEIGHTS:
                    d_softmax = tl.dot(gradient, tl.trans(proj_out), input_precision=PRECISION)  # [c, h]
                else:
                    d_softmax = gradient.to(tl.float32)
                if step == 0:
                    delta += tl.sum(softmax * d_softmax, 0)
                else:
                    d_logits = softmax * (d_softmax - delta[None, :])
                    if D_BIAS:
                        _store_heads(d_bias_ptrs, tl.trans(d_logits), head_stride, offs_c, buffer_length, HEADS, PAD)
                    weights = softmax
                    if MIX_WEIGHTS:
                        mixable = softmax.to(dtype)
                        weights = tl.dot(mixable, proj_out, input_precision=PRECISION)  # [c, h_v]
                        d_proj_out = tl.dot(tl.trans(mixable), gradient, d_proj_out, input_precision=PRECISION)
                    if DROPOUT:
                        weights *= keep_factors
                    d_scores = d_logits * scale
                    if MIX_LOGITS:
                        d_scores = d_scores.to(dtype)
                        d_proj = tl.dot(tl.trans(scores), d_scores, d_proj, input_precision=PRECISION)
                        d_scores = tl.dot(d_scores, tl.trans(proj), input_precision=PRECISION)  # [c, h_k]
                    weights, d_scores = tl.trans(weights.to(dtype)), tl.trans(d_scores.to(dtype))
                    tl.debug_barrier()  # every warp must have read this block before any warp overwrites it
                    _store_heads(weights_ptrs, weights, head_stride, offs_c, buffer_length, HEADS_OUT, PAD_OUT)
                    _store_heads(scores_ptrs, d_scores, head_stride, offs_c, buffer_length, HEADS_IN, PAD_IN)
        if CAUSAL:
            for start in range(tl.cdiv(end, BLOCK) * BLOCK, buffer_length, BLOCK):
                offs_c = start + tl.arange(0, BLOCK)
                zeros, zeros_in = tl.zeros([PAD_OUT, BLOCK], dtype), tl.zeros([PAD_IN, BLOCK], dtype)
                _store_heads(weights_ptrs, zeros, head_stride, offs_c, buffer_length, HEADS_OUT, PAD_OUT)
                _store_heads(scores_ptrs, zeros_in, head_stride, offs_c, buffer_length, HEADS_IN, PAD_IN)
                if D_BIAS:
                    none_bias = tl.zeros([PAD, BLOCK], tl.float32)
                    _store_heads(d_bias_ptrs, none_bias, head_stride, offs_c, buffer_length, HEADS, PAD)
        program = local_batch * rows + local_row
        if MIX_LOGITS:
            proj_ptr = d_logits_proj_ptr + program * HEADS_IN * HEADS
            _store_heads(proj_ptr, d_proj, HEADS, offs_h, HEADS, HEADS_IN, PAD_IN)
        if MIX_WEIGHTS:
            proj_ptr = d_weights_proj_ptr + program * HEADS * HEADS_OUT
            _store_heads(proj_ptr, d_proj_out, HEADS_OUT, offs_j, HEADS_OUT, HEADS, PAD)


# The size of each workspace. There is one workspace for the scores, one for the weights and, if the bias needs a
# gradient, one for d(logits). With 64 MiB, an H200 takes twice as long, because it waits for Python to launch the
# chunks. With 512 MiB, it is 5% faster than with 256 MiB.
WORKSPACE_BYTES = 256 * 2**20
# Launch settings in half precision: block size for 16 padded heads, number of warps and number of stages. They were
# the fastest on an H200 (benchmarks/gpu/kernel_settings.py). Three stages hide the latency of the loads. In the
# backward pass, a single warp does not have to wait for others. LONG_ROW applies to rows without dropout and bias that
# are longer than SHORT_ROW, which is 1,024 keys with 16 heads.
SHORT_ROW_ELEMENTS = 16384
LONG_ROW_SETTINGS = (256, 4, 3)
BACKWARD_SETTINGS = (64, 1, 3)
MAX_HEADS = 64
NO_MASK, BOOLEAN_MASK, ADDITIVE_MASK = 0, 1, 2


def supports_operands(operands: AttentionOperands) -> bool:
    """Return True if the kernels support these inputs. This function never raises an error."""
    query, key, value, *others = operands[:7]
    if triton is None or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if operands.key_range is not None or not supports_device(query.device):
        return False
    tensors = [t for t in (key, value, *others) if t is not None]
    if any(t.device != query.device for t in tensors) or key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    projections = [p for p in (operands.logits_proj, operands.weights_proj) if p is not None]
    heads = [operands.num_query_heads, *(size for projection in projections for size in projection.shape)]
    # Dropout numbers the positions in [n, m] with 32-bit integers, and the second axis of a grid has at most 65535
    # programs.
    return (
        max(heads) <= MAX_HEADS
        and min(*query.shape, *key.shape, *value.shape) > 0
        and query.shape[2] * key.shape[2] < 2**31
        and query.shape[0] < 2**16
    )


@torch.compiler.assume_constant_result
def supports_device(device: torch.device) -> bool:
    """Return True if the kernels support this device.

    They require CUDA capability 8.0 or higher. Triton's interpreter supports all devices.
    """
    if triton is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    knobs = getattr(triton, "knobs", None)
    return knobs is not None and knobs.runtime.interpret


def get_mask_type(mask: Tensor | None) -> int:
    """Return the constant that describes a mask's type in the kernels."""
    return NO_MASK if mask is None else BOOLEAN_MASK if mask.dtype == torch.bool else ADDITIVE_MASK


def allows_tf32() -> bool:
    """Return True if torch may round the factors of float32 products on a GPU to TF32."""
    # torch has two settings for this. Reading the older one raises an error if the newer one has been used.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.backends.cuda.matmul.allow_tf32 if precision is None else precision == "tf32"


def _yield_chunks(batches: int, rows: int, bytes_per_row: int) -> Iterator[tuple[slice, slice]]:
    """Yield the batch slice and the query slice of each chunk.

    A chunk contains whole sequences if they fit into the workspace, and otherwise a part of one sequence.
    """
    rows_in_workspace = max(1, WORKSPACE_BYTES // bytes_per_row)
    if rows_in_workspace >= rows:
        step = max(1, min(batches, rows_in_workspace // rows))
        step = -(-batches // -(-batches // step))
        for batch in range(0, batches, step):
            yield slice(batch, min(batch + step, batches)), slice(0, rows)
        return
    parts = -(-rows // rows_in_workspace)
    step = min(rows_in_workspace, -(-rows // (16 * parts)) * 16) if rows_in_workspace >= 32 else rows_in_workspace
    for batch in range(batches):
        for row in range(0, rows, step):
            yield slice(batch, batch + 1), slice(row, min(row + step, rows))


def _pad_num_heads(heads: int) -> int:
    return max(16, triton.next_power_of_2(heads))  # tl.dot does not support smaller blocks


class _TritonCall:
    """The sizes, strides and compile-time constants of a forward or backward call."""

    def __init__(self, operands: AttentionOperands):
        query, key, value, mask, bias, logits_proj, weights_proj, seed, scaling, is_causal, dropout, _ = operands
        # Dot products have the same dtype as the queries. In float16, they could overflow before they are scaled.
        self.query_scaling = scaling if query.dtype == torch.float16 else 1.0
        query = query if self.query_scaling == 1.0 else query * self.query_scaling
        self.query, self.key, self.value = query.contiguous(), key.contiguous(), value.contiguous()
        self.batches, _, self.length, _ = query.shape
        self.key_length = key.shape[2]
        self.num_query_heads = operands.num_query_heads
        self.num_softmax_heads = operands.num_softmax_heads
        self.num_output_heads = operands.num_output_heads
        self.logits_proj = None if logits_proj is None else logits_proj.contiguous()
        self.weights_proj = None if weights_proj is None else weights_proj.contiguous()
        self.is_causal, self.dropout, self.seed = is_causal, dropout, seed
        self.scaling = scaling / self.query_scaling
        full_shape = (self.batches, self.num_softmax_heads, self.length, self.key_length)
        self.bias = None if bias is None else bias.expand(full_shape)
        kind = get_mask_type(mask)
        self.mask = (
            None if mask is None else (mask.view(torch.uint8) if kind == BOOLEAN_MASK else mask).expand(full_shape)
        )
        self.constants: dict[str, Any] = {
            "HEADS_IN": self.num_query_heads,
            "HEADS": self.num_softmax_heads,
            "HEADS_OUT": self.num_output_heads,
            "PAD_IN": _pad_num_heads(self.num_query_heads),
            "PAD": _pad_num_heads(self.num_softmax_heads),
            "PAD_OUT": _pad_num_heads(self.num_output_heads),
            "MIX_LOGITS": logits_proj is not None,
            "MIX_WEIGHTS": weights_proj is not None,
            "BIAS": bias is not None,
            "MASK": kind,
            "MASK_PER_HEAD": mask is not None and mask.dim() == 4 and mask.shape[1] > 1,
            "CAUSAL": is_causal,
            "DROPOUT": seed is not None,
            "PRECISION": "tf32" if allows_tf32() else "ieee",
        }

    def get_max_padded_heads(self) -> int:
        return max(self.constants[name] for name in ("PAD_IN", "PAD", "PAD_OUT"))

    def iterate_chunks(self) -> Iterator[tuple[slice, slice, int]]:
        """Yield a batch slice, a query slice and the number of keys that these queries attend to."""
        bytes_per_row = (
            max(self.num_query_heads, self.num_softmax_heads, self.num_output_heads)
            * self.key_length
            * self.query.element_size()
        )
        for batch, row in _yield_chunks(self.batches, self.length, bytes_per_row):
            yield batch, row, min(self.key_length, row.stop) if self.is_causal else self.key_length

    def allocate_workspace(self, heads: int, dtype: torch.dtype) -> Tensor:
        size = 0
        for batch, row, key_length in self.iterate_chunks():
            size = max(size, (batch.stop - batch.start) * (row.stop - row.start) * _get_padded_row_size(key_length))
        return torch.empty(size * heads, dtype=dtype, device=self.query.device)

    def launch(self, kernel: Any, pointers: Any, batch: slice, row: slice, key_length: int, settings: dict) -> None:
        rows = row.stop - row.start
        bias_strides = (0,) * 4 if self.bias is None else self.bias.stride()
        mask_strides = (0,) * 4 if self.mask is None else self.mask.stride()
        with torch.cuda.device_of(self.query):  # Triton launches on the current device
            kernel[(rows, batch.stop - batch.start)](
                *pointers, self.logits_proj, self.weights_proj, self.mask, self.bias, self.seed,
                self.scaling, self.dropout, batch.start, row.start, rows, self.length, self.key_length,
                _get_padded_row_size(key_length),
                *bias_strides, *mask_strides, **self.constants, **settings,
            )  # fmt: skip


def _get_padded_row_size(key_length: int) -> int:
    return -(-key_length // 16) * 16  # each row starts at a multiple of 32 bytes


def _view_workspaces(
    call: _TritonCall, workspaces: list[Tensor], batch: slice, row: slice, key_length: int
) -> list[Tensor]:
    """Return views of the workspaces for the scores, the weights and, if needed, the gradient of the logits."""
    batches, rows, size = batch.stop - batch.start, row.stop - row.start, _get_padded_row_size(key_length)
    counts = (call.num_query_heads, call.num_output_heads, call.num_softmax_heads)
    return [
        workspace[: batches * heads * rows * size].view(batches, heads, rows, size)
        for workspace, heads in zip(workspaces, counts, strict=False)
    ]


def _matmul_by_transposed(states: Tensor, shared: Tensor, out: Tensor) -> None:
    # Multiply [b, h, r, x] by the transposed [b, k, m, x]. The result is written to `out` [b, h, r, >= m], with
    # grouped heads stacked as rows.
    out = stack_groups(out, shared.shape[1])[..., : shared.shape[2]]
    torch.bmm(stack_groups(states, shared.shape[1]), shared.flatten(0, 1).transpose(1, 2), out=out)


def _matmul_grouped(weights: Tensor, shared: Tensor) -> Tensor:
    # Multiply [b, h, r, >= m] by [b, k, m, x] to get [b, h, r, x].
    rows = torch.bmm(stack_groups(weights, shared.shape[1])[..., : shared.shape[2]], shared.flatten(0, 1))
    return rows.view(*weights.shape[:3], -1)


def _transposed_matmul(weights: Tensor, states: Tensor, kv_heads: int, key_length: int) -> Tensor:
    # Multiply the transposed [b, h, r, >= m] by [b, h, r, x] to get [b, k, m, x], summed over the heads in a group.
    weights = stack_groups(weights, kv_heads)[..., :key_length]
    return torch.bmm(weights.transpose(1, 2), stack_groups(states, kv_heads)).unflatten(0, (-1, kv_heads))


def _choose_forward_settings(call: _TritonCall) -> dict:
    # A row that fits into the registers is read once. A longer row is read twice, in blocks. Multiple stages prefetch
    # data, but only if there are few loads, because consumer GPUs have only 99 KB of shared memory.
    exact = call.query.dtype == torch.float32
    has_many_loads = call.bias is not None or call.constants["MASK_PER_HEAD"]
    block = max(16, triton.next_power_of_2(call.key_length))
    if (
        not (exact or has_many_loads or call.seed is not None)
        and block * call.get_max_padded_heads() > SHORT_ROW_ELEMENTS
    ):
        # If no zeros are needed outside the row, loaded scores go directly into the product.
        block, warps, stages = LONG_ROW_SETTINGS
        block = max(16, block * 16 // call.get_max_padded_heads())
        return {"BLOCK": block, "ONE_BLOCK": False, "ZEROED": False, "num_warps": warps, "num_stages": stages}
    budget = 32768 // (2 if call.seed is not None or has_many_loads else 1) // (4 if exact else 1)
    one_block = block * call.get_max_padded_heads() <= budget
    block = block if one_block else max(16, budget // 2 // call.get_max_padded_heads())
    warps = min(16, max(4, block * call.get_max_padded_heads() // (2048 if one_block else 1024)))
    if _exceeds_registers(call):
        block, warps = min(block, 32), 8
        one_block = block >= call.key_length
    stages = 1 if exact or has_many_loads else 2
    return {"BLOCK": block, "ONE_BLOCK": one_block, "ZEROED": True, "num_warps": warps, "num_stages": stages}


def _choose_backward_settings(call: _TritonCall) -> dict:
    # A single warp does not have enough registers for more than 16 heads.
    half_precision_settings = BACKWARD_SETTINGS if call.get_max_padded_heads() <= 16 else (128, 4, 2)
    block, warps, stages = (32, 4, 1) if call.query.dtype == torch.float32 else half_precision_settings
    block = min(max(16, triton.next_power_of_2(call.key_length)), max(16, block * 16 // call.get_max_padded_heads()))
    return {"BLOCK": block, "num_warps": 8 if _exceeds_registers(call) else warps, "num_stages": stages}


def _exceeds_registers(call: _TritonCall) -> bool:
    # Exact float32 products of 64 heads need more registers than a thread has. With four warps, they would use up to 7
    # KB of stack (benchmarks/speed/triton_resources.py). With smaller blocks and eight warps, they fit.
    return call.query.dtype == torch.float32 and call.get_max_padded_heads() > 32


def triton_forward(operands: AttentionOperands) -> tuple[Tensor, Tensor]:
    """Return talking-heads attention [b, n, h_v, d_v] and the softmax statistics of each row [2, b, h, n]."""
    call = _TritonCall(operands)
    output = operands.allocate_output()
    statistics = torch.empty(
        2, call.batches, call.num_softmax_heads, call.length, dtype=torch.float32, device=output.device
    )
    workspaces = [
        call.allocate_workspace(heads, output.dtype) for heads in (call.num_query_heads, call.num_output_heads)
    ]
    settings = _choose_forward_settings(call)
    for batch, row, key_length in call.iterate_chunks():
        scores, weights = _view_workspaces(call, workspaces, batch, row, key_length)
        _matmul_by_transposed(call.query[batch, :, row], call.key[batch, :, :key_length], scores)
        call.launch(forward_kernel, (scores, weights, *statistics), batch, row, key_length, settings)
        output[batch, row] = _matmul_grouped(weights, call.value[batch, :, :key_length]).transpose(1, 2)
    return output, statistics


def triton_backward(
    d_output: Tensor, statistics: Tensor, needs_bias_gradient: bool, operands: AttentionOperands
) -> list[Tensor]:
    """Return the gradients of query, key, value, position_bias, logits_proj and weights_proj.

    The arguments are the same as in `blocked_backward`, except that `statistics` are those from `triton_forward`.
    """
    call = _TritonCall(operands)
    d_output = d_output.transpose(1, 2).contiguous()  # [b, h_v, n, d_v]
    dtype, device = call.query.dtype, call.query.device
    d_query = torch.empty_like(call.query)
    d_key, d_value = (torch.zeros_like(t, dtype=torch.float32) for t in (call.key, call.value))
    d_projs = [
        torch.zeros(p.shape if p is not None else 0, dtype=torch.float32, device=device)
        for p in (call.logits_proj, call.weights_proj)
    ]
    d_bias = torch.empty(0, device=device)
    workspaces = [call.allocate_workspace(heads, dtype) for heads in (call.num_query_heads, call.num_output_heads)]
    if needs_bias_gradient and operands.position_bias is not None:
        d_bias = torch.zeros(operands.position_bias.shape, dtype=torch.float32, device=device)
        workspaces.append(call.allocate_workspace(call.num_softmax_heads, torch.float32))
    settings = {**_choose_backward_settings(call), "D_BIAS": needs_bias_gradient}
    for batch, row, key_length in call.iterate_chunks():
        scores, weights, *others = _view_workspaces(call, workspaces, batch, row, key_length)
        d_logits = others[0] if others else None
        parts = [
            None if p is None else p.new_empty((scores.shape[0] * scores.shape[2], *p.shape), dtype=torch.float32)
            for p in (call.logits_proj, call.weights_proj)
        ]
        query, key, value = (
            call.query[batch, :, row],
            call.key[batch, :, :key_length],
            call.value[batch, :, :key_length],
        )
        _matmul_by_transposed(query, key, scores)
        _matmul_by_transposed(d_output[batch, :, row], value, weights)
        call.launch(
            backward_kernel, (scores, weights, d_logits, *parts, *statistics), batch, row, key_length, settings
        )
        d_query[batch, :, row] = _matmul_grouped(scores, key)
        d_key[batch, :, :key_length] += _transposed_matmul(scores, query, key.shape[1], key_length)
        d_value[batch, :, :key_length] += _transposed_matmul(
            weights, d_output[batch, :, row], value.shape[1], key_length
        )
        for total, part in zip(d_projs, parts, strict=True):
            if part is not None:
                total += part.sum(0)
        if d_logits is not None:
            add_bias_gradient(d_bias, d_logits[..., :key_length], batch, row)
    if call.query_scaling != 1.0:
        d_query *= call.query_scaling
    return [d_query, d_key.to(dtype), d_value.to(dtype), d_bias, *d_projs]
