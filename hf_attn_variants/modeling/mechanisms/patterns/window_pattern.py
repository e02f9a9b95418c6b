"""Sliding windows and global tokens (Longformer, arXiv 2004.05150, section 3.1).

Each token attends to the tokens in a window around it. The first `num_global_tokens` tokens attend to all tokens, and
all tokens attend to them. As in Longformer, a `global_attention_mask` can select global tokens at any position.

Blocked attention expects global tokens at the first positions. The queries, keys and values of the selected tokens are
therefore copied to the front. The original keys are masked, and the original outputs are replaced with those of the
copies. The distances between other tokens do not change. The symbols are defined in `softmax_attention`. G is the
largest number of global tokens in any row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.key_ranges import KeyRange
from ...ops.variant_attention import VariantAttention
from .attention_pattern import AttentionPattern

__all__ = [
    "GLOBAL_MASK_ARGUMENT",
    "SlidingWindowPattern",
    "attend_with_global_tokens_first",
    "check_global_mask",
    "get_global_token_mask",
]


class SlidingWindowPattern(AttentionPattern):
    """A pattern with a window around each token. A causal window contains the token and the tokens before it."""

    name = "sliding_window"
    paper = ("Longformer: sliding windows and global tokens", "2004.05150")
    needed = ("attention_window",)
    optional = ("attention_dilation", "num_global_tokens")
    depends_on_positions = False

    @classmethod
    def get_key_range(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> KeyRange:
        """Return the window as a key range. See `AttentionPattern.get_key_range` for the arguments."""
        window = config.get_layer_value(f"{prefix}attention_window", layer)
        dilation = getattr(config, f"{prefix}attention_dilation")
        global_tokens = getattr(config, f"{prefix}num_global_tokens")
        return KeyRange.from_window(window, dilation, global_tokens, is_causal)


GLOBAL_MASK_ARGUMENT = "global_attention_mask"


def check_global_mask(module: VariantAttention, states: Tensor, kwargs: dict[str, Any]) -> None:
    """Check the `global_attention_mask` of a call, if it has one.

    Args:
        module: the attention module.
        states: the inputs of the query projection [b, n, size].
        kwargs: the arguments of the call.

    Raises:
        ValueError: if the shape of the mask is not [b, n], or if the attention module has a relative position bias.
    """
    mask = kwargs.get(GLOBAL_MASK_ARGUMENT)
    if mask is None:
        return
    if module.key_range is None or module.key_range.is_causal:  # such modules have no global tokens
        return
    if hasattr(module, "has_relative_attention_bias"):
        raise ValueError(
            f"`{GLOBAL_MASK_ARGUMENT}` is not supported for models with a relative position bias. Use "
            "`encoder_num_global_tokens`."
        )
    if mask.shape != states.shape[:2]:
        raise ValueError(
            f"`{GLOBAL_MASK_ARGUMENT}` must have one value per token, {list(states.shape[:2])}, got the shape "
            f"{list(mask.shape)}."
        )


def get_global_token_mask(key_range: KeyRange | None, kwargs: dict[str, Any]) -> Tensor | None:
    """Return a boolean mask [b, n] of the global tokens, or None if there is no `global_attention_mask`."""
    mask = kwargs.get(GLOBAL_MASK_ARGUMENT)
    if mask is None or key_range is None or key_range.is_causal:
        return None
    return mask.bool() | (torch.arange(mask.shape[1], device=mask.device) < key_range.global_tokens)


def attend_with_global_tokens_first(
    attend: Callable[..., Tensor],
    key_range: KeyRange,
    query_key_value: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_global: Tensor,
) -> Tensor:
    """Return the outputs [b, n, h_v, d_v] of windowed attention with global tokens at any position.

    Args:
        attend: an attention function that takes query, key, value, mask and the keyword argument `key_range`.
        key_range: the key range of the attention module.
        query_key_value: the queries [b, h_k, n, d], the keys [b, k, n, d] and the values.
        mask: a boolean mask of the keys, [b, 1, 1 or n, n], or None.
        is_global: a boolean mask [b, n] of the global tokens.
    """
    max_global_tokens = int(is_global.sum(1).max())
    order = is_global.int().argsort(dim=1, descending=True, stable=True)[
        :, :max_global_tokens
    ]  # [b, G], in the order of the text

    def move_to_front(tensor: Tensor) -> Tensor:
        index = order[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
        return torch.cat([tensor.gather(2, index), tensor], 2)

    key_mask = torch.ones_like(is_global) if mask is None else mask[:, 0, 0].expand(is_global.shape)
    key_mask = torch.cat([(is_global & key_mask).gather(1, order), key_mask & ~is_global], 1)
    key_range = key_range._replace(global_tokens=max_global_tokens)
    output = attend(*map(move_to_front, query_key_value), key_mask[:, None, None], key_range=key_range)
    global_output, output = output[:, :max_global_tokens], output[:, max_global_tokens:]
    if max_global_tokens == 0:
        return output
    place = (is_global.cumsum(1) - 1).clamp(min=0)[:, :, None, None].expand(output.shape)
    return torch.where(is_global[:, :, None, None], global_output.gather(1, place), output)
