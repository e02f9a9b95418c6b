"""The maths: attention with shared key/value heads and talking heads, and its place behind upstream's interface.

Letters used throughout: b batch, n query length, m memory (key/value) length, d head size, h_k heads of the queries,
h heads of the softmax, h_v heads of the values, k key/value heads, g = h_k / k query heads a group. Query head i reads
key/value head i // g. Multi-query attention (arXiv 1911.02150) is k = 1; grouped-query attention (2305.13245) is
1 < k < h_k; talking heads are 2003.02436. Where queries have B times as many batch rows as keys and values, the B
beams of a sentence follow each other and read one memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .attention_sites import VariantAttention
from .flex_windows import attention_in_windows
from .global_tokens import global_tokens_of, with_global_tokens_first
from .linear_attention import kernel_attention_forward
from .memory_compression import compressing
from .padded_rows import from_first_token
from .query_folding import QueryFold, beams_of, is_exporting, repeated_for_beams
from .scattered_attention import attend_in_blocks, gathers
from .sliding_window_attention import as_full_attention, fills_blocks, mask_of_padding
from .talking_heads import check_mask, talking_heads_attention
from .upstream import known_imports, refuse_unknown
from .upstream_checks import check_mask_functions
from .variant_names import EAGER, SDPA

with known_imports():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = [
    "attention_function",
    "attention_with_weights",
    "eager_attention_forward",
    "fused_attention",
    "implementation_of",
    "wants_weights",
]

# From this batch size on, one new token's attention is faster on the CPU as two batched matmuls than by the fused
# kernel (measured on random heads: mostly 1.0 to 1.3 times, 1.5 to 4 on short memories; below it one call wins).
MATMUL_BATCH_SIZE = 8
# Of the flash kernels on CUDA.
MAX_FLASH_HEAD_DIM = 256


def attention_with_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
    logits_proj: torch.Tensor | None = None,
    weights_proj: torch.Tensor | None = None,
    x2l: torch.Tensor | None = None,
    m2l: torch.Tensor | None = None,
    x2w: torch.Tensor | None = None,
    m2w: torch.Tensor | None = None,
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that materialises its weights: multi-head, multi-query, grouped-query and talking-heads alike.

    Args:
        query: [b, h_k, n, d]; with no talking heads also [b B, h_k, n, d], B beams of each memory
        key: [b, k, m, d]
        value: [b, k, m, d]; or [b, h_v, m, d] where each query head has its own key head
        mask: boolean (True = attend) or additive, broadcastable to [b, h, n, m]. A query that may attend to nothing
            gets zeros under a boolean mask and under minus infinities (without `is_causal`), uniform weights under
            finite numbers (upstream's own masks).
        position_bias: added to the logits of the softmax heads, broadcastable to [b, h, n, m]
        scaling: the factor of the dot products
        is_causal: query i attends to keys 0..i
        dropout: the probability that a weight is dropped
        logits_proj: P_l [h_k, h], mixes the heads before the softmax (arXiv 2003.02436, section 3)
        weights_proj: P_w [h, h_v], mixes them after it
        x2l, m2l: input-dependent terms of P_l, [b, n, h_k, h] and [b, m, h_k, h] (2003.02436, section 5)
        x2w, m2w: input-dependent terms of P_w, [b, n, h, h_v] and [b, m, h, h_v]
        score: makes the logits of queries and keys in place of the dot product (`AdditiveScore`)

    Returns:
        The outputs [b, n, h_v, d] and the weights that multiply the values [b, h_v, n, m].

    Raises:
        ValueError: for a mask of whole numbers.
    """
    check_mask(mask)
    if (beams := beams_of(query, key)) > 1:
        if logits_proj is None and weights_proj is None and score is None:
            return _attend_in_beams(query, key, value, mask, position_bias, scaling, is_causal, dropout)
        key, value = (states.repeat_interleave(beams, dim=0) for states in (key, value))
        mask = repeated_for_beams(mask, query.shape[0])
    logits = _grouped_matmul(query * scaling, key.transpose(-1, -2)) if score is None else score(query, key)
    logits = _mix_heads(logits, logits_proj, x2l, m2l)  # [b, h, n, m]
    if position_bias is not None:
        logits = logits + position_bias
    if is_causal:
        mask = _with_causal_mask(mask, logits.shape[-2], logits.shape[-1], logits.device)
    weights = _masked_softmax(logits, mask).to(value.dtype)
    weights = _mix_heads(weights, weights_proj, x2w, m2w)  # [b, h_v, n, m]
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    return _grouped_matmul(weights, value).transpose(1, 2), weights


def _attend_in_beams(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    scaling: float,
    is_causal: bool,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    fold = QueryFold(query, key, beams_of(query, key))
    if is_causal:
        mask = _with_causal_mask(mask, query.shape[2], key.shape[2], query.device)
    mask, position_bias = fold.mask(mask), fold.mask(position_bias)
    output, weights = attention_with_weights(
        fold.rows(query), key, value, mask, position_bias, scaling=scaling, dropout=dropout
    )
    return fold.unfolded(output.transpose(1, 2)), fold.unfolded(weights).transpose(1, 2)


def _masked_softmax(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    # Half precision would lose the small weights, so the softmax runs in at least float32, as fused kernels do.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if mask is None:
        return nn.functional.softmax(logits, dim=-1, dtype=dtype)
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        return nn.functional.softmax(logits, dim=-1, dtype=dtype) * mask.any(-1, keepdim=True)
    # Zeros, and no NaN, in a row of minus infinities.
    return torch.ops.aten._safe_softmax(logits + mask, -1, dtype)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Multi-head, multi-query or grouped-query attention by torch's fused kernels, K and V repeated only where needed.

    Arguments and result are those of `attention_with_weights`, without talking heads and without the weights.
    """
    check_mask(mask)
    length, kv_heads, memories = query.shape[2], key.shape[1], key.shape[0]
    beams = beams_of(query, key)
    shared = beams * (query.shape[1] // kv_heads)  # query heads that read one key/value head
    on_cpu, exporting = query.device.type == "cpu", is_exporting()
    # Of a latent, which is key and value at once, the fused kernel reads each block once, with a thread a memory.
    # An exported graph must serve every batch size: it may not depend on one.
    by_matmul = length == 1 and on_cpu and not exporting and memories >= MATMUL_BATCH_SIZE
    if by_matmul and not (key is value and memories >= _threads()):
        options: dict[str, Any] = {"scaling": scaling, "is_causal": is_causal, "dropout": dropout}
        return attention_with_weights(query, key, value, mask, position_bias, **options)[0]
    if is_causal and mask is not None:
        mask, is_causal = _with_causal_mask(mask, length, key.shape[2], query.device), False
    if is_causal and key.shape[2] > length:
        # A static cache beyond the prompt: torch aligns its causal mask to the first key and masks the rest anyway.
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = position_bias[..., :length] if position_bias is not None else None
    if position_bias is not None:
        mask, is_causal = _biased_mask(position_bias, mask, is_causal, query), False
    # A bool where sizes are symbols, too, as in an exported step of a decoder.
    enable_gqa = bool(shared > 1) and (on_cpu or (mask is None and _flash_serves(query)))
    # Few queries are the rows of one attention over what they share; many would need a mask with a row for each.
    fold = None
    if shared > 1 and (length == 1 or beams > 1 or not (enable_gqa or length > query.shape[-1])):
        mask = _causal_mask(length, length, query.device) if is_causal else mask
        fold, is_causal, enable_gqa = QueryFold(query, key, beams), False, False
        query, mask = fold.rows(query), fold.mask(mask)
    elif shared > 1 and not enable_gqa:
        key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=enable_gqa
    )
    return output.transpose(1, 2) if fold is None else fold.unfolded(output)


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_with_weights` behind upstream's attention interface ("eager")."""
    refuse_unknown(kwargs)
    if module.kernel is not None:
        call = (module, query, key, value, attention_mask, scaling, wants_weights(module, kwargs))
        return kernel_attention_forward(*call, kwargs | {"position_bias": position_bias})
    if (reach := kwargs.get("reach", module.reach)) is not None:  # of rows with padding it may be another
        told = (reach, query, key, attention_mask, position_bias, global_tokens_of(reach, kwargs))
        attention_mask, position_bias = as_full_attention(*told)
    options = _options(module, query, attention_mask, scaling, dropout, is_causal)
    options |= _projections(module) | {name: kwargs.get(name) for name in ("x2l", "m2l", "x2w", "m2w")}
    options["score"] = module.score
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fastest exact path behind upstream's attention interface ("sdpa").

    Talking heads, and windows in a longer text, go to `talking_heads_attention`, in memory linear in n and m; where
    the weights are asked for, scores are no dot products, the projections depend on the input, the mask is trained or
    there is one query only, to `attention_with_weights`.
    """
    refuse_unknown(kwargs)
    asked = wants_weights(module, kwargs)
    if module.kernel is not None:
        call = (module, query, key, value, attention_mask, scaling, asked)
        return kernel_attention_forward(*call, kwargs | {"position_bias": position_bias})
    with_weights = asked or module.score is not None
    talking_heads, reach = bool(module.projection_names), kwargs.get("reach", module.reach)
    in_blocks = reach is not None and not with_weights and fills_blocks(reach, query, key, attention_mask)
    is_global = global_tokens_of(reach, kwargs)
    if not asked and is_global is None and gathers(reach, query, key, attention_mask):
        options = _options(module, query, None, scaling, dropout, False)
        attend: Callable[..., Any] = partial(fused_attention, **options)
        if talking_heads or with_weights:
            attend = partial(attention_with_weights, **options, **_projections(module), score=module.score)
        return attend_in_blocks(attend, reach, (query, key, value), attention_mask, position_bias), None
    if with_weights or (talking_heads and not in_blocks and _needs_weights(module, query, attention_mask)):
        output, weights = eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, position_bias, **kwargs
        )
        return output, weights if asked else None
    if reach is not None and not in_blocks:
        told = (reach, query, key, attention_mask, position_bias, is_global)
        attention_mask, position_bias = as_full_attention(*told)
    options = _options(module, query, attention_mask, scaling, dropout, is_causal)
    if talking_heads or in_blocks:
        options |= _projections(module)
        if not in_blocks:
            return talking_heads_attention(query, key, value, attention_mask, position_bias, **options), None
        options |= {"is_causal": False, "position_bias": position_bias}  # the reach says what is causal
        if is_global is None:
            return attention_in_windows(query, key, value, attention_mask, reach=reach, **options), None
        attend = partial(attention_in_windows, **options)
        return with_global_tokens_first(attend, reach, (query, key, value), attention_mask, is_global), None
    return fused_attention(query, key, value, attention_mask, position_bias, **options), None


def _projections(module: VariantAttention) -> dict[str, Any]:
    return {name: getattr(module, name, None) for name in ("logits_proj", "weights_proj")}


def wants_weights(module: VariantAttention, kwargs: dict[str, Any]) -> bool:
    """Say whether a call of `module` asks for its attention weights, by itself or by the configuration."""
    asked = kwargs.get("output_attentions")
    # The field behind the property, here and below: properties of a configuration cost microseconds a layer and step.
    return bool(module.config._output_attentions if asked is None else asked)


def implementation_of(module: VariantAttention) -> str:
    """Return the registered name of the attention implementation that `module` is configured for."""
    return module.config._attn_implementation_internal


def attention_function(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the attention function of a registered name; this package's own without a look-up upstream."""
    own = OWN_FUNCTIONS.get(name)
    return own if own is not None else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)


def _needs_weights(module: VariantAttention, query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    # One query's weights are small and made faster at once; our operator must not be in an exported graph, and gives a
    # mask no gradient.
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return True
    return query.shape[2] == 1 or bool(module.dynamic_names) or is_exporting()


def _options(
    module: VariantAttention,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
) -> dict[str, Any]:
    """Return how a call of upstream's interface is computed."""
    asked = getattr(module, "is_causal", False) if is_causal is None else is_causal
    return {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        # The mask, where there is one, says what is causal; a single query is the last token and sees the whole cache.
        "is_causal": query.shape[2] > 1 and mask is None and asked,
        "dropout": dropout,
    }


def _flash_serves(query: torch.Tensor) -> bool:
    # On CUDA its other fused kernels refuse grouped heads, which would leave the slow math kernel.
    halves = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= MAX_FLASH_HEAD_DIM
    return not query.is_cuda or (halves and _has_flash(query.device))


@torch.compiler.assume_constant_result
def _threads() -> int:
    return torch.get_num_threads()


@torch.compiler.assume_constant_result
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _with_causal_mask(
    mask: torch.Tensor | None, length: int, memory_length: int, device: torch.device
) -> torch.Tensor:
    causal = _causal_mask(length, memory_length, device)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, torch.finfo(mask.dtype).min)


def _causal_mask(length: int, memory_length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, memory_length, dtype=torch.bool, device=device).tril()  # [n, m]


def _biased_mask(
    position_bias: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor
) -> torch.Tensor:
    position_bias = position_bias.to(query.dtype)
    if is_causal:
        mask = _causal_mask(position_bias.shape[-2], position_bias.shape[-1], query.device)
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _grouped_matmul(states: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    # [b, h, n, x] by [b, k, x, y] to [b, h, n, y]: a group's heads stand below each other, none is repeated.
    batch, heads, length, _ = states.shape
    if heads == shared.shape[1]:
        return states @ shared
    return (states.reshape(batch, shared.shape[1], -1, states.shape[-1]) @ shared).view(batch, heads, length, -1)


def _mix_heads(
    heads: torch.Tensor, proj: torch.Tensor | None, by_query: torch.Tensor | None, by_memory: torch.Tensor | None
) -> torch.Tensor:
    # [b, i, n, m] by [i, j] (+ [b, n, i, j] + [b, m, i, j]) to [b, j, n, m]: one small matmul over all positions.
    if proj is None:
        return heads
    # The projections may be kept in float32 beside a model in half precision.
    mixed = (proj.to(heads.dtype).transpose(0, 1) @ heads.flatten(2)).unflatten(2, heads.shape[2:])
    if by_query is not None:
        mixed = mixed + torch.einsum("binm,bnij->bjnm", heads, by_query)
    if by_memory is not None:
        mixed = mixed + torch.einsum("binm,bmij->bjnm", heads, by_memory)
    return mixed


OWN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: from_first_token(compressing(function))
    for name, function in ((EAGER, eager_attention_forward), (SDPA, sdpa_attention_forward))
}
for _name, _function in OWN_FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
check_mask_functions(eager_mask, sdpa_mask)
# Without a mask function of the same name upstream would hand over no mask, and padding would be ignored.
AttentionMaskInterface.register(EAGER, mask_of_padding(eager_mask))
AttentionMaskInterface.register(SDPA, mask_of_padding(sdpa_mask))
