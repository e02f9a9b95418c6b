"""Two Triton kernels for attention with one latent as keys and values, which is read once for all heads.

    partial_kernel    a program reads a part of the keys for up to a block of rows, one block of keys at a time
    combine_kernel    combines the parts of a row, weighted by their sums of exponentials

A block of keys is in shared memory and is a factor of both products. The long side of the products is first the number
of keys and then the width of the latent. The matrix units of Hopper read this side from shared memory. The few rows
are the short side. The width is split into two powers of two, such as 768 = 512 + 256. A single power of two would add
a quarter of zeros.

The letters are defined in `softmax_attention`; c is the number of keys per block and w is a width. Without Triton, the
kernels are None.

Sources: arXiv 2205.14135 (sequential blocks of keys); "Flash-Decoding for long-context inference" (Stanford CRFM,
2023; parallel parts of the keys).
"""

from typing import Any

partial_kernel: Any
combine_kernel: Any
try:
    import triton
    import triton.language as tl
except ImportError:  # the package and its Hub repositories must load without a GPU
    triton = partial_kernel = combine_kernel = None

__all__ = ["combine_kernel", "partial_kernel", "triton"]

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
