"""The two Triton kernels of talking-heads attention: one program holds all heads of one query row.

What they are part of, and why, is in `triton_attention`. The mixes are `tl.dot` over [positions, heads padded to a
power of two from 16 on]: positions are the long side that the matrix units want. Letters as in `softmax_attention`,
c the key positions of a block. Without Triton the kernels are None.

Sources: arXiv 2003.02436, section 3 (the formula); 2205.14135 (the softmax's gradient from row statistics).
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # the package and its Hub repositories must load without a GPU
    triton = backward_kernel = forward_kernel = None

__all__ = ["backward_kernel", "forward_kernel", "triton"]

# Numbers that change from batch to batch: compiled for any, or each length of a batch would be compiled anew.
ANY_NUMBER = ["batch0", "row0", "rows", "length", "memory"]
ANY_NUMBER += ["bias_stride_b", "bias_stride_n", "mask_stride_b", "mask_stride_n"]
ANY_ALIGNMENT = ["bias_stride_h", "bias_stride_m", "mask_stride_h", "mask_stride_m"]

if triton is not None:

    @triton.jit
    def _read(at, stride, offs_c, end, HEADS: tl.constexpr, PAD: tl.constexpr):
        """Load a block [heads, c] of a slab whose heads are `stride` apart, up to the position `end`, or a matrix."""
        heads = tl.arange(0, PAD)
        inside = (heads < HEADS)[:, None] & (offs_c < end)[None, :]
        return tl.load(at + heads[:, None] * stride + offs_c[None, :], mask=inside, other=0.0)

    @triton.jit
    def _write(at, values, stride, offs_c, end, HEADS: tl.constexpr, PAD: tl.constexpr):
        """Store a block [heads, c] where `_read` reads it."""
        heads = tl.arange(0, PAD)
        inside = (heads < HEADS)[:, None] & (offs_c < end)[None, :]
        tl.store(at + heads[:, None] * stride + offs_c[None, :], values, mask=inside)

    @triton.jit
    def _read_added(
        at, offs_c, inside, stride_h, stride_m, HEADS: tl.constexpr, PAD: tl.constexpr, PER_HEAD: tl.constexpr
    ):
        """Load a block [c, h], or [c, 1] for all heads, of a bias or mask."""
        if PER_HEAD:
            heads = tl.arange(0, PAD)
            both = (heads < HEADS)[:, None] & inside[None, :]
            values = tl.load(
                at + heads.to(tl.int64)[:, None] * stride_h + offs_c[None, :] * stride_m, mask=both, other=0
            )
            return tl.trans(values)
        else:
            return tl.load(at + offs_c * stride_m, mask=inside, other=0)[:, None]

    @triton.jit
    def _logits(
        scores_at, proj, bias_at, mask_at, row, scale, end, buffer_memory, offs_c,
        score_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
        HEADS_IN: tl.constexpr, HEADS: tl.constexpr, PAD_IN: tl.constexpr, PAD: tl.constexpr,
        MIX: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, MASK_PER_HEAD: tl.constexpr,
        ZEROED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Read one block of scores and make the logits of the softmax heads: ([c, h_k], [c, h])."""
        inside = offs_c < end
        # To the end of the padded row, which lets loads be wide; what lies there was never written. Sums over the
        # positions need zeros instead. The logits do not: a position mixes its own heads alone, and is left out below.
        scores = tl.trans(_read(scores_at, score_stride, offs_c, buffer_memory, HEADS_IN, PAD_IN))  # [c, h_k]
        if ZEROED:
            scores = tl.where(inside[:, None], scores, 0.0).to(scores.dtype)
        if MIX:
            logits = tl.dot(scores, proj, input_precision=PRECISION) * scale  # [c, h]
        else:
            logits = scores.to(tl.float32) * scale
        if BIAS:
            bias = _read_added(bias_at, offs_c, inside, bias_stride_h, bias_stride_m, HEADS, PAD, True)
            logits += bias.to(tl.float32)
        if MASK:
            mask = _read_added(mask_at, offs_c, inside, mask_stride_h, mask_stride_m, HEADS, PAD, MASK_PER_HEAD)
        if MASK == 1:
            logits = tl.where(mask != 0, logits, float("-inf"))
        if MASK == 2:
            logits += mask.to(tl.float32)
        return scores, tl.where(inside[:, None], logits, float("-inf"))

    @triton.jit
    def _kept(seed, row, length, offs_c, head_base, dropout, PAD: tl.constexpr):
        """1 / (1 - dropout) where a weight is kept, else 0 [c, h_v]: the same in both passes, whatever the chunks."""
        position = (row * length + offs_c)[:, None].to(tl.int32) + tl.zeros([1, PAD], tl.int32)
        head = (head_base + tl.arange(0, PAD))[None, :].to(tl.int32) + tl.zeros_like(position)
        zero = tl.zeros_like(position)
        bits, _, _, _ = tl.philox(seed, position, head, zero, zero)
        return tl.where(tl.uint_to_uniform_float(bits) >= dropout, 1.0 / (1.0 - dropout), 0.0)

    @triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_ALIGNMENT)
    def forward_kernel(
        scores_ptr, weights_ptr, top_ptr, inverse_ptr, logits_proj_ptr, weights_proj_ptr, mask_ptr, bias_ptr, seed_ptr,
        scale, dropout, batch0, row0, rows, length, memory, buffer_memory,
        bias_stride_b, bias_stride_h, bias_stride_n, bias_stride_m,
        mask_stride_b, mask_stride_h, mask_stride_n, mask_stride_m,
        HEADS_IN: tl.constexpr, HEADS: tl.constexpr, HEADS_OUT: tl.constexpr,
        PAD_IN: tl.constexpr, PAD: tl.constexpr, PAD_OUT: tl.constexpr, BLOCK: tl.constexpr,
        MIX_LOGITS: tl.constexpr, MIX_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
        MASK_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, ONE_BLOCK: tl.constexpr,
        ZEROED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Turn the scores of one query row into its mixed weights, all heads at once; note the row's statistics."""
        local_row, local_batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        row, batch = row0 + local_row, batch0 + local_batch
        offs_h, offs_j = tl.arange(0, PAD), tl.arange(0, PAD_OUT)
        dtype = scores_ptr.dtype.element_ty
        head_stride = rows * buffer_memory
        scores_at = scores_ptr + local_batch * HEADS_IN * head_stride + local_row * buffer_memory
        weights_at = weights_ptr + local_batch * HEADS_OUT * head_stride + local_row * buffer_memory
        bias_at, mask_at = bias_ptr, mask_ptr
        if BIAS:
            bias_at += batch * bias_stride_b + row * bias_stride_n
        if MASK:
            mask_at += batch * mask_stride_b + row * mask_stride_n
        proj = tl.zeros([PAD_IN, PAD], dtype)
        if MIX_LOGITS:
            proj = _read(logits_proj_ptr, HEADS, offs_h, HEADS, HEADS_IN, PAD_IN).to(dtype)
        proj_out = tl.zeros([PAD, PAD_OUT], dtype)
        if MIX_WEIGHTS:
            proj_out = _read(weights_proj_ptr, HEADS_OUT, offs_j, HEADS_OUT, HEADS, PAD).to(dtype)
        if DROPOUT:
            seed = tl.load(seed_ptr)
        end = memory
        if CAUSAL:
            end = tl.minimum(memory, row + 1).to(tl.int32)
        if ONE_BLOCK:
            _, logits = _logits(
                scores_at, proj, bias_at, mask_at, row, scale, end, buffer_memory, tl.arange(0, BLOCK),
                head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, ZEROED, PRECISION,
            )  # fmt: skip
            top = tl.max(logits, 0)
            top = tl.where(top == float("-inf"), 0.0, top)
            logits = tl.exp(logits - top[None, :])
            total = tl.sum(logits, 0)
        else:
            top = tl.full([PAD], float("-inf"), tl.float32)
            total = tl.zeros([PAD], tl.float32)
            for start in range(0, end, BLOCK):
                _, logits = _logits(
                    scores_at, proj, bias_at, mask_at, row, scale, end, buffer_memory, start + tl.arange(0, BLOCK),
                    head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                    HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, ZEROED, PRECISION,
                )  # fmt: skip
                higher = tl.maximum(top, tl.max(logits, 0))
                finite = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp(top - finite) + tl.sum(tl.exp(logits - finite[None, :]), 0)
                top = higher
            top = tl.where(top == float("-inf"), 0.0, top)
        # Apart, not as one log-sum-exp: beside finfo.min the logarithm of the sum would be lost.
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        at = (batch * HEADS + offs_h) * length + row
        tl.store(top_ptr + at, top, mask=offs_h < HEADS)
        tl.store(inverse_ptr + at, inverse, mask=offs_h < HEADS)
        for start in range(0, end, BLOCK):
            offs_c = start + tl.arange(0, BLOCK)
            if not ONE_BLOCK:
                _, logits = _logits(
                    scores_at, proj, bias_at, mask_at, row, scale, end, buffer_memory, offs_c,
                    head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                    HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, ZEROED, PRECISION,
                )  # fmt: skip
                logits = tl.exp(logits - top[None, :])
            weights = logits * inverse[None, :]  # [c, h]
            if MIX_WEIGHTS:
                weights = tl.dot(weights.to(dtype), proj_out, input_precision=PRECISION)  # [c, h_v]
            if DROPOUT:
                weights *= _kept(seed, row, memory, offs_c, batch * HEADS_OUT, dropout, PAD_OUT)
            _write(weights_at, tl.trans(weights.to(dtype)), head_stride, offs_c, buffer_memory, HEADS_OUT, PAD_OUT)
        if CAUSAL:
            # The product with V reads the chunk's whole rectangle.
            for start in range(tl.cdiv(end, BLOCK) * BLOCK, buffer_memory, BLOCK):
                offs_c, none = start + tl.arange(0, BLOCK), tl.zeros([PAD_OUT, BLOCK], dtype)
                _write(weights_at, none, head_stride, offs_c, buffer_memory, HEADS_OUT, PAD_OUT)

    @triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_ALIGNMENT)
    def backward_kernel(
        scores_ptr, weights_ptr, d_bias_ptr, d_logits_proj_ptr, d_weights_proj_ptr, top_ptr, inverse_ptr,
        logits_proj_ptr, weights_proj_ptr, mask_ptr, bias_ptr, seed_ptr,
        scale, dropout, batch0, row0, rows, length, memory, buffer_memory,
        bias_stride_b, bias_stride_h, bias_stride_n, bias_stride_m,
        mask_stride_b, mask_stride_h, mask_stride_n, mask_stride_m,
        HEADS_IN: tl.constexpr, HEADS: tl.constexpr, HEADS_OUT: tl.constexpr,
        PAD_IN: tl.constexpr, PAD: tl.constexpr, PAD_OUT: tl.constexpr, BLOCK: tl.constexpr,
        MIX_LOGITS: tl.constexpr, MIX_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
        MASK_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, D_BIAS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Overwrite scores by their gradients and d(weights) by the weights; sum this row's part of dP_l and dP_w."""
        local_row, local_batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        row, batch = row0 + local_row, batch0 + local_batch
        offs_h, offs_j = tl.arange(0, PAD), tl.arange(0, PAD_OUT)
        dtype = scores_ptr.dtype.element_ty
        head_stride = rows * buffer_memory
        scores_at = scores_ptr + local_batch * HEADS_IN * head_stride + local_row * buffer_memory
        weights_at = weights_ptr + local_batch * HEADS_OUT * head_stride + local_row * buffer_memory
        d_bias_at = d_bias_ptr
        if D_BIAS:
            d_bias_at += local_batch * HEADS * head_stride + local_row * buffer_memory
        bias_at, mask_at = bias_ptr, mask_ptr
        if BIAS:
            bias_at += batch * bias_stride_b + row * bias_stride_n
        if MASK:
            mask_at += batch * mask_stride_b + row * mask_stride_n
        proj = tl.zeros([PAD_IN, PAD], dtype)
        d_proj = tl.zeros([PAD_IN, PAD], tl.float32)
        if MIX_LOGITS:
            proj = _read(logits_proj_ptr, HEADS, offs_h, HEADS, HEADS_IN, PAD_IN).to(dtype)
        proj_out = tl.zeros([PAD, PAD_OUT], dtype)
        d_proj_out = tl.zeros([PAD, PAD_OUT], tl.float32)
        if MIX_WEIGHTS:
            proj_out = _read(weights_proj_ptr, HEADS_OUT, offs_j, HEADS_OUT, HEADS, PAD).to(dtype)
        if DROPOUT:
            seed = tl.load(seed_ptr)
        at = (batch * HEADS + offs_h) * length + row
        top = tl.load(top_ptr + at, mask=offs_h < HEADS, other=0.0)
        inverse = tl.load(inverse_ptr + at, mask=offs_h < HEADS, other=0.0)
        end = memory
        if CAUSAL:
            end = tl.minimum(memory, row + 1).to(tl.int32)
        delta = tl.zeros([PAD], tl.float32)
        for step in tl.static_range(2):
            # First the sums of weight times gradient, which the softmax's gradient needs; then the gradients.
            for start in range(0, end, BLOCK):
                offs_c = start + tl.arange(0, BLOCK)
                scores, logits = _logits(
                    scores_at, proj, bias_at, mask_at, row, scale, end, buffer_memory, offs_c,
                    head_stride, bias_stride_h, bias_stride_m, mask_stride_h, mask_stride_m,
                    HEADS_IN, HEADS, PAD_IN, PAD, MIX_LOGITS, BIAS, MASK, MASK_PER_HEAD, True, PRECISION,
                )  # fmt: skip
                softmax = tl.exp(logits - top[None, :]) * inverse[None, :]  # [c, h]
                gradient = _read(weights_at, head_stride, offs_c, buffer_memory, HEADS_OUT, PAD_OUT)
                gradient = tl.where((offs_c < end)[:, None], tl.trans(gradient), 0.0).to(dtype)  # [c, h_v]
                if DROPOUT:
                    kept = _kept(seed, row, memory, offs_c, batch * HEADS_OUT, dropout, PAD_OUT)
                    gradient = (gradient * kept).to(dtype)
                if MIX_WEIGHTS:
                    d_softmax = tl.dot(gradient, tl.trans(proj_out), input_precision=PRECISION)  # [c, h]
                else:
                    d_softmax = gradient.to(tl.float32)
                if step == 0:
                    delta += tl.sum(softmax * d_softmax, 0)
                else:
                    d_logits = softmax * (d_softmax - delta[None, :])
                    if D_BIAS:
                        _write(d_bias_at, tl.trans(d_logits), head_stride, offs_c, buffer_memory, HEADS, PAD)
                    weights = softmax
                    if MIX_WEIGHTS:
                        mixable = softmax.to(dtype)
                        weights = tl.dot(mixable, proj_out, input_precision=PRECISION)  # [c, h_v]
                        d_proj_out = tl.dot(tl.trans(mixable), gradient, d_proj_out, input_precision=PRECISION)
                    if DROPOUT:
                        weights *= kept
                    d_scores = d_logits * scale
                    if MIX_LOGITS:
                        d_scores = d_scores.to(dtype)
                        d_proj = tl.dot(tl.trans(scores), d_scores, d_proj, input_precision=PRECISION)
                        d_scores = tl.dot(d_scores, tl.trans(proj), input_precision=PRECISION)  # [c, h_k]
                    weights, d_scores = tl.trans(weights.to(dtype)), tl.trans(d_scores.to(dtype))
                    tl.debug_barrier()  # every warp has read this block before any writes over it
                    _write(weights_at, weights, head_stride, offs_c, buffer_memory, HEADS_OUT, PAD_OUT)
                    _write(scores_at, d_scores, head_stride, offs_c, buffer_memory, HEADS_IN, PAD_IN)
        if CAUSAL:
            for start in range(tl.cdiv(end, BLOCK) * BLOCK, buffer_memory, BLOCK):
                offs_c = start + tl.arange(0, BLOCK)
                none, none_in = tl.zeros([PAD_OUT, BLOCK], dtype), tl.zeros([PAD_IN, BLOCK], dtype)
                _write(weights_at, none, head_stride, offs_c, buffer_memory, HEADS_OUT, PAD_OUT)
                _write(scores_at, none_in, head_stride, offs_c, buffer_memory, HEADS_IN, PAD_IN)
                if D_BIAS:
                    none_bias = tl.zeros([PAD, BLOCK], tl.float32)
                    _write(d_bias_at, none_bias, head_stride, offs_c, buffer_memory, HEADS, PAD)
        program = local_batch * rows + local_row
        if MIX_LOGITS:
            at = d_logits_proj_ptr + program * HEADS_IN * HEADS
            _write(at, d_proj, HEADS, offs_h, HEADS, HEADS_IN, PAD_IN)
        if MIX_WEIGHTS:
            at = d_weights_proj_ptr + program * HEADS * HEADS_OUT
            _write(at, d_proj_out, HEADS_OUT, offs_j, HEADS_OUT, HEADS, PAD)
