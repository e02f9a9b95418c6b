"""Rows of a batch whose text does not begin at their first place: what counts tokens counts from the first real one.

Blocks, global tokens, summaries, compressed keys and projections along the length have places in a text. A row that is
padded on the left is rolled, so that its text begins at place 0 and the padding stands behind it, and its outputs are
rolled back: so a row gives the same alone and in any batch. `BlockPattern`, which decoders have too, knows its rows'
first tokens itself. Letters as in `softmax_attention`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeGuard

import torch

from .query_folding import is_traced
from .variant_attention import VariantAttention

__all__ = ["RolledRows", "from_first_token", "is_of_keys", "rolled_rows", "settle_padding", "text_places"]

# What an attention does with rows that begin with padding: nothing, because it counts no tokens; it rolls the rows; or
# its pattern knows where each row begins.
NOTHING, ROLLED, BY_PATTERN = range(3)


def settle_padding(module: VariantAttention) -> None:
    """Note what an attention does with padded rows; its reach, compression and kernel are settled before."""
    reach, kernel = module.reach, module.kernel
    counts = reach is not None and reach.counts_tokens
    knows_rows = hasattr(reach, "of_rows")
    rolls = module.compression is not None or (kernel is not None and kernel.counts_tokens)
    rolls = rolls or (counts and not knows_rows)
    module.padding_rule = ROLLED if rolls else BY_PATTERN if counts else NOTHING


class RolledRows:
    """Rows whose text is moved to their beginning; what stood before it comes behind it.

    Args:
        first: the place of each row's first token, [b or 1].
        length: n, the places of a row.
    """

    def __init__(self, first: torch.Tensor, length: int) -> None:
        places = torch.arange(length, device=first.device)
        self.there, self.back = (places + first[:, None]) % length, (places - first[:, None]) % length  # [b, n]

    def rolled(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Return a tensor [b, ..., n, ...] with its rows moved along an axis."""
        return _taken(tensor, axis, self.there)

    def unrolled(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Return a tensor [b, ..., n, ...] of moved rows with these where they were."""
        return _taken(tensor, axis, self.back)

    def unrolled_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights [b, h, n, m] with queries where they were, and keys too: the last n, where there are n."""
        weights, length = self.unrolled(weights, 2), self.back.shape[1]
        before = weights.shape[3] - length  # summaries
        if before < 0:  # compressed keys are no tokens, and count from the text's beginning
            return weights
        return torch.cat([weights[..., :before], self.unrolled(weights[..., before:], 3)], 3)


def _taken(tensor: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    shape = [1] * tensor.dim()
    shape[0], shape[axis] = index.shape
    sizes = [*tensor.shape[:axis], index.shape[1], *tensor.shape[axis + 1 :]]
    sizes[0] = max(tensor.shape[0], index.shape[0])
    return tensor.expand(sizes[0], *tensor.shape[1:]).gather(axis, index.view(shape).expand(sizes))


def rolled_rows(module: VariantAttention, mask: torch.Tensor | None, length: int) -> RolledRows | None:
    """Return how to move the rows of an encoder's call; None: nothing has to be moved.

    Args:
        module: the attention.
        mask: as in `attention_with_weights`; one that is not of keys alone says nothing of padding.
        length: n, of queries and of keys.
    """
    if module.padding_rule != ROLLED or not is_of_keys(mask):
        return None
    first, _ = text_places(mask[:, 0, 0])
    return RolledRows(first, length) if is_traced() or first.any() else None


def from_first_token(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function behind upstream's interface that moves padded rows where a module counts tokens."""

    @wraps(attend)
    def forward(
        module: VariantAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rule, rows = getattr(module, "padding_rule", NOTHING), None
        if rule != NOTHING and is_of_keys(attention_mask):
            memory = key.shape[2]
            if rule == BY_PATTERN:
                kwargs["reach"] = module.reach.of_rows(attention_mask[..., -memory:])
            else:
                rows = rolled_rows(module, attention_mask[..., -memory:], memory)
        # A prefix before an encoder's tokens is refused.
        if rows is None or attention_mask is None or query.shape[2] != key.shape[2]:
            return attend(module, query, key, value, attention_mask, *args, **kwargs)
        is_shared = value is key  # a latent
        query, key = rows.rolled(query, 2), rows.rolled(key, 2)
        value = key if is_shared else rows.rolled(value, 2)
        if kwargs.get("global_attention_mask") is not None:
            kwargs["global_attention_mask"] = rows.rolled(kwargs["global_attention_mask"], 1)
        mask = rows.rolled(attention_mask[..., :1, :], 3)
        output, weights = attend(module, query, key, value, mask, *args, **kwargs)
        return rows.unrolled(output, 1), None if weights is None else rows.unrolled_weights(weights)

    return forward


def is_of_keys(mask: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Say whether there is a mask, boolean, and of keys alone: [b, 1, 1, m], or the same for all queries."""
    return mask is not None and mask.dtype == torch.bool and (mask.shape[-2] == 1 or mask.stride(-2) == 0)


def text_places(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each row's first token, and the tokens from it to the last one, [b].

    Args:
        real: where there is a token, [b, m]; a row without any is taken for one of tokens alone.
    """
    first = real.int().argmax(1)
    return first, real.shape[1] - real.flip(1).int().argmax(1) - first
