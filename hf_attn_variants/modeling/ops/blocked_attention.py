"""Exact talking-heads attention in blocks of query rows, with plain torch on any device.

Memory grows linearly with n and m. A block contains r query rows of B sequences, with all heads and keys:

    scores     [B, h_k, r * m]    queries times keys
    logits     [B, h, r * m]      P_l mixes the heads: one small matrix product over all positions
    weights    [B, h_v, r * m]    after the softmax, P_w mixes the heads
    output     [B, r, h_v, d_v]   weights times values

These tensors are small enough for the processor's cache, and all blocks use the same buffers. The forward pass saves
only its inputs. The backward pass recomputes the scores and weights of each block before it computes their gradients.
The gradients of the keys, values and projections are accumulated over all blocks. Dropout is the same in both passes,
because it depends only on a seed and the block number.

On a CPU, a block has one sequence per thread. torch assigns neighboring matrices of a product and neighboring rows of
a softmax to the same thread, so that each thread finds its data in its own core's cache. If a block had only one
sequence, products would be split by heads and mixing by positions, and most values would have to be moved between
cores.

If there is a key range, a block only reads the keys in its windows (see `WindowBlockLayout`). The symbols are defined
in `softmax_attention`.

Sources: arXiv 2003.02436, section 3 (the formula); arXiv 2112.05682 (attention in blocks that the backward pass
recomputes).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .key_ranges import KeyRange, WindowBlockLayout

__all__ = ["AttentionOperands", "add_bias_gradient", "blocked_backward", "blocked_forward", "stack_groups"]


class AttentionOperands(NamedTuple):
    """The operands of an attention call. See `talking_heads_attention` for their meaning."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # four dimensions, like the bias
    position_bias: Tensor | None = None
    logits_proj: Tensor | None = None
    weights_proj: Tensor | None = None
    seed: Tensor | None = None  # integer [1] that seeds dropout, or None without dropout
    scaling: float = 1.0
    is_causal: bool = False
    dropout: float = 0.0
    key_range: list[int] | None = None  # a `KeyRange`; the bias is then a table by distance

    @property
    def num_query_heads(self) -> int:
        """h_k, the number of query heads."""
        return self.query.shape[1]

    @property
    def num_softmax_heads(self) -> int:
        """h, the number of softmax heads."""
        return self.num_query_heads if self.logits_proj is None else self.logits_proj.shape[1]

    @property
    def num_output_heads(self) -> int:
        """h_v, the number of output heads."""
        return self.num_softmax_heads if self.weights_proj is None else self.weights_proj.shape[1]

    @property
    def is_empty(self) -> bool:
        """True if there are no queries or no keys."""
        return 0 in (*self.query.shape, self.key.shape[2])

    def allocate_output(self) -> Tensor:
        """Return an uninitialized output [b, n, h_v, d_v]."""
        batches, _, length, _ = self.query.shape
        return self.value.new_empty(batches, length, self.num_output_heads, self.value.shape[-1])


# The number of values [heads, r, m] per thread. A few tensors of this size fit into the cache.
BLOCK_ELEMENTS = {"cpu": 2**19, "default": 2**24}
# Numbers of rows for which matrix products are fast. With few rows, reading keys and values takes longer than the
# computation. Blocks with up to 64 rows may therefore have four times as many values as fit into the cache.
BLOCK_ROWS = (512, 256, 128, 64, 48, 32)
# The maximum number of parts into which a sequence is split. Each part has a copy of the keys and values.
MAX_PARTS = 8


@dataclass
class _QueryBlock:
    """A block of query rows from some sequences, with the slices of keys that these rows attend to."""

    number: int
    batch: slice
    rows: slice
    spans: tuple[slice, ...]
    size: int  # B

    def __post_init__(self) -> None:
        self.length, self.key_length = _get_span_length(self.rows), sum(map(_get_span_length, self.spans))  # r, m

    def select_keys(self, states: Tensor, axis: int) -> Tensor:
        """Select the block's keys in a tensor. `axis` is the key axis of the tensor, which is 2 or 3."""
        parts = [states[(slice(None),) * axis + (span,)] for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


class _BlockedCall:
    """An attention call, with a method for each step in the computation of a block.

    Args:
        operands: the operands of the call.
        threads: the number of threads that compute a block, which determines the block sizes.
    """

    def __init__(self, operands: AttentionOperands, threads: int):
        query, key, value, mask, bias, logits_proj, weights_proj, seed, scaling, is_causal, dropout, key_range = (
            operands
        )
        self.num_query_heads = operands.num_query_heads
        self.num_softmax_heads = operands.num_softmax_heads
        self.num_output_heads = operands.num_output_heads
        self.threads, self.is_causal, self.dropout = threads, is_causal, dropout
        self.kv_heads, self.value_heads = key.shape[1], value.shape[1]
        # The queries of a single sequence are split into parts, so that each thread has one part.
        self.parts = _choose_num_parts(operands, threads)
        if self.parts > 1:
            query = self.split(query)
            mask, bias = (None if tensor is None else self.split(tensor) for tensor in (mask, bias))
            key, value = (tensor.repeat(self.parts, 1, 1, 1) for tensor in (key, value))
        elif query.shape[0] > 1:  # models pass a transposed [b, m, h, d], which would be copied for each block
            key, value = key.contiguous(), value.contiguous()
        self.query, self.key, self.value = query, key, value
        # The dot products are scaled through P_l or the queries, because these have the fewest elements. In float16,
        # the queries are scaled, because the dot products could overflow.
        self.proj_scaling = 1.0 if logits_proj is None or query.dtype == torch.float16 else scaling
        self.mix_in = None if logits_proj is None else (logits_proj * self.proj_scaling).to(query.dtype)
        self.mix_out = None if weights_proj is None else weights_proj.to(query.dtype)
        self.query_scaling = scaling / self.proj_scaling
        self.buffers: dict[str, Tensor] = {}
        if dropout > 0 and seed is not None:
            self.generator, self.first_seed = torch.Generator(query.device), int(seed)
            # The probability has a precision of 16 bits. A weight is kept if its random integer from -2**15 to 2**15 -
            # 1 is at least this number.
            self.first_kept = min(round(dropout * 2**16), 2**16 - 1) - 2**15
            self.keep_probability = (2**15 - self.first_kept) / 2**16
        self.additive_terms: list[Tensor] = []
        self.allowed: Tensor | None = None
        self.rows_without_keys: Tensor | None = None
        self.windows = (
            None if key_range is None else WindowBlockLayout(KeyRange(*key_range), self.query, self.key, bias)
        )
        self._store_masks(mask, bias if key_range is None else None)

    def _store_masks(self, mask: Tensor | None, bias: Tensor | None) -> None:
        batches, _, length, _ = self.query.shape
        full_shape = (batches, -1, length, self.key.shape[2])
        if bias is not None:
            self.additive_terms.append(bias.expand(full_shape))
        if mask is None:
            return
        if mask.dtype == torch.bool:
            self.allowed = mask.expand(full_shape)
            return
        self.additive_terms.append(mask.expand(full_shape))
        without_keys = mask.amax(-1, keepdim=True) == -torch.inf  # the rows without any keys
        if without_keys.device.type != "cpu" or without_keys.any():  # `any` would wait for a GPU
            self.rows_without_keys = without_keys.expand(batches, -1, length, 1)

    def split(self, tensor: Tensor) -> Tensor:
        """Split a tensor [1, h, n, x] into `self.parts` parts along axis n. Return a view [parts, h, n / parts, x]."""
        if tensor.shape[2] == 1:
            return tensor
        return tensor[0].unflatten(1, (self.parts, -1)).transpose(0, 1)

    def iterate_blocks(self) -> Iterator[_QueryBlock]:
        """Yield the blocks of the call. Their order is the same in both passes."""
        batches, _, length, _ = self.query.shape
        elements = BLOCK_ELEMENTS.get(self.query.device.type, BLOCK_ELEMENTS["default"])
        elements = max(
            1, elements // max(self.num_query_heads, self.num_softmax_heads, self.num_output_heads)
        )  # of [r, m]
        max_rows_in_cache = max(1, elements // self.key.shape[2])
        max_rows = max(max_rows_in_cache, min(64, 4 * max_rows_in_cache))
        rows = (
            length
            if length <= max_rows_in_cache
            else next((rows for rows in BLOCK_ROWS if rows <= max_rows), BLOCK_ROWS[-1])
        )
        size = min(batches, max(1, max_rows_in_cache // length) * self.threads)
        if self.windows is not None:
            size = min(batches, max(1, elements // self.windows.max_elements_per_block) * self.threads)
        number = 0
        for batch in range(0, batches, size):
            stop = min(batch + size, batches)
            for queries, spans in self.yield_rows_and_spans(rows):
                yield _QueryBlock(number, slice(batch, stop), queries, spans, stop - batch)
                number += 1

    def yield_rows_and_spans(self, rows: int) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield the query rows and the key slices of each block."""
        length, key_length = self.query.shape[2], self.key.shape[2]
        if self.windows is not None:
            yield from self.windows.iterate_blocks(rows)
            return
        for row in range(0, length, rows):
            end = min(row + rows, length)
            yield slice(row, end), (slice(0, min(key_length, end) if self.is_causal else key_length),)

    def get_queries(self, block: _QueryBlock) -> Tensor:
        """Return the queries [B * k, g * r, d], with the heads in a group stacked as rows."""
        query = stack_groups(self.query[block.batch, :, block.rows], self.kv_heads)
        return query if self.query_scaling == 1.0 else query * self.query_scaling

    def get_keys(self, block: _QueryBlock) -> Tensor:
        """Return the keys [B * k, m, d]."""
        return self.gather_states("keys", self.key, block)

    def get_values(self, block: _QueryBlock) -> Tensor:
        """Return the values [B * k, m, d_v]."""
        return self.gather_states("values", self.value, block)

    def gather_states(self, buffer_name: str, states: Tensor, block: _QueryBlock) -> Tensor:
        """Return the part [B * k, m, x] of keys or values [b, k, all keys, x] that a block reads.

        If there are several slices, they are joined in a buffer.
        """
        parts = [states[block.batch, :, span] for span in block.spans]
        if len(parts) > 1:
            out = self.allocate(buffer_name, block.size, states.shape[1], block.key_length, states.shape[3])
            parts = [torch.cat(parts, 2, out=out)]
        return parts[0].flatten(0, 1)

    def get_buffer(self, name: str, heads: int, block: _QueryBlock) -> Tensor:
        """Return an uninitialized buffer [B, heads, r * m]."""
        return self.allocate(name, block.size, heads, block.length * block.key_length)

    def allocate(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialized buffer of this shape.

        All blocks use the same memory, which therefore stays in the cache.
        """
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.query.dtype, device=self.query.device)
        return self.buffers[name][:size].view(shape)

    def compute_scores(self, queries: Tensor, block: _QueryBlock) -> Tensor:
        """Return the dot products [B, h_k, r * m] in the buffer "scores"."""
        return _matmul_transposed(
            queries, self.get_keys(block), self.get_buffer("scores", self.num_query_heads, block)
        )

    def softmax(self, scores: Tensor, block: _QueryBlock) -> Tensor:
        """Return the softmax weights [B, h, r, m] for scores [B, h_k, r * m], computed in at least float32."""
        if self.mix_in is None and self.mix_out is None:
            logits = scores  # the scores are not needed again
        else:
            logits = self.get_buffer("softmax", self.num_softmax_heads, block)
            logits = logits.copy_(scores) if self.mix_in is None else _mix_heads_into(self.mix_in.t(), scores, logits)
        logits = logits.view(block.size, self.num_softmax_heads, -1, block.key_length)
        allowed, additive_terms = self.get_masks(block)
        for term in additive_terms:
            is_wider = torch.promote_types(term.dtype, logits.dtype) != logits.dtype
            logits = logits + term if is_wider else logits.add_(term)
        if allowed is not None:
            logits = logits.masked_fill_(~allowed, torch.finfo(logits.dtype).min)
        without_keys = None if self.rows_without_keys is None else self.rows_without_keys[block.batch, :, block.rows]
        if without_keys is not None:
            logits = logits.masked_fill_(without_keys, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = torch.softmax(logits, -1, out=logits) if dtype == logits.dtype else logits.softmax(-1, dtype=dtype)
        if allowed is not None:
            has_keys = allowed.any(-1, keepdim=True)
            if has_keys.device.type != "cpu" or not has_keys.all():  # a check on a GPU would wait for it
                weights *= has_keys
        return weights if without_keys is None else weights.masked_fill_(without_keys, 0)

    def get_masks(self, block: _QueryBlock) -> tuple[Tensor | None, list[Tensor]]:
        """Return a mask broadcastable to [B, h, r, m], and the terms to add to the logits.

        The mask is None if no keys need to be masked.
        """
        additive_terms = [block.select_keys(term[block.batch, :, block.rows], 3) for term in self.additive_terms]
        allowed = None if self.allowed is None else block.select_keys(self.allowed[block.batch, :, block.rows], 3)
        if self.is_causal and block.key_length > block.rows.start + 1:
            shape, device = (block.length, block.key_length), self.query.device
            causal = torch.ones(shape, dtype=torch.bool, device=device).tril(block.rows.start)
            allowed = causal if allowed is None else allowed & causal
        if self.windows is not None:
            in_window, window_bias = self.windows.get_mask_and_bias(block.rows, block.spans)
            # Each query attends at least to itself. Most blocks contain no padding, and adding a bias is faster than
            # applying a mask.
            if allowed is None or (allowed.device.type == "cpu" and bool(allowed.all())):
                return None, [*additive_terms, window_bias]
            return allowed & in_window, [*additive_terms, window_bias]
        return allowed, additive_terms

    def mix_weights(self, softmax: Tensor, buffer_name: str, block: _QueryBlock) -> Tensor:
        """Apply P_w to softmax weights [B, h, r, m], and return the value weights [B, h_v, r * m] before dropout."""
        weights = softmax.to(self.query.dtype).flatten(2)
        if self.mix_out is None:
            return weights
        return _mix_heads_into(self.mix_out.t(), weights, self.get_buffer(buffer_name, self.num_output_heads, block))

    def draw_dropout_mask(self, weights: Tensor, block: _QueryBlock) -> Tensor:
        """Return the dropout mask of a block. It depends only on the seed and the block number."""
        self.generator.manual_seed(self.first_seed + block.number)
        # Each random integer provides four 16-bit integers. On a CPU, this is ten times as fast as `bernoulli_`.
        bits = torch.empty(-(-weights.numel() // 4), dtype=torch.int64, device=weights.device)
        bits = bits.random_(-(2**63), None, generator=self.generator).view(torch.int16)
        return (bits[: weights.numel()].view(weights.shape) >= self.first_kept).to(weights.dtype)

    def add_bias_gradient(self, d_bias: Tensor, d_logits: Tensor, block: _QueryBlock) -> None:
        """Add a block's contribution to the gradient of the position bias.

        With windows, `finish_gradients` adds the last contribution.
        """
        if self.windows is None:
            add_bias_gradient(d_bias, d_logits, block.batch, block.rows)
        else:
            self.windows.add_bias_gradient(d_bias, d_logits)

    def finish_gradients(self, d_bias: Tensor, d_logits_proj: Tensor) -> None:
        """Complete the gradients after the last block."""
        d_logits_proj *= self.proj_scaling
        if self.windows is not None:
            self.windows.finish_bias_gradient(d_bias)


def blocked_forward(operands: AttentionOperands) -> tuple[Tensor, Tensor]:
    """Return talking-heads attention [b, n, h_v, d_v] and the number of threads [1].

    The backward pass needs this number to create the same blocks, because dropout depends on the block number.
    """
    query, device = operands.query, operands.query.device
    output = operands.allocate_output()
    if operands.is_empty:
        return output.zero_(), query.new_ones(1, dtype=torch.float32)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    call = _BlockedCall(operands, threads)
    parts = output.view(call.query.shape[0], -1, *output.shape[2:])
    for block in call.iterate_blocks():
        scores = call.compute_scores(call.get_queries(block), block)
        weights = call.mix_weights(call.softmax(scores, block), "scores", block)  # overwrites the scores
        if call.dropout > 0:
            weights = weights * call.draw_dropout_mask(weights, block)
        weights = weights.view(block.size * call.value_heads, -1, block.key_length)
        rows = weights @ call.get_values(block)  # [B * k, g * r, d_v]
        if call.dropout > 0:
            rows /= call.keep_probability
        parts[block.batch, block.rows] = _unstack_groups(rows, block.size, call.num_output_heads).transpose(1, 2)
    return output, torch.full((1,), threads, dtype=torch.float32, device=device)


def blocked_backward(
    d_output: Tensor, threads: Tensor, needs_bias_gradient: bool, operands: AttentionOperands
) -> list[Tensor]:
    """Return the gradients of query, key, value, position_bias, logits_proj and weights_proj (empty if not needed).

    Args:
        d_output: the gradient of the outputs [b, n, h_v, d_v].
        threads: the number of threads that `blocked_forward` returned.
        needs_bias_gradient: True if the position bias needs a gradient.
    """
    query, key, value = operands[:3]
    bias = operands.position_bias if needs_bias_gradient else None
    call = _BlockedCall(operands, int(threads.flatten()[0]) if query.device.type == "cpu" else 1)
    # Sums over blocks are computed in at least float32.
    dtype = torch.promote_types(query.dtype, torch.float32)
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_key, d_value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (call.key, call.value))
    d_bias, d_logits_proj, d_weights_proj = (
        torch.zeros(0 if t is None else t.shape, dtype=dtype, device=query.device)
        for t in (bias, operands.logits_proj, operands.weights_proj)
    )
    if operands.is_empty:
        return [*map(torch.zeros_like, (query, key, value)), d_bias, d_logits_proj, d_weights_proj]
    if call.dropout > 0:
        d_output = d_output / call.keep_probability
    d_output = d_output.unflatten(1, (call.parts, -1)).flatten(0, 1)
    query_parts, bias_parts = (call.split(t) if call.parts > 1 and t.dim() == 4 else t for t in (d_query, d_bias))
    for block in call.iterate_blocks():
        queries = call.get_queries(block)
        scores = call.compute_scores(queries, block)  # [B, h_k, r * m]
        softmax = call.softmax(scores, block)  # [B, h, r, m]
        weights = call.mix_weights(softmax, "weights", block)  # [B, h_v, r * m]
        dropout_mask = call.draw_dropout_mask(weights, block) if call.dropout > 0 else None
        d_rows = d_output[block.batch, block.rows].transpose(1, 2)
        d_rows = stack_groups(d_rows, call.value_heads)  # [B * k, g * r, d_v]
        _add_product(d_value[block.batch], block, weights if dropout_mask is None else weights * dropout_mask, d_rows)
        # The gradient overwrites the weights, which are not needed again (unless they are the softmax itself).
        d_weights = _matmul_transposed(
            d_rows, call.get_values(block), call.get_buffer("weights", call.num_output_heads, block)
        )
        if dropout_mask is not None:
            d_weights *= dropout_mask
        d_softmax = d_weights
        if call.mix_out is not None:
            d_weights_proj += (softmax.to(query.dtype).flatten(2) @ d_weights.transpose(1, 2)).sum(0)
            d_softmax = _mix_heads_into(
                call.mix_out, d_weights, call.get_buffer("d_softmax", call.num_softmax_heads, block)
            )
        d_softmax = d_softmax.view(softmax.shape).to(softmax.dtype)
        d_logits = torch._softmax_backward_data(d_softmax, softmax, -1, softmax.dtype, grad_input=d_softmax)
        if needs_bias_gradient:
            call.add_bias_gradient(bias_parts, d_logits, block)
        d_scores = d_logits.to(query.dtype).flatten(2)
        if call.mix_in is not None:
            d_logits_proj += (scores @ d_scores.transpose(1, 2)).sum(0)
            d_scores = _mix_heads_into(call.mix_in, d_scores, scores)  # [B, h_k, r * m]; overwrites the scores
        _add_product(d_key[block.batch], block, d_scores, queries)
        d_queries = d_scores.view(block.size * call.kv_heads, -1, block.key_length) @ call.get_keys(block)
        if call.query_scaling != 1.0:
            d_queries *= call.query_scaling
        query_parts[block.batch, :, block.rows] = _unstack_groups(d_queries, block.size, call.num_query_heads)
    call.finish_gradients(d_bias, d_logits_proj)
    is_split = call.parts > 1
    del call  # frees its buffers and copies
    d_key, d_value = (t.sum(0, keepdim=True) if is_split else t for t in (d_key, d_value))
    return [d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_bias, d_logits_proj, d_weights_proj]


def _choose_num_parts(operands: AttentionOperands, threads: int) -> int:
    batches, _, length, _ = operands.query.shape
    # Splitting is not necessary for causal blocks, which only read the keys up to their last row, or for windows,
    # which have few keys.
    if batches > 1 or operands.is_causal or operands.key_range is not None:
        return 1
    max_parts = min(threads, MAX_PARTS, length // BLOCK_ROWS[-1])
    return next((parts for parts in range(max_parts, 1, -1) if length % parts == 0), 1)


def stack_groups(states: Tensor, kv_heads: int) -> Tensor:
    """Reshape states [B, h, r, x] to [B * k, g * r, x], so that the heads in a group are stacked as rows."""
    return states.reshape(states.shape[0] * kv_heads, -1, states.shape[-1])


def _unstack_groups(states: Tensor, size: int, heads: int) -> Tensor:
    """Reshape states [B * k, g * r, x] to [B, h, r, x]."""
    return states.view(size, heads, -1, states.shape[-1])


def _matmul_transposed(states: Tensor, shared: Tensor, out: Tensor) -> Tensor:
    """Multiply [B * k, g * r, x] by the transposed [B * k, m, x] and write the result to `out` [B, h, r * m]."""
    torch.bmm(states, shared.transpose(1, 2), out=out.view(*states.shape[:2], shared.shape[1]))
    return out


def _mix_heads_into(matrix: Tensor, heads: Tensor, out: Tensor) -> Tensor:
    """Multiply [j, i] by [B, i, r * m] and write the result to `out` [B, j, r * m]."""
    return torch.bmm(matrix.expand(heads.shape[0], -1, -1), heads, out=out)


def _add_product(total: Tensor, block: _QueryBlock, weights: Tensor, states: Tensor) -> None:
    """Add the product of transposed weights [B, h, r * m] and states [B * k, g * r, x] to the total [B, k, m, x]."""
    weights, offset = weights.view(*states.shape[:2], block.key_length).transpose(1, 2), 0
    for span in block.spans:
        part, count = total[:, :, span].flatten(0, 1), _get_span_length(span)  # a view
        span_weights = weights[:, offset : offset + count]
        if part.dtype == states.dtype and part.is_contiguous():  # otherwise, torch would copy each matrix
            part.baddbmm_(span_weights, states)
        else:
            part += span_weights @ states
        offset += count


def _get_span_length(span: slice) -> int:
    return len(range(span.start, span.stop, span.step or 1))


def add_bias_gradient(d_bias: Tensor, d_logits: Tensor, batch: slice, rows: slice) -> None:
    """Add a block's logits gradient [B, h, r, m] to the gradient of the position bias.

    The logits gradient is first summed over the axes along which the bias is broadcast.
    """
    axes = [axis for axis in range(4) if d_bias.shape[axis] == 1 and d_logits.shape[axis] > 1]
    part = d_logits.sum(axes, keepdim=True) if axes else d_logits
    slices = (batch, slice(None), rows, slice(d_logits.shape[-1]))
    index = [slice(None) if size == 1 else axis_slice for size, axis_slice in zip(d_bias.shape, slices, strict=True)]
    d_bias[tuple(index)] += part
