"""Softmax attention with shared key/value heads and talking-heads projections.

The modules in this package use the following symbols for tensor sizes:

    b       batch size
    n       query length
    m       key length
    d       size of a query or key head
    d_v     size of a value head (the same as d unless stated otherwise)
    h_k     number of query heads
    h       number of softmax heads
    h_v     number of value heads
    k       number of key/value heads
    g       number of query heads per group, h_k / k

Query head i attends to key/value head i // g. Multi-query attention (arXiv 1911.02150) has k = 1. Grouped-query
attention (arXiv 2305.13245) has 1 < k < h_k. Talking-heads attention is defined in arXiv 2003.02436.

If the queries have B times as many batch rows as the keys and values, they come from beam search with B beams per
sentence. The beams of a sentence are consecutive rows and share that sentence's keys and values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .beams import QueryFolder, count_beams, repeat_for_beams
from .latent_decoding import attend_to_one_latent, should_use_latent_kernels
from .variant_attention import check_mask, is_exporting

__all__ = ["attention_with_weights", "fused_attention", "masked_softmax"]

# From this batch size on, two batched matmuls are faster on the CPU than the fused kernel for a single query. On
# random heads, they are mostly 1.0 to 1.3 times as fast, and 1.5 to 4 times as fast if there are few keys. Below this
# batch size, the fused kernel is faster.
MATMUL_BATCH_SIZE = 8
# The largest head size that the CUDA flash-attention kernels support.
MAX_FLASH_HEAD_DIM = 256


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
    logits_proj: Tensor | None = None,
    weights_proj: Tensor | None = None,
    x2l: Tensor | None = None,
    m2l: Tensor | None = None,
    x2w: Tensor | None = None,
    m2w: Tensor | None = None,
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    normalize: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute multi-head, multi-query, grouped-query or talking-heads attention, and also return the weights.

    Args:
        query: [b, h_k, n, d], or [b B, h_k, n, d] with B beams per sentence.
        key: [b, k, m, d].
        value: [b, k, m, d_v], or [b, h_v, m, d_v] if each query head has its own key head.
        mask: a boolean mask (True = attend) or an additive mask, broadcastable to [b, h, n, m]. If a query has no
            allowed keys, its weights are zero if the mask is boolean. They are also zero if the mask contains minus
            infinity and `is_causal` is False. They are uniform if the mask contains finite numbers, as Transformers
            masks do.
        position_bias: a bias that is added to the logits of the softmax heads, broadcastable to [b, h, n, m].
        scaling: the factor by which the dot products are multiplied.
        is_causal: if True, query i only attends to keys 0 to i.
        dropout: the probability that a weight is dropped.
        logits_proj: P_l [h_k, h], which mixes the heads before the softmax (arXiv 2003.02436, section 3).
        weights_proj: P_w [h, h_v], which mixes the heads after the softmax.
        x2l, m2l: input-dependent terms of P_l, [b, n, h_k, h] and [b, m, h_k, h] (arXiv 2003.02436, section 5).
        x2w, m2w: input-dependent terms of P_w, [b, n, h, h_v] and [b, m, h, h_v].
        score: a function that computes the logits from queries and keys instead of the dot product (`ScoreFunction`).
        normalize: a function that computes the weights from the logits and the mask instead of `masked_softmax`.

    Returns:
        The outputs [b, n, h_v, d_v] and the weights that multiply the values, [b, h_v, n, m].

    Raises:
        ValueError: if the mask contains integers.
    """
    check_mask(mask)
    if count_beams(query, key) > 1:
        if logits_proj is None and weights_proj is None and score is None and normalize is None:
            return _attend_with_folded_beams(query, key, value, mask, position_bias, scaling, is_causal, dropout)
        key, value = (repeat_for_beams(states, query.shape[0]) for states in (key, value))
        if mask is not None and mask.dim() == 4 and mask.shape[0] not in (1, query.shape[0]):
            mask = repeat_for_beams(mask, query.shape[0])
    logits = _grouped_matmul(query * scaling, key.transpose(-1, -2)) if score is None else score(query, key)
    logits = _mix_heads(logits, logits_proj, x2l, m2l)  # [b, h, n, m]
    if position_bias is not None:
        logits = logits + position_bias
    if is_causal:
        mask = _add_causal_mask(mask, logits.shape[-2], logits.shape[-1], logits.device)
    weights = (normalize or masked_softmax)(logits, mask).to(value.dtype)
    weights = _mix_heads(weights, weights_proj, x2w, m2w)  # [b, h_v, n, m]
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    return _grouped_matmul(weights, value).transpose(1, 2), weights


def _attend_with_folded_beams(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    scaling: float,
    is_causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    fold = QueryFolder(query, key, count_beams(query, key))
    if is_causal:
        mask = _add_causal_mask(mask, query.shape[2], key.shape[2], query.device)
    mask, position_bias = fold.fold_mask(mask), fold.fold_mask(position_bias)
    output, weights = attention_with_weights(
        fold.fold_queries(query), key, value, mask, position_bias, scaling=scaling, dropout=dropout
    )
    return fold.unfold(output.transpose(1, 2)), fold.unfold(weights).transpose(1, 2)


def masked_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax of the logits [b, h, n, m] over the allowed keys (see `attention_with_weights`)."""
    # Small weights would be lost in half precision. As in the fused kernels, the softmax is therefore computed in at
    # least float32.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if mask is None:
        return nn.functional.softmax(logits, dim=-1, dtype=dtype)
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        return nn.functional.softmax(logits, dim=-1, dtype=dtype) * mask.any(-1, keepdim=True)
    # This operator returns zeros instead of NaN for a row of minus infinities.
    return torch.ops.aten._safe_softmax(logits + mask, -1, dtype)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Compute multi-head, multi-query or grouped-query attention with the fused kernels in torch.

    Keys and values are only repeated if the kernel does not support grouped heads. Only the outputs [b, n, h, d_v] are
    returned. See `attention_with_weights` for the arguments.
    """
    check_mask(mask)
    length, kv_heads, sentences = query.shape[2], key.shape[1], key.shape[0]
    beams = count_beams(query, key)
    shared = beams * (query.shape[1] // kv_heads)  # query rows that share one key/value head
    on_cpu, is_export = query.device.type == "cpu", is_exporting()
    # If the keys and values are the same latent, the fused kernel reads each block only once, with one thread per
    # batch row. An exported graph must support every batch size and therefore cannot depend on it.
    uses_matmul = length == 1 and on_cpu and not is_export and sentences >= MATMUL_BATCH_SIZE
    if uses_matmul and not (key is value and sentences >= _get_num_threads()):
        options: dict[str, Any] = {"scaling": scaling, "is_causal": is_causal, "dropout": dropout}
        return attention_with_weights(query, key, value, mask, position_bias, **options)[0]
    if is_causal and mask is not None:
        mask, is_causal = _add_causal_mask(mask, length, key.shape[2], query.device), False
    if is_causal and key.shape[2] > length:
        # A static cache is longer than the prompt, but torch aligns its causal mask with the first key.
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = position_bias[..., :length] if position_bias is not None else None
    if position_bias is not None:
        mask, is_causal = _combine_bias_and_mask(position_bias, mask, is_causal, query), False
    # In a compiled step, sizes can be symbolic. An `if` statement turns a comparison of them into a bool.
    enable_gqa = False
    if shared > 1 and (on_cpu or (mask is None and _supports_flash_kernels(query, value))):
        enable_gqa = True
    # A few queries are folded into rows that share a key head. For many queries, the folded mask would be too large.
    fold = None
    if shared > 1 and (length == 1 or beams > 1 or not (enable_gqa or length > query.shape[-1])):
        mask = _create_causal_mask(length, length, query.device) if is_causal else mask
        fold, is_causal, enable_gqa = QueryFolder(query, key, beams), False, False
        query, mask = fold.fold_queries(query), fold.fold_mask(mask)
    elif shared > 1 and not enable_gqa:
        key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
    if fold is not None and key is value and kv_heads == 1 and should_use_latent_kernels(query, key, mask, dropout):
        return fold.unfold(attend_to_one_latent(query, key, mask, scaling=scaling))
    size = value.shape[-1]
    widens = size != query.shape[-1] and on_cpu and length > 1 and not is_export
    if widens:
        # On a CPU, torch materializes all weights if the head sizes of keys and values differ. Padding the heads with
        # zeros does not change the products.
        query, key, value = _pad_to_common_size(query, key, value)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=enable_gqa
    )
    output = output[..., :size] if widens else output
    return output.transpose(1, 2) if fold is None else fold.unfold(output)


def _pad_to_common_size(*heads: Tensor) -> list[Tensor]:
    size = max(states.shape[-1] for states in heads)
    return [nn.functional.pad(states, (0, size - states.shape[-1])) for states in heads]


def _supports_flash_kernels(query: Tensor, value: Tensor) -> bool:
    # The other fused CUDA kernels do not support grouped heads. Without the flash kernels, torch would use the slow
    # math kernel.
    size = query.shape[-1]
    is_half_precision = (
        query.dtype in (torch.float16, torch.bfloat16) and size == value.shape[-1] <= MAX_FLASH_HEAD_DIM
    )
    return not query.is_cuda or (is_half_precision and _has_flash_kernels(query.device))


@torch.compiler.assume_constant_result
def _get_num_threads() -> int:
    return torch.get_num_threads()


@torch.compiler.assume_constant_result
def _has_flash_kernels(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _add_causal_mask(mask: Tensor | None, length: int, key_length: int, device: torch.device) -> Tensor:
    causal = _create_causal_mask(length, key_length, device)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, torch.finfo(mask.dtype).min)


def _create_causal_mask(length: int, key_length: int, device: torch.device) -> Tensor:
    return torch.ones(length, key_length, dtype=torch.bool, device=device).tril()  # [n, m]


def _combine_bias_and_mask(position_bias: Tensor, mask: Tensor | None, is_causal: bool, query: Tensor) -> Tensor:
    position_bias = position_bias.to(query.dtype)
    if is_causal:
        mask = _create_causal_mask(position_bias.shape[-2], position_bias.shape[-1], query.device)
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _grouped_matmul(states: Tensor, shared: Tensor) -> Tensor:
    # Multiply [b, h, n, x] by [b, k, x, y] to get [b, h, n, y]. The heads in a group are stacked as rows, so that
    # key/value heads do not have to be repeated.
    batch, heads, length, _ = states.shape
    if heads == shared.shape[1]:
        return states @ shared
    return (states.reshape(batch, shared.shape[1], -1, states.shape[-1]) @ shared).view(batch, heads, length, -1)


def _mix_heads(heads: Tensor, proj: Tensor | None, query_terms: Tensor | None, key_terms: Tensor | None) -> Tensor:
    # Multiply [b, i, n, m] by [i, j] (+ [b, n, i, j] + [b, m, i, j]) to get [b, j, n, m]. The static part is a single
    # small matmul over all positions.
    if proj is None:
        return heads
    # The projections may be stored in float32 even if the model uses half precision.
    mixed = (proj.to(heads.dtype).transpose(0, 1) @ heads.flatten(2)).unflatten(2, heads.shape[2:])
    if query_terms is not None:
        mixed = mixed + torch.einsum("binm,bnij->bjnm", heads, query_terms)
    if key_terms is not None:
        mixed = mixed + torch.einsum("binm,bmij->bjnm", heads, key_terms)
    return mixed
