"""Attention functions and mask functions that this package registers with Transformers.

This file handles calls from plain attention modules (`is_plain`), whose attention function only needs to support
grouped heads. Latents, output gates, knocking heads and DEX act before or after the attention function, so a plain
module may have them. `mechanism_attention` handles the calls from all other modules.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..fields.mechanism_fields import needs_only_padding_mask
from ..ops.softmax_attention import attention_with_weights, fused_attention
from ..ops.variant_attention import VariantAttention, get_attention_kwargs, is_traced, should_return_weights
from ..transformers_internals import check_mask_function, guarded_imports
from ..variant_names import EAGER, SDPA, includes
from .mechanism_attention import attend_with_mechanisms

with guarded_imports():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["eager_attention_forward", "get_attention_function", "limit_masks_to_padding", "sdpa_attention_forward"]


def limit_masks_to_padding(mask_function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wrap a mask function so that, in models with a pattern or a kernel, masks only cover padding.

    In all other cases, the Transformers mask function is called. A padding mask has the shape [b, 1, 1, m]. The
    attention modules then handle causality and windows themselves, because a mask [n, m] would be larger than all of
    their other tensors. In a decoder, the mask covers all tokens seen so far, even if a layer's cache stores fewer.
    """
    check_mask_function(mask_function)

    def create_padding_mask(**options: Any) -> Tensor | None:
        function, padding = options.get("mask_function", causal_mask_function), options.get("attention_mask")
        is_causal = function is causal_mask_function
        if function not in (causal_mask_function, bidirectional_mask_function):
            return mask_function(**options)
        if not needs_only_padding_mask(options.get("config"), True if is_causal else None):
            return mask_function(**options)
        if padding is None:
            return None
        # Bidirectional attention only reads the keys of this call, and the padding mask may be longer or shorter.
        if not is_causal:
            length, offset = options["kv_length"], options.get("kv_offset", 0)
            missing = max(0, length + offset - padding.shape[1])
            padding = nn.functional.pad(padding, (0, missing))[:, offset : offset + length]
        return None if not is_traced() and padding.all() else padding.bool()[:, None, None]

    return create_padding_mask


AttentionResult = tuple[Tensor, Tensor | None]


def eager_attention_forward(
    module: VariantAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> AttentionResult:
    """Compute attention with explicit weights ("eager").

    Args:
        module: the attention module.
        query: [b, h_k, n, d].
        key: [b, k, m, d].
        value: [b, k, m, d_v].
        attention_mask: see `attention_with_weights`.
        kwargs: the optional arguments `scaling` (the factor by which the dot products are multiplied, default:
            d^-1/2), `dropout` (a probability, default: 0), `is_causal` (if True, query i only attends to keys 0 to i;
            default: the module's own setting), `position_bias` (a bias that is added to the logits, broadcastable to
            [b, h, n, m]), and additional arguments of the call.

    Returns:
        The outputs [b, n, h_v, d_v] and the weights [b, h_v, n, m].

    Raises:
        ValueError: if an unknown argument is not None, because it would be ignored.
    """
    if not getattr(module, "is_plain", False):
        return attend_with_mechanisms("eager", module, query, key, value, attention_mask, **kwargs)
    options = get_attention_kwargs(module, query, attention_mask, kwargs)
    return attention_with_weights(query, key, value, attention_mask, **options)


def sdpa_attention_forward(
    module: VariantAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> AttentionResult:
    """Compute attention with torch's fused kernels ("sdpa").

    The arguments and results are the same as in `eager_attention_forward`, but the weights are None unless they are
    requested.
    """
    if not getattr(module, "is_plain", False):
        return attend_with_mechanisms("sdpa", module, query, key, value, attention_mask, **kwargs)
    options = get_attention_kwargs(module, query, attention_mask, kwargs)
    if should_return_weights(module, kwargs):
        return attention_with_weights(query, key, value, attention_mask, **options)
    return fused_attention(query, key, value, attention_mask, **options), None


def get_attention_function(name: str) -> Callable[..., AttentionResult]:
    """Return the attention function that is registered under a name."""
    # This runs in every layer and decoding step, and looking up a dictionary is faster than calling the interface.
    function = ATTENTION_FUNCTIONS.get(name)
    return function if function is not None else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)


ATTENTION_FUNCTIONS: dict[str, Callable[..., Any]] = {EAGER: eager_attention_forward, SDPA: sdpa_attention_forward}
_MASK_FUNCTIONS: dict[str, Callable[..., Any]] = {EAGER: eager_mask, SDPA: sdpa_mask}
for _name, _mask in _MASK_FUNCTIONS.items():
    AttentionInterface.register(_name, ATTENTION_FUNCTIONS[_name])
    # Without a mask function of the same name, Transformers would not pass a mask, and padding would be ignored.
    _has_padding_masks = includes("linear_attention", "patterns")
    AttentionMaskInterface.register(_name, limit_masks_to_padding(_mask) if _has_padding_masks else _mask)
