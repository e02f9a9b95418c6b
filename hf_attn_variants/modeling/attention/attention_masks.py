"""Mask functions that cover only padding if an attention applies its causal or window pattern itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..fields.kernel_fields import asks_for_padding_alone
from ..ops.query_folding import is_traced
from ..upstream import known_imports

with known_imports():
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

__all__ = ["mask_of_padding"]


def mask_of_padding(upstream: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """Return a mask function that covers only padding if the attention has a pattern or a kernel.

    In other cases, it calls the mask function of Transformers. A padding mask is [b, 1, 1, m]. The attention applies
    the causal rule and the window itself, because a mask [n, m] would be larger than all of its other tensors. The
    mask of a decoder covers all tokens seen, even if the cache of a layer stores fewer.
    """

    def mask(**options: Any) -> torch.Tensor | None:
        function, padding = options.get("mask_function", causal_mask_function), options.get("attention_mask")
        is_causal = function is causal_mask_function
        if function not in (causal_mask_function, bidirectional_mask_function):
            return upstream(**options)
        if not asks_for_padding_alone(options.get("config"), True if is_causal else None):
            return upstream(**options)
        if padding is None:
            return None
        if not is_causal:
            length, offset = options["kv_length"], options.get("kv_offset", 0)
            missing = max(0, length + offset - padding.shape[1])
            padding = nn.functional.pad(padding, (0, missing))[:, offset : offset + length]
        return None if not is_traced() and padding.all() else padding.bool()[:, None, None]

    return mask
