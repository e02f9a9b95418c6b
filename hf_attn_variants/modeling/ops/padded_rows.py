"""Support for left-padded rows in attention mechanisms that depend on token positions.

Blocks, global tokens, summaries, compressed keys and projections along the sequence depend on positions in the text
and must start at the first real token. A row with padding on the left is therefore rolled, so that its text begins at
position 0 and the padding follows. The outputs are rolled back afterwards:

    positions         0 1 2 3 4 5
    row with padding  . . a b c d      first = 2
    rolled            a b c d . .      position i has the token of position (i + first) % n
    rolled back       . . a b c d      position i has the output of position (i - first) % n

A row therefore has the same outputs in any batch. Rows are not rolled for `BlockPattern`, which decoders also use. It
receives the position of the first token in each row instead.

The symbols are defined in `softmax_attention`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .variant_attention import VariantAttention, is_traced

__all__ = [
    "KEEP_ROWS",
    "find_text_spans",
    "get_row_roller",
    "is_boolean_key_mask",
    "roll_padded_rows",
    "set_padding_rule",
]

# The rules for left-padded rows: KEEP_ROWS if attention does not depend on positions, ROLL_ROWS if the rows must be
# rolled, and BY_PATTERN if the pattern receives the position of the first token in each row.
KEEP_ROWS, ROLL_ROWS, BY_PATTERN = range(3)


def set_padding_rule(module: VariantAttention) -> None:
    """Set how an attention module handles padded rows.

    Its `key_range`, `compression` and `kernel` must already be set.
    """
    key_range, kernel = module.key_range, module.kernel
    counts = key_range is not None and key_range.depends_on_positions
    knows_rows = hasattr(key_range, "adapt_to_padded_rows")
    rolls = module.compression is not None or (kernel is not None and kernel.depends_on_positions)
    rolls = rolls or (counts and not knows_rows)
    module.padding_rule = ROLL_ROWS if rolls else BY_PATTERN if counts else KEEP_ROWS


class RowRoller:
    """Moves the text in each row to the beginning of the row, and the left padding to its end.

    Args:
        first: the position of the first token in each row, [b or 1].
        length: n, the number of positions in a row.
    """

    def __init__(self, first: Tensor, length: int) -> None:
        positions = torch.arange(length, device=first.device)
        self.roll_index = (positions + first[:, None]) % length  # [b, n]
        self.unroll_index = (positions - first[:, None]) % length  # [b, n]

    def roll(self, tensor: Tensor, axis: int) -> Tensor:
        """Roll the rows of a tensor [b, ..., n, ...] along an axis."""
        return _gather_along_axis(tensor, axis, self.roll_index)

    def unroll(self, tensor: Tensor, axis: int) -> Tensor:
        """Roll the rows of a tensor [b, ..., n, ...] back to their original positions."""
        return _gather_along_axis(tensor, axis, self.unroll_index)

    def unroll_weights(self, weights: Tensor) -> Tensor:
        """Roll attention weights [b, h, n, m] back to the original positions of queries and keys.

        The last n keys are tokens. Summaries, which precede them, and compressed keys are not moved.
        """
        weights, length = self.unroll(weights, 2), self.unroll_index.shape[1]
        num_summaries = weights.shape[3] - length  # number of summaries
        if num_summaries < 0:  # compressed keys are not tokens and start at the beginning of the text
            return weights
        return torch.cat([weights[..., :num_summaries], self.unroll(weights[..., num_summaries:], 3)], 3)


def _gather_along_axis(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    shape = [1] * tensor.dim()
    shape[0], shape[axis] = index.shape
    sizes = [*tensor.shape[:axis], index.shape[1], *tensor.shape[axis + 1 :]]
    sizes[0] = max(tensor.shape[0], index.shape[0])
    return tensor.expand(sizes[0], *tensor.shape[1:]).gather(axis, index.view(shape).expand(sizes))


def get_row_roller(module: VariantAttention, mask: Tensor | None, length: int) -> RowRoller | None:
    """Return a `RowRoller` for the rows of an encoder call, or None if no row needs to be moved.

    Args:
        module: the attention module.
        mask: see `attention_with_weights`. A mask that differs between queries is not used to find padding.
        length: n, the number of queries and of keys.
    """
    if module.padding_rule != ROLL_ROWS or not is_boolean_key_mask(mask):
        return None
    first, _ = find_text_spans(mask[:, 0, 0])
    return RowRoller(first, length) if is_traced() or first.any() else None


def roll_padded_rows(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function so that it rolls left-padded rows if the attention module depends on positions.

    The wrapped function has the same signature as the attention functions in Transformers.
    """

    @wraps(attend)
    def forward(
        module: VariantAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rule, rows = getattr(module, "padding_rule", KEEP_ROWS), None
        if rule != KEEP_ROWS and is_boolean_key_mask(attention_mask):
            key_length = key.shape[2]
            if rule == BY_PATTERN:
                kwargs["key_range"] = module.key_range.adapt_to_padded_rows(attention_mask[..., -key_length:])
            else:
                rows = get_row_roller(module, attention_mask[..., -key_length:], key_length)
        # If an encoder has prefix keys, a later function raises an error.
        if rows is None or attention_mask is None or query.shape[2] != key.shape[2]:
            return attend(module, query, key, value, attention_mask, *args, **kwargs)
        is_shared = value is key  # True for a latent
        query, key = rows.roll(query, 2), rows.roll(key, 2)
        value = key if is_shared else rows.roll(value, 2)
        if kwargs.get("global_attention_mask") is not None:
            kwargs["global_attention_mask"] = rows.roll(kwargs["global_attention_mask"], 1)
        mask = rows.roll(attention_mask[..., :1, :], 3)
        output, weights = attend(module, query, key, value, mask, *args, **kwargs)
        return rows.unroll(output, 1), None if weights is None else rows.unroll_weights(weights)

    return forward


def is_boolean_key_mask(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Return True if a mask is boolean and the same for all queries, such as [b, 1, 1, m]."""
    return mask is not None and mask.dtype == torch.bool and (mask.shape[-2] == 1 or mask.stride(-2) == 0)


def find_text_spans(is_token: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of the first token in each row, and the number of positions up to the last token, both [b].

    Args:
        is_token: a mask [b, m] that is True for tokens and False for padding. A row without tokens is treated
            as a row without padding.
    """
    first = is_token.int().argmax(1)
    return first, is_token.shape[1] - is_token.flip(1).int().argmax(1) - first
