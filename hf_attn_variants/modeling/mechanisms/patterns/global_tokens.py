"""Global tokens anywhere in a text, by `global_attention_mask` (Longformer's name): in front of it once more.

Blocks know global tokens by their place, the first ones. So queries, keys and values of the marked tokens are put in
front of all others; where they stood, no key is read, and outputs are replaced by those of the front. Distances among
the others stay. Letters as in `softmax_attention`; G the most global tokens of a row.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...ops.reach import Reach
from ...ops.variant_attention import VariantAttention

__all__ = ["MASK", "check_global_mask", "global_tokens_of", "with_global_tokens_first"]

MASK = "global_attention_mask"


def check_global_mask(module: VariantAttention, states: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Check the `global_attention_mask` of a call, if it has one.

    Args:
        module: the attention.
        states: the inputs of its queries [b, n, size].
        kwargs: the call's arguments.

    Raises:
        ValueError: if its shape is not that of the tokens, or the attention has a bias by distance.
    """
    mask = kwargs.get(MASK)
    if mask is None:
        return
    if module.reach is None or module.reach.is_causal:  # a decoder's attentions, which have no global tokens
        return
    if hasattr(module, "has_relative_attention_bias"):
        raise ValueError(f"`{MASK}` is for models without a bias by distance: use `encoder_num_global_tokens`.")
    if mask.shape != states.shape[:2]:
        raise ValueError(
            f"`{MASK}` must have a number for each token, {list(states.shape[:2])}; got {list(mask.shape)}."
        )


def global_tokens_of(reach: Reach | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return which tokens of a call are global, [b, n], by its mask and as the first ones; None without a mask."""
    mask = kwargs.get(MASK)
    if mask is None or reach is None or reach.is_causal:
        return None
    return mask.bool() | (torch.arange(mask.shape[1], device=mask.device) < reach.global_tokens)


def with_global_tokens_first(
    attend: Callable[..., torch.Tensor],
    reach: Reach,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    is_global: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs [b, n, h_v, d_v] of attention in windows whose global tokens are anywhere.

    Args:
        attend: a function of query, key, value, mask and, by name, reach.
        reach: of the attention.
        states: query [b, h_k, n, d], key [b, k, n, d] and value.
        mask: boolean, of keys alone [b, 1, 1 or n, n].
        is_global: [b, n].
    """
    most = int(is_global.sum(1).max())
    order = is_global.int().argsort(dim=1, descending=True, stable=True)[:, :most]  # [b, G], in the text's order

    def in_front(tensor: torch.Tensor) -> torch.Tensor:
        index = order[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
        return torch.cat([tensor.gather(2, index), tensor], 2)

    read = torch.ones_like(is_global) if mask is None else mask[:, 0, 0].expand(is_global.shape)
    read = torch.cat([(is_global & read).gather(1, order), read & ~is_global], 1)
    reach = reach._replace(global_tokens=most)
    output = attend(*map(in_front, states), read[:, None, None], reach=reach)
    front, output = output[:, :most], output[:, most:]
    if most == 0:
        return output
    place = (is_global.cumsum(1) - 1).clamp(min=0)[:, :, None, None].expand(output.shape)
    return torch.where(is_global[:, :, None, None], front.gather(1, place), output)
