"""The attention functions that this package registers with Transformers' attention interface.

A module without a mechanism other than grouped heads (`is_plain`) is computed here. All others go to
`mechanism_attention`.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..ops.softmax_attention import attention_with_weights, fused_attention
from ..ops.variant_attention import VariantAttention, call_options, wants_weights
from ..upstream import known_imports, refuse_unknown
from ..upstream_checks import check_mask_functions
from ..variant_names import EAGER, SDPA
from .attention_masks import mask_of_padding
from .mechanism_attention import attend_with_mechanisms

with known_imports():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["attention_function", "eager_attention_forward", "sdpa_attention_forward"]

AttentionResult = tuple[torch.Tensor, torch.Tensor | None]


def eager_attention_forward(
    module: VariantAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> AttentionResult:
    """Attention that computes its weights ("eager").

    Args:
        module: the attention module.
        query: [b, h_k, n, d].
        key: [b, k, m, d].
        value: [b, k, m, d_v].
        attention_mask: as in `attention_with_weights`.
        scaling: the factor of the dot products; None = d^-1/2.
        dropout: the probability that a weight is dropped.
        is_causal: whether query i reads keys 0 to i only; None = as the module does.
        position_bias: added to the logits, broadcastable to [b, h, n, m].
        kwargs: further arguments of the call.

    Returns:
        The outputs [b, n, h_v, d_v] and the weights [b, h_v, n, m].

    Raises:
        ValueError: if the call has an argument that would be ignored.
    """
    if not getattr(module, "is_plain", False):
        call = (query, key, value, attention_mask, scaling, dropout, is_causal, position_bias)
        return attend_with_mechanisms("eager", module, *call, **kwargs)
    refuse_unknown(kwargs)
    options = call_options(module, query, attention_mask, scaling, dropout, is_causal)
    return attention_with_weights(query, key, value, attention_mask, position_bias, **options)


def sdpa_attention_forward(
    module: VariantAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> AttentionResult:
    """Attention by the fused kernels of torch ("sdpa"); arguments and results as for `eager_attention_forward`.

    The weights are None unless the call asks for them.
    """
    if not getattr(module, "is_plain", False):
        call = (query, key, value, attention_mask, scaling, dropout, is_causal, position_bias)
        return attend_with_mechanisms("sdpa", module, *call, **kwargs)
    refuse_unknown(kwargs)
    options = call_options(module, query, attention_mask, scaling, dropout, is_causal)
    if wants_weights(module, kwargs):
        return attention_with_weights(query, key, value, attention_mask, position_bias, **options)
    return fused_attention(query, key, value, attention_mask, position_bias, **options), None


def attention_function(name: str) -> Callable[..., AttentionResult]:
    """Return the attention function that is registered under a name."""
    own = OWN_FUNCTIONS.get(name)  # a dictionary is faster than the interface, in each layer and step
    return own if own is not None else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)


OWN_FUNCTIONS: dict[str, Callable[..., Any]] = {EAGER: eager_attention_forward, SDPA: sdpa_attention_forward}
for _name, _function in OWN_FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
check_mask_functions(eager_mask, sdpa_mask)
# Without a mask function of the same name Transformers would pass no mask, and padding would be ignored.
AttentionMaskInterface.register(EAGER, mask_of_padding(eager_mask))
AttentionMaskInterface.register(SDPA, mask_of_padding(sdpa_mask))
