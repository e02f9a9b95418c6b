"""Exact talking-heads attention a block of query rows at a time: plain torch, any device, memory linear in n and m.

The forward pass keeps its inputs only; the backward pass recomputes each block. A block's [heads, r, m] values stay in
the cache, and the head mixes are one small matrix product over [heads, r * m]. Letters as in `softmax_attention`;
r the query rows of a block, B its sequences.

On a CPU a block has a sequence for each thread: torch gives a thread neighbouring matrices of a product and
neighbouring rows of a softmax, so what it reads is in its own core's cache. With one sequence in a block, products
would be split by heads and mixes by positions, and most values would travel between cores.

Where queries read a window, so do blocks; `BlockWindows` says which keys.

Source: arXiv 2003.02436, section 3 (the formula); 2112.05682 (attention in blocks, recomputed in the backward pass).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .key_ranges import BlockWindows, KeyRange

__all__ = [
    "Operands",
    "add_bias_gradient",
    "blocked_backward",
    "blocked_forward",
    "group",
]


class Operands(NamedTuple):
    """The operands of one attention call, with the arguments of `talking_heads_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # four dimensions, like the bias
    position_bias: Tensor | None = None
    logits_proj: Tensor | None = None
    weights_proj: Tensor | None = None
    seed: Tensor | None = None  # integer [1] that seeds dropout; None without dropout
    scaling: float = 1.0
    is_causal: bool = False
    dropout: float = 0.0
    key_range: list[int] | None = None  # a `KeyRange`; the bias is then a bias by distance

    @property
    def heads_in(self) -> int:
        """Return h_k, the number of query heads."""
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        """Return h, the number of softmax heads."""
        return self.heads_in if self.logits_proj is None else self.logits_proj.shape[1]

    @property
    def heads_out(self) -> int:
        """Return h_v, the number of output heads."""
        return self.heads if self.weights_proj is None else self.weights_proj.shape[1]

    @property
    def is_empty(self) -> bool:
        """Return True if there are no queries or no keys."""
        return 0 in (*self.query.shape, self.key.shape[2])

    def new_output(self) -> Tensor:
        """Return an uninitialized output [b, n, h_v, d_v]."""
        batches, _, length, _ = self.query.shape
        return self.value.new_empty(batches, length, self.heads_out, self.value.shape[-1])


BLOCK_ELEMENTS = {"cpu": 2**19, "default": 2**24}  # of a thread's [heads, r, m] values: a few such stay in the cache
# Rows of a block: sizes that matrix products are fast at. With fewer they read keys and values more than they compute,
# so up to 64 may be four times what fits into the cache.
ROWS = (512, 256, 128, 64, 48, 32)
MOST_PARTS = 8  # of one sequence, each with its copy of the keys and values


@dataclass
class _Block:
    """Some sequences, some of their query rows, and the slices of the keys that these rows can reach."""

    number: int
    batch: slice
    rows: slice
    spans: tuple[slice, ...]
    size: int  # B

    def __post_init__(self) -> None:
        self.length, self.key_length = _count(self.rows), sum(map(_count, self.spans))  # r, m

    def read(self, states: Tensor, axis: int) -> Tensor:
        """Return the part of states that belongs to the keys that are reached, which are its axis 2 or 3."""
        parts = [states[(slice(None),) * axis + (span,)] for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


class _Call:
    """Each step of the forward pass on one block of a call, by this many threads."""

    def __init__(self, operands: Operands, threads: int):
        query, key, value, mask, bias, logits_proj, weights_proj, seed, scaling, is_causal, dropout, key_range = (
            operands
        )
        self.heads_in, self.heads, self.heads_out = operands.heads_in, operands.heads, operands.heads_out
        self.threads, self.is_causal, self.dropout = threads, is_causal, dropout
        self.kv_heads, self.value_heads = key.shape[1], value.shape[1]
        # A sequence alone becomes several with a part of the queries each, so that every thread has one.
        self.parts = _number_of_parts(operands, threads)
        if self.parts > 1:
            query = self.split(query)
            mask, bias = (None if tensor is None else self.split(tensor) for tensor in (mask, bias))
            key, value = (tensor.repeat(self.parts, 1, 1, 1) for tensor in (key, value))
        elif query.shape[0] > 1:  # models hand over [b, m, h, d] transposed, which each block would copy anew
            key, value = key.contiguous(), value.contiguous()
        self.query, self.key, self.value = query, key, value
        # The factor of the dot products is cheapest where the numbers are fewest: in P_l, or else in the queries. In
        # float16 it is in the queries, or the dot products could overflow.
        self.proj_scaling = 1.0 if logits_proj is None or query.dtype == torch.float16 else scaling
        self.mix_in = None if logits_proj is None else (logits_proj * self.proj_scaling).to(query.dtype)
        self.mix_out = None if weights_proj is None else weights_proj.to(query.dtype)
        self.query_scaling = scaling / self.proj_scaling
        self.buffers: dict[str, Tensor] = {}
        if dropout > 0 and seed is not None:
            self.generator, self.first_seed = torch.Generator(query.device), int(seed)
            # The probability to 16 bits: of the numbers from -2**15 to 2**15 - 1, this one and those above it keep.
            self.first_kept = min(round(dropout * 2**16), 2**16 - 1) - 2**15
            self.keep_probability = (2**15 - self.first_kept) / 2**16
        self.added: list[Tensor] = []
        self.allowed: Tensor | None = None
        self.nothing: Tensor | None = None
        self.windows = None if key_range is None else BlockWindows(KeyRange(*key_range), self.query, self.key, bias)
        self._take_masks(mask, bias if key_range is None else None)

    def _take_masks(self, mask: Tensor | None, bias: Tensor | None) -> None:
        batches, _, length, _ = self.query.shape
        full = (batches, -1, length, self.key.shape[2])
        if bias is not None:
            self.added.append(bias.expand(full))
        if mask is None:
            return
        if mask.dtype == torch.bool:
            self.allowed = mask.expand(full)
            return
        self.added.append(mask.expand(full))
        nothing = mask.amax(-1, keepdim=True) == -torch.inf  # the rows without any key
        if nothing.device.type != "cpu" or nothing.any():  # asking a GPU would wait for it
            self.nothing = nothing.expand(batches, -1, length, 1)

    def split(self, tensor: Tensor) -> Tensor:
        """[1, h, n, x] to the parts' [parts, h, n / parts, x], of the same memory."""
        if tensor.shape[2] == 1:
            return tensor
        return tensor[0].unflatten(1, (self.parts, -1)).transpose(0, 1)

    def blocks(self) -> Iterator[_Block]:
        batches, _, length, _ = self.query.shape
        elements = BLOCK_ELEMENTS.get(self.query.device.type, BLOCK_ELEMENTS["default"])
        elements = max(1, elements // max(self.heads_in, self.heads, self.heads_out))  # of [r, m]
        fitting = max(1, elements // self.key.shape[2])
        most = max(fitting, min(64, 4 * fitting))
        rows = length if length <= fitting else next((rows for rows in ROWS if rows <= most), ROWS[-1])
        size = min(batches, max(1, fitting // length) * self.threads)
        if self.windows is not None:
            size = min(batches, max(1, elements // self.windows.most_elements) * self.threads)
        number = 0
        for batch in range(0, batches, size):
            stop = min(batch + size, batches)
            for queries, spans in self.rows_and_spans(rows):
                yield _Block(number, slice(batch, stop), queries, spans, stop - batch)
                number += 1

    def rows_and_spans(self, rows: int) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        length, key_length = self.query.shape[2], self.key.shape[2]
        if self.windows is not None:
            yield from self.windows.blocks(rows)
            return
        for row in range(0, length, rows):
            end = min(row + rows, length)
            yield slice(row, end), (slice(0, min(key_length, end) if self.is_causal else key_length),)

    def queries(self, block: _Block) -> Tensor:
        """[B * k, g * r, d]: the rows of a group's heads below each other, so that no key or value is repeated."""
        query = group(self.query[block.batch, :, block.rows], self.kv_heads)
        return query if self.query_scaling == 1.0 else query * self.query_scaling

    def keys(self, block: _Block) -> Tensor:
        """[B * k, m, d]"""
        return self.gathered("keys", self.key, block)

    def values(self, block: _Block) -> Tensor:
        """[B * k, m, d_v]"""
        return self.gathered("values", self.value, block)

    def gathered(self, name: str, states: Tensor, block: _Block) -> Tensor:
        """[B * k, m, x] of [b, k, all keys, x], in that buffer where the keys do not follow each other."""
        parts = [states[block.batch, :, span] for span in block.spans]
        if len(parts) > 1:
            out = self.space(name, block.size, states.shape[1], block.key_length, states.shape[3])
            parts = [torch.cat(parts, 2, out=out)]
        return parts[0].flatten(0, 1)

    def buffer(self, name: str, heads: int, block: _Block) -> Tensor:
        """[B, heads, r * m], uninitialised."""
        return self.space(name, block.size, heads, block.length * block.key_length)

    def space(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, uninitialised: the same memory for every block, so that it is in the cache."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.query.dtype, device=self.query.device)
        return self.buffers[name][:size].view(shape)

    def scores(self, queries: Tensor, block: _Block) -> Tensor:
        """[B, h_k, r * m], in the buffer "scores"."""
        return _multiply(queries, self.keys(block), self.buffer("scores", self.heads_in, block))

    def softmax(self, scores: Tensor, block: _Block) -> Tensor:
        """[B, h_k, r * m] to the softmax weights [B, h, r, m], in at least float32 as fused kernels do."""
        if self.mix_in is None and self.mix_out is None:
            logits = scores  # nobody asks for them again
        else:
            logits = self.buffer("softmax", self.heads, block)
            logits = logits.copy_(scores) if self.mix_in is None else _mix(self.mix_in.t(), scores, logits)
        logits = logits.view(block.size, self.heads, -1, block.key_length)
        allowed, added = self.masks(block)
        for each in added:
            wider = torch.promote_types(each.dtype, logits.dtype) != logits.dtype
            logits = logits + each if wider else logits.add_(each)
        if allowed is not None:
            logits = logits.masked_fill_(~allowed, torch.finfo(logits.dtype).min)
        nothing = None if self.nothing is None else self.nothing[block.batch, :, block.rows]
        if nothing is not None:
            logits = logits.masked_fill_(nothing, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = torch.softmax(logits, -1, out=logits) if dtype == logits.dtype else logits.softmax(-1, dtype=dtype)
        if allowed is not None:
            alive = allowed.any(-1, keepdim=True)
            if alive.device.type != "cpu" or not alive.all():  # asking a GPU would wait for it
                weights *= alive
        return weights if nothing is None else weights.masked_fill_(nothing, 0)

    def masks(self, block: _Block) -> tuple[Tensor | None, list[Tensor]]:
        """Return what is allowed, [B, h, r, m] or less, None: everything; and what is added to the logits."""
        added = [block.read(each[block.batch, :, block.rows], 3) for each in self.added]
        allowed = None if self.allowed is None else block.read(self.allowed[block.batch, :, block.rows], 3)
        if self.is_causal and block.key_length > block.rows.start + 1:
            shape, device = (block.length, block.key_length), self.query.device
            causal = torch.ones(shape, dtype=torch.bool, device=device).tril(block.rows.start)
            allowed = causal if allowed is None else allowed & causal
        if self.windows is not None:
            near, outside = self.windows.terms(block.rows, block.spans)
            # Each query reads itself at least. Most blocks meet no padding, and adding is faster than filling in.
            if allowed is None or (allowed.device.type == "cpu" and bool(allowed.all())):
                return None, [*added, outside]
            return allowed & near, [*added, outside]
        return allowed, added

    def mixed(self, softmax: Tensor, name: str, block: _Block) -> Tensor:
        """[B, h, r, m] to the weights of the values [B, h_v, r * m], before dropout, in that buffer or unchanged."""
        weights = softmax.to(self.query.dtype).flatten(2)
        if self.mix_out is None:
            return weights
        return _mix(self.mix_out.t(), weights, self.buffer(name, self.heads_out, block))

    def kept(self, weights: Tensor, block: _Block) -> Tensor:
        """The dropout mask of one block, the same in both passes: it depends only on the seed and the number."""
        self.generator.manual_seed(self.first_seed + block.number)
        # Four 16-bit numbers from each draw: on a CPU, ten times as fast as a bernoulli_ of every weight.
        bits = torch.empty(-(-weights.numel() // 4), dtype=torch.int64, device=weights.device)
        bits = bits.random_(-(2**63), None, generator=self.generator).view(torch.int16)
        return (bits[: weights.numel()].view(weights.shape) >= self.first_kept).to(weights.dtype)

    def add_bias_gradient(self, d_bias: Tensor, d_logits: Tensor, block: _Block) -> None:
        """Add a block's part of the position bias's gradient, or keep it until `finish_gradients`."""
        if self.windows is None:
            add_bias_gradient(d_bias, d_logits, block.batch, block.rows)
        else:
            self.windows.add_bias_gradient(d_bias, d_logits)

    def finish_gradients(self, d_bias: Tensor, d_logits_proj: Tensor) -> None:
        """Do what is done once, after the last block."""
        d_logits_proj *= self.proj_scaling
        if self.windows is not None:
            self.windows.finish_bias_gradient(d_bias)


def blocked_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Return talking-heads attention [b, n, h_v, d_v], and the number of threads [1] for the backward pass.

    It must make the same blocks: their numbers decided what dropout drops.
    """
    query, device = operands.query, operands.query.device
    output = operands.new_output()
    if operands.is_empty:
        return output.zero_(), query.new_ones(1, dtype=torch.float32)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    call = _Call(operands, threads)
    parts = output.view(call.query.shape[0], -1, *output.shape[2:])
    for block in call.blocks():
        scores = call.scores(call.queries(block), block)
        weights = call.mixed(call.softmax(scores, block), "scores", block)  # the scores are done with
        if call.dropout > 0:
            weights = weights * call.kept(weights, block)
        weights = weights.view(block.size * call.value_heads, -1, block.key_length)
        rows = weights @ call.values(block)  # [B * k, g * r, d_v]
        if call.dropout > 0:
            rows /= call.keep_probability
        parts[block.batch, block.rows] = _ungroup(rows, block.size, call.heads_out).transpose(1, 2)
    return output, torch.full((1,), threads, dtype=torch.float32, device=device)


def blocked_backward(d_output: Tensor, threads: Tensor, wants_bias: bool, operands: Operands) -> list[Tensor]:
    """Return the gradients of query, key, value, position_bias, logits_proj and weights_proj; empty where none is due.

    Args:
        d_output: [b, n, h_v, d_v]
        threads: of the forward pass
        wants_bias: whether the position bias is trained
    """
    query, key, value = operands[:3]
    bias = operands.position_bias if wants_bias else None
    call = _Call(operands, int(threads.flatten()[0]) if query.device.type == "cpu" else 1)
    # Sums over blocks in at least float32.
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
    for block in call.blocks():
        queries = call.queries(block)
        scores = call.scores(queries, block)  # [B, h_k, r * m]
        softmax = call.softmax(scores, block)  # [B, h, r, m]
        weights = call.mixed(softmax, "weights", block)  # [B, h_v, r * m]
        kept = call.kept(weights, block) if call.dropout > 0 else None
        d_rows = group(d_output[block.batch, block.rows].transpose(1, 2), call.value_heads)  # [B * k, g * r, d_v]
        _add_product(d_value[block.batch], block, weights if kept is None else weights * kept, d_rows)
        # The weights are done with, so their gradient takes their place (unless they are the softmax itself).
        d_weights = _multiply(d_rows, call.values(block), call.buffer("weights", call.heads_out, block))
        if kept is not None:
            d_weights *= kept
        d_softmax = d_weights
        if call.mix_out is not None:
            d_weights_proj += (softmax.to(query.dtype).flatten(2) @ d_weights.transpose(1, 2)).sum(0)
            d_softmax = _mix(call.mix_out, d_weights, call.buffer("d_softmax", call.heads, block))
        d_softmax = d_softmax.view(softmax.shape).to(softmax.dtype)
        d_logits = torch._softmax_backward_data(d_softmax, softmax, -1, softmax.dtype, grad_input=d_softmax)
        if wants_bias:
            call.add_bias_gradient(bias_parts, d_logits, block)
        d_scores = d_logits.to(query.dtype).flatten(2)
        if call.mix_in is not None:
            d_logits_proj += (scores @ d_scores.transpose(1, 2)).sum(0)
            d_scores = _mix(call.mix_in, d_scores, scores)  # [B, h_k, r * m]; the scores are done with
        _add_product(d_key[block.batch], block, d_scores, queries)
        d_queries = d_scores.view(block.size * call.kv_heads, -1, block.key_length) @ call.keys(block)
        if call.query_scaling != 1.0:
            d_queries *= call.query_scaling
        query_parts[block.batch, :, block.rows] = _ungroup(d_queries, block.size, call.heads_in)
    call.finish_gradients(d_bias, d_logits_proj)
    parts = call.parts
    del call  # its buffers and copies
    if parts > 1:
        d_key, d_value = (t.sum(0, keepdim=True) for t in (d_key, d_value))
    return [d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_bias, d_logits_proj, d_weights_proj]


def _number_of_parts(operands: Operands, threads: int) -> int:
    batches, _, length, _ = operands.query.shape
    # The keys that a causal block reads are those up to its last row, those of a window are few.
    if batches > 1 or operands.is_causal or operands.key_range is not None:
        return 1
    most = min(threads, MOST_PARTS, length // ROWS[-1])
    return next((parts for parts in range(most, 1, -1) if length % parts == 0), 1)


def group(states: Tensor, kv_heads: int) -> Tensor:
    """[B, h, r, x] -> [B * k, g * r, x]."""
    return states.reshape(states.shape[0] * kv_heads, -1, states.shape[-1])


def _ungroup(states: Tensor, size: int, heads: int) -> Tensor:
    """[B * k, g * r, x] -> [B, h, r, x]."""
    return states.view(size, heads, -1, states.shape[-1])


def _multiply(states: Tensor, shared: Tensor, out: Tensor) -> Tensor:
    """[B * k, g * r, x] by [B * k, m, x] to [B, h, r * m], written to `out`."""
    torch.bmm(states, shared.transpose(1, 2), out=out.view(*states.shape[:2], shared.shape[1]))
    return out


def _mix(matrix: Tensor, heads: Tensor, out: Tensor) -> Tensor:
    """[j, i] by [B, i, r * m] to [B, j, r * m], written to `out`."""
    return torch.bmm(matrix.expand(heads.shape[0], -1, -1), heads, out=out)


def _add_product(total: Tensor, block: _Block, weights: Tensor, states: Tensor) -> None:
    """Add weights^T states, [B, h, r * m] by [B * k, g * r, x] summed over a group's rows, to total [B, k, m, x]."""
    weights, at = weights.view(*states.shape[:2], block.key_length).transpose(1, 2), 0
    for span in block.spans:
        part, count = total[:, :, span].flatten(0, 1), _count(span)  # of the same memory
        of_span = weights[:, at : at + count]
        if part.dtype == states.dtype and part.is_contiguous():  # else torch multiplies matrix by matrix, by copies
            part.baddbmm_(of_span, states)
        else:
            part += of_span @ states
        at += count


def _count(span: slice) -> int:
    return len(range(span.start, span.stop, span.step or 1))


def add_bias_gradient(d_bias: Tensor, d_logits: Tensor, batch: slice, rows: slice) -> None:
    """Add [B, h, r, m] to the part of d_bias it belongs to, summed over the axes along which the bias was repeated."""
    axes = [axis for axis in range(4) if d_bias.shape[axis] == 1 and d_logits.shape[axis] > 1]
    part = d_logits.sum(axes, keepdim=True) if axes else d_logits
    places = (batch, slice(None), rows, slice(d_logits.shape[-1]))
    at = [slice(None) if size == 1 else place for size, place in zip(d_bias.shape, places, strict=True)]
    d_bias[tuple(at)] += part
