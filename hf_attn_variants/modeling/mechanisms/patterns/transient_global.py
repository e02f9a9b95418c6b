"""Transient-global attention for the T5 encoder (LongT5, arXiv 2112.07916, section 3.1.2).

Each token attends to the tokens within a window and to a summary of each block in the text. A summary is the
normalized sum of the inputs in its block. It is used as an additional key and value, with a separate position bias for
distances in blocks. Summaries are not queries and are recomputed in every layer. Tokens after the last complete block
belong to that block.

Attention is computed for one block of queries at a time, and each block is recomputed in the backward pass. No tensor
has n x n elements, but the logits of the summaries have n x n / l elements. The symbols are defined in
`softmax_attention`. G is the number of summaries, and l is the number of tokens per block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...ops.key_ranges import MAX_SIZE, TransientGlobalKeyRange, look_up_relative_bias
from ...ops.padded_rows import get_row_roller, is_boolean_key_mask
from ...ops.softmax_attention import attention_with_weights, fused_attention
from ...ops.variant_attention import is_exporting, should_return_weights
from ...transformers_internals import check_known_arguments, check_method, guarded_imports
from ..attention_extension import HEAD_STAGE, apply_extensions, get_normalization
from ..talking_heads import HEAD_PROJECTIONS
from .attention_pattern import AttentionPattern

__all__ = ["TransientGlobalPattern", "add_summary_parameters", "attend_with_summaries", "compute_summary_bias"]


class TransientGlobalPattern(AttentionPattern):
    """A pattern in which each token attends to nearby tokens and to a summary of each block."""

    name = "transient_global"
    paper = ("LongT5: transient global tokens", "2112.07916")
    needed = ("attention_window", "attention_block_size")
    learned = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check that the pattern is used in the T5 encoder.

        Raises:
            ValueError: if it is not.
        """
        if not (prefix and config.makes_summaries):
            raise ValueError(
                f'`{prefix}attention_pattern="transient_global"` is only supported for the T5 encoder, got '
                f"model_type={config.model_type!r}. Choose another pattern."
            )

    @classmethod
    def get_key_range(
        cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool
    ) -> TransientGlobalKeyRange:
        """Return the radius and the block size. See `AttentionPattern.get_key_range` for the arguments."""
        window = config.get_layer_value(f"{prefix}attention_window", layer)
        block = getattr(config, f"{prefix}attention_block_size")
        return TransientGlobalKeyRange(MAX_SIZE if window is None else window // 2, block)


SUMMARY_ROWS = 128  # number of queries per block


class _SummaryKeyValues(NamedTuple):
    """The summaries in one call."""

    key: Tensor  # [b, k, G, d]
    value: Tensor
    read: Tensor  # [b, 1, 1, G]: True if the block has any tokens
    blocks: Tensor  # [b, n]: the block of each token


def add_summary_parameters(module: Any, config: Any, heads: int) -> None:
    """Add the layer norm for summaries to an attention module in the T5 encoder.

    If the module computes the position bias, the bias for summaries is added as well. The parameters have the same
    names as in LongT5.

    Args:
        module: the attention module.
        config: the model configuration.
        heads: h, the number of softmax heads.
    """
    with guarded_imports():
        from transformers.models.t5.modeling_t5 import T5LayerNorm
    arguments = ("relative_position", "bidirectional", "num_buckets", "max_distance")
    check_method(type(module), "_relative_position_bucket", arguments)
    like = next(module.parameters())
    norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
    module.global_input_layer_norm = norm.to(device=like.device, dtype=like.dtype)
    if module.has_relative_attention_bias:
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        module.global_relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, heads, **options)
    module._is_hf_initialized = False


def assign_tokens_to_blocks(is_token: Tensor, block: int) -> Tensor:
    """Return the index of each token's block, [b, n], or -1 for tokens without a block.

    A token has no block if it is padding (`is_token` [b, n] is False) or if the text is shorter than a block.
    """
    positions = torch.arange(is_token.shape[1], device=is_token.device)
    ends = is_token & (positions % block == block - 1)
    last = torch.where(ends, positions // block, -1).amax(1, keepdim=True)  # the last complete block
    return torch.where(is_token, torch.minimum(positions // block, last), -1)


def compute_summary_bias(module: Any, length: int, device: torch.device) -> Tensor:
    """Return the bias table for summaries [1, h, 1, 2 G - 1], for distances of -(G - 1) to G - 1 blocks.

    Args:
        module: the attention module that computes the bias.
        length: n, the length of the text.
        device: the device of the inputs. If Accelerate offloads the weights, they are on a different device between
            calls.
    """
    count = length // module.key_range.block
    distance = torch.arange(1 - count, max(count, 1 - count), device=device)
    sizes = (module.relative_attention_num_buckets, module.relative_attention_max_distance)
    buckets = module._relative_position_bucket(distance, True, *sizes)
    return module.global_relative_attention_bias(buckets).T[None, :, None]


def attend_with_summaries(
    module: Any,
    states: Tensor,
    operands: tuple[Tensor, ...],
    mask: Tensor | None,
    tables: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend to nearby tokens and to summaries.

    Args:
        module: the attention module, whose `key_range` is a `TransientGlobalKeyRange`.
        states: the inputs [b, n, D].
        operands: the queries [b, h_k, n, d], the keys [b, k, n, d] and the values.
        mask: a boolean padding mask [b, 1, 1 or n, n], or None.
        tables: the bias table for tokens [1, h, 1, 2 n - 1], followed by the table for summaries (see
            `compute_summary_bias`).
        dropout: the dropout probability of the weights.
        kwargs: additional arguments of the call, such as `output_attentions`.

    Returns:
        The outputs [b, n, h_v, d_v] and, if requested, the weights [b, h_v, n, G + n], which start with the summaries.

    Raises:
        ValueError: if the mask is additive or differs between queries.
    """
    if mask is not None and not is_boolean_key_mask(mask):
        raise ValueError(
            "The mask must be a boolean padding mask of shape [b, n] or [b, 1, 1, n] with "
            f'`attention_pattern="transient_global"`, got {list(mask.shape)} of type {mask.dtype}.'
        )
    batch, length, _ = states.shape
    moved = get_row_roller(module, mask, length)
    if moved is not None and mask is not None:
        states, mask = moved.roll(states, 1), moved.roll(mask[..., :1, :], 3)
        operands = tuple(moved.roll(tensor, 2) for tensor in operands)
    is_token = torch.ones(batch, length, dtype=torch.bool, device=states.device)
    is_token = is_token if mask is None else mask[:, 0, 0].expand(batch, length)
    summaries = _compute_summaries(module, states, is_token)
    check_known_arguments(kwargs)
    with_weights = should_return_weights(module, kwargs)
    rows = length if with_weights or is_exporting() else SUMMARY_ROWS
    attend = _attend(module, dropout, with_weights)
    tensors = (*operands, *summaries, *(() if tables is None else (tables,)))
    learns = rows < length and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    outputs = []
    for begin in range(0, length, rows):
        span = slice(begin, min(begin + rows, length))
        call = partial(_attend_in_block, attend, module.key_range.radius, span)
        arguments = (operands, summaries, is_token, tables)
        outputs.append(checkpoint(call, *arguments, use_reentrant=False) if learns else call(*arguments))
    output, weights = outputs[0] if with_weights else (torch.cat(outputs, 1), None)
    if moved is None:
        return output, weights
    return moved.unroll(output, 1), None if weights is None else moved.unroll_weights(weights)


def _attend(module: Any, dropout: float, with_weights: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"scaling": module.scaling, "dropout": dropout}
    normalize = get_normalization(module) if module.extensions else None
    if not (with_weights or module.projection_names or module.score is not None or normalize is not None):
        return partial(fused_attention, **options)
    options |= {name: getattr(module, name, None) for name in (*HEAD_PROJECTIONS, "score")}
    options["normalize"] = normalize
    if with_weights:
        return partial(attention_with_weights, **options)
    return lambda *operands: attention_with_weights(*operands, **options)[0]


def _compute_summaries(module: Any, states: Tensor, is_token: Tensor) -> _SummaryKeyValues:
    batch, length, width = states.shape
    block, count = module.key_range.block, length // module.key_range.block
    blocks = assign_tokens_to_blocks(is_token, block)
    block_indices = torch.where(blocks < 0, count, blocks)  # a last block for tokens without a summary
    sums = states.new_zeros(batch, count + 1, width).scatter_add(
        1, block_indices[..., None].expand(states.shape), states
    )
    read = torch.zeros(batch, count + 1, dtype=torch.bool, device=states.device).scatter(1, block_indices, True)
    normed = module.global_input_layer_norm(sums[:, :count])
    key = module.k(normed).unflatten(-1, (-1, module.heads.head_dim)).transpose(1, 2)
    value = module.v(normed).unflatten(-1, (-1, module.heads.value_dim)).transpose(1, 2)
    key, value = (
        apply_extensions(module, HEAD_STAGE, states, role) for states, role in ((key, "key"), (value, "value"))
    )
    return _SummaryKeyValues(key, value, read[:, None, None, :count], blocks)


def _attend_in_block(
    attend: Callable[..., Any],
    radius: int,
    rows: slice,
    operands: tuple[Tensor, ...],
    summaries: _SummaryKeyValues,
    is_token: Tensor,
    tables: Tensor | None,
) -> Any:
    query, key, value = operands
    length, device = query.shape[2], query.device
    near_rows = slice(max(0, rows.start - radius), min(length, rows.stop + radius))
    queries, keys = (
        torch.arange(rows.start, rows.stop, device=device),
        torch.arange(near_rows.start, near_rows.stop, device=device),
    )
    key, value = (
        torch.cat([summary_bias, states[:, :, near_rows]], 2)
        for summary_bias, states in ((summaries.key, key), (summaries.value, value))
    )
    allowed = ((keys - queries[:, None]).abs() <= radius) & is_token[:, None, None, near_rows]  # [b, 1, r, near]
    mask = torch.cat([summaries.read.expand(-1, 1, allowed.shape[2], -1), allowed], -1)
    bias, count = None, summaries.key.shape[2]
    if tables is not None:
        bias = look_up_relative_bias(tables[..., : 2 * length - 1], queries, keys).expand(query.shape[0], -1, -1, -1)
        if count:
            distance = torch.arange(count, device=device) - summaries.blocks[:, rows, None]  # [b, r, G]
            index = distance.clamp(max=count - 1) + count - 1  # padding is in block -1
            summary_bias = tables[0, :, 0, 2 * length - 1 :][:, index].transpose(0, 1)  # [b, h, r, G]
            bias = torch.cat([summary_bias, bias], -1)
    return attend(query[:, :, rows], key, value, mask, bias)
