"""Latent attention, which computes keys and values from one latent per token and caches only the latents.

The latent of the inputs y [b, m, D] is c = A y [b, m, r]. If r = D, the latent is y itself, and there is no A.
Attention can be computed in two equivalent forms, where W_k,i and W_v,i are the projections of head i, q_i its queries
and P_i its attention weights:

    expanded:  K_i = c W_k,i^T + b_k,i,  V_i = c W_v,i^T + b_v,i,  then standard attention
    absorbed:  logits_i = (q_i W_k,i) c^T,  outputs_i = (P_i c) W_v,i^T + (row sums of P_i) b_v,i

The absorbed form is multi-query attention with c as the only key/value head. It does not have to project tensors of
length m. The bias b_k,i is omitted, because it adds the same number to all logits of a query and therefore does not
change the softmax.

Sources: MLA (arXiv 2405.04434, section 2.1.2 and appendix C), and slim attention for r = D (arXiv 2503.05840). The
symbols are defined in `softmax_attention`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms.attention_extension import HEAD_STAGE, OUTPUT_STAGE, apply_extensions
from ..mechanisms.talking_heads import M2L
from ..ops.beams import count_beams_in_cache, repeat_for_beams
from ..ops.variant_attention import VariantAttention, is_exporting, should_return_weights
from ..transformers_internals import MethodSignature, get_transformers_class, guarded_imports
from ..variant_names import EAGER
from .attention_interface import get_attention_function
from .beam_shared_rows import (
    BeamSharedCacheLayer,
    get_unrepeated_encoder_outputs,
    has_hooks,
    mark_repeated_rows,
    store_num_beams,
)

with guarded_imports():
    from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

__all__ = [
    "EXPANDED_LATENTS",
    "CrossLatentMixin",
    "attend_to_latent",
    "attend_with_projections",
    "compute_keys_and_values",
    "compute_keys_and_values_with_cache",
    "compute_latent_with_cache",
    "count_latent_flops",
    "is_plain_linear",
    "matmul_per_head",
    "should_absorb_projections",
    "should_store_expanded_latent",
]

# The attribute of a cache layer that stores the keys and values of a short latent: {layer: (c, K, V, version of c)}.
EXPANDED_LATENTS = "_expanded_latents"
# The bias of the values is multiplied by the row sums of the weights. The absorbed form is only used with these sums
# if there are at most this many queries.
MAX_ROWS_WITH_WEIGHTS = 16


_Stack: Any = object  # the type of the Transformers class with which the mixin is combined


class LatentCacheLayer(BeamSharedCacheLayer, DynamicLayer):
    """A dynamic cache layer that stores a latent [b, 1, m, r] without copying it.

    The latent must not be modified in place, because it may be the encoder outputs, which other code also reads.
    """

    def __init__(self, latent: Tensor, beams: int = 1) -> None:
        super().__init__()
        self.beams = beams
        self.lazy_initialization(latent, latent)
        self.keys, self.values = latent, latent[..., :0]

    def reset(self) -> None:
        """Release the latent. Before Transformers 5.23, the original method would overwrite it with zeros."""
        self.keys = self.values = None
        self.is_initialized, self.beams = False, 1
        vars(self).pop(EXPANDED_LATENTS, None)


class SharedLatentCacheLayer(DynamicLayer):
    """A cache layer that refers to the first layer's latent, so that beam search reorders the latent only once."""

    def __init__(self, first: Any) -> None:
        self.first = first  # the original constructor would set attributes that are properties here

    keys = property(lambda self: self.first.keys)
    values = property(lambda self: self.first.values)
    is_initialized = property(lambda self: self.first.is_initialized)
    is_compileable = property(lambda self: self.first.is_compileable)
    dtype = property(lambda self: self.first.keys.dtype)  # a plain attribute until Transformers 5.23
    device = property(lambda self: self.first.device)

    def get_seq_length(self) -> int:
        """Return the sequence length in the first layer."""
        return self.first.get_seq_length()

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = crop = offload = prefetch = _do_nothing


class CrossLatentMixin(_Stack):
    """A mixin for decoders that computes the latent of the encoder outputs only once for all layers."""

    call_arguments: MethodSignature

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.call_arguments = MethodSignature(
            get_transformers_class(cls, CrossLatentMixin), ("encoder_outputs", "cache")
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Transformers decoder with the latent instead of the encoder outputs."""
        encoder_outputs, cache = self.call_arguments.read(args, kwargs)
        latent_projection = getattr(self, "cross_kv_a_proj", None)
        if latent_projection is None or encoder_outputs is None or has_cached_latent(cache):
            return super().forward(*args, **kwargs)
        rows = get_unrepeated_encoder_outputs(encoder_outputs, (latent_projection,))
        latent = decoder_input = latent_projection(rows)
        if rows is not encoder_outputs:
            decoder_input = repeat_for_beams(latent, len(encoder_outputs))
            mark_repeated_rows(decoder_input, latent)
        return super().forward(**self.call_arguments.to_keywords(args, kwargs, encoder_outputs=decoder_input))


def attend_with_projections(
    module: Any,
    states: Tensor,
    mask: Tensor | None,
    cache: Any,
    encoder_outputs: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Compute the outputs of all heads [b, n, h_v d_v], and the weights if they are requested.

    This function replaces the original `forward` if `owns_projections` is True, which means that there is a latent,
    that value heads and key heads have different sizes, or that an extension changes the heads or their outputs.

    Args:
        module: the attention module (see `AttentionVariantMixin`).
        mask: see `attention_with_weights`.
        states, encoder_outputs, cache: see `compute_latent_with_cache` and `compute_keys_and_values_with_cache`.
        options: additional arguments of the attention function.
    """
    query_linear, *linears = (getattr(module, name) for name in module.linears)
    query = query_linear(states).unflatten(-1, (-1, module.heads.head_dim)).transpose(1, 2)  # [b, h_k, n, d]
    query = apply_extensions(module, HEAD_STAGE, query, "query")
    dropout = getattr(module, module.dropout_name)  # a probability or a module
    options |= {"dropout": getattr(dropout, "p", dropout) if module.training else 0.0, "scaling": module.scaling}
    if module.heads.rank is None:
        key, value = compute_keys_and_values_with_cache(module, linears, states, encoder_outputs, cache)
        output, weights = get_attention_function(module.implementation)(module, query, key, value, mask, **options)
    else:
        latent, layer = compute_latent_with_cache(module, states, encoder_outputs, cache)
        output, weights = attend_to_latent(module, query, latent, mask, linears, layer, **options)
    return apply_extensions(module, OUTPUT_STAGE, output, states).flatten(2), weights


def compute_keys_and_values_with_cache(
    module: VariantAttention, linears: Sequence[nn.Module], states: Tensor, encoder_outputs: Tensor | None, cache: Any
) -> tuple[Tensor, Tensor]:
    """Return the keys [b, k, m, d] and values [b, k, m, d_v], starting with those in the cache.

    Args:
        module: the attention module.
        linears: the linear layers that compute the keys and values.
        states: the inputs of self-attention [b, n, D].
        encoder_outputs: the key-side inputs of cross-attention, or None for self-attention. Their keys and values are
            only computed once.
        cache: the cache that this call reads and writes, if any.
    """
    is_cross_attention = encoder_outputs is not None
    index: Any = None if cache is None else module.layer_idx  # encoders have no layer index
    updated_layers: dict[int, bool] = {}
    if isinstance(cache, EncoderDecoderCache):
        updated_layers = cache.is_updated if is_cross_attention else updated_layers
        cache = cache.cross_attention_cache if is_cross_attention else cache.self_attention_cache
    if updated_layers and updated_layers.get(index):
        # The encoder outputs do not change between decoding steps.
        return cache.layers[index].keys, cache.layers[index].values
    inputs = states if encoder_outputs is None else encoder_outputs
    key, value = compute_keys_and_values(inputs, linears, module.heads.head_dim, module.heads.value_dim, module)
    if cache is not None:
        key, value = cache.update(key, value, index)
        updated_layers[index] = True
    return key, value


def compute_latent_with_cache(
    module: VariantAttention, states: Tensor, encoder_outputs: Tensor | None, cache: Any
) -> tuple[Tensor, Any]:
    """Return the latent c [b, 1, m, r], starting with the cached latent, and the cache layer that stores it.

    In self-attention, the cache stores c as keys, with values of size 0, and None is returned as the cache layer.

    Args:
        module: the attention module.
        states: the inputs of self-attention [b, n, D].
        encoder_outputs: the latent that `CrossLatentMixin` has computed from the encoder outputs, or None for
            self-attention.
        cache: the cache that this call reads and writes, if any.

    Raises:
        ValueError: if the cache contains anything other than latents, such as the keys and values of a PEFT prefix.
    """
    if encoder_outputs is not None:
        return get_shared_latent(cache, encoder_outputs, module.layer_idx, states)
    latent = (module.kv_a_proj(states) if hasattr(module, "kv_a_proj") else states)[:, None]
    if cache is None:
        return latent, None
    cache, index = getattr(cache, "self_attention_cache", cache), module.layer_idx
    past = cache.layers[index].keys if index < len(cache.layers) else None
    if past is not None and past.shape[1::2] != latent.shape[1::2]:
        raise ValueError(
            f"The cache must have latents of dimension {latent.shape[-1]} (`kv_lora_rank`), got "
            f"{past.shape[1]} heads of size {past.shape[-1]}. Use a cache that was created by this model."
        )
    return cache.update(latent, latent[..., :0], index)[0], None


def attend_to_latent(
    module: VariantAttention,
    query: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    linears: Sequence[nn.Linear],
    cache_layer: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the keys and values of a latent, using the cheaper of the absorbed and expanded forms.

    Args:
        module: the attention module, with its `implementation` and `layer_idx`.
        query: [b, h_k, n, d]. If beams share encoder outputs, the beams of a sentence are adjacent.
        latent: c, [b, 1, m, r].
        mask: see `attention_with_weights`.
        linears: the linear layers that contain W_k [k d, r], W_v [k d_v, r] and their biases.
        cache_layer: the cache layer that stores this latent in all steps (only in cross-attention). It may also store
            the keys and values of a short latent.
        options: additional arguments of the attention function. `scaling` refers to queries of size d.

    Returns:
        The outputs [b, n, h_v, d_v], and the weights [b, h_v, n, m] if the implementation returns them.
    """
    attend = get_attention_function(module.implementation)
    # Hooks may expect one row per beam. Hooks are checked first, because an exported graph must not depend on the
    # number of rows.
    if cache_layer is not None and any(has_hooks(linear) for linear in linears) and 0 < len(latent) < len(query):
        latent, cache_layer = repeat_for_beams(latent, len(query)), None
    # Inference-mode tensors have no version counter that detects in-place changes.
    can_store = (
        cache_layer is not None and not getattr(cache_layer, "is_compileable", False) and not latent.is_inference()
    )
    if can_store and should_store_expanded_latent(latent):
        key, value = _get_expanded_latent(module, latent, linears, cache_layer)
    elif module.is_own and should_absorb_projections(module, query, latent, linears, options):
        return _attend_in_absorbed_form(module, query, latent, mask, linears, **options)
    else:
        sizes = (module.heads.head_dim, module.heads.value_dim)
        key, value = compute_keys_and_values(latent[:, 0], linears, *sizes, module)
    return attend(module, query, key, value, mask, **options)


def should_store_expanded_latent(latent: Tensor) -> bool:
    """Return True if the keys and values of a latent [b, 1, m, r] are no larger than their projection weights.

    In this case, reading the weights in every step is more expensive than storing the keys and values.
    """
    batch, _, length, rank = latent.shape
    return not (torch.compiler.is_compiling() or is_exporting()) and batch * length <= rank


def get_shared_latent(cache: Any, latents: Tensor, layer: int, states: Tensor) -> tuple[Tensor, Any]:
    """Return the latent that all cross-attention modules share. The first call stores it in the cache.

    The first cache layer stores the latent as its keys, with values of size 0. The other layers refer to the first
    layer, so that beam search only has to reorder, repeat and select one tensor.

    Args:
        cache: the cache of the decoder, if any. A cache without a cross-attention cache does not store the latent.
        latents: c [b, m, r], which is ignored if the cache already contains the latent.
        layer: the layer index of the calling attention module.
        states: the hidden states of the decoder [b B, n, D], with B beams per sentence.

    Returns:
        The latent c [b, 1, m, r], and the cache layer that stores it if there is a cache.
    """
    if not isinstance(cache, EncoderDecoderCache):
        return get_unrepeated_encoder_outputs(latents)[:, None], None
    cross = cache.cross_attention_cache
    if not has_cached_latent(cache):
        latents = get_unrepeated_encoder_outputs(latents)
        latent = latents[:, None]
        if cross.is_compileable:
            store_num_beams(cache, 0, states, latents)
            cross.update(latent, latent[..., :0], 0)
            del cross.layers[1:]
        else:
            cross.layers[:] = [LatentCacheLayer(latent, count_beams_in_cache(states, latents))]
    first: Any = cross.layers[0]
    while len(cross.layers) <= layer:
        cross.layers.append(SharedLatentCacheLayer(first))
    cache.is_updated[0] = cache.is_updated[layer] = True
    return first.keys, first


def has_cached_latent(cache: Any) -> bool:
    """Return True if a decoder's cache already contains the latent of the cross-attention modules."""
    return isinstance(cache, EncoderDecoderCache) and bool(cache.is_updated.get(0))


def compute_keys_and_values(
    inputs: Tensor, linears: Sequence[nn.Module], head_dim: int, value_dim: int | None = None, module: Any = None
) -> tuple[Tensor, Tensor]:
    """Compute the keys [b, k, m, d] and values [b, k, m, d_v] from a latent or from other inputs [b, m, r].

    The default of d_v is d. If an attention module is given, its extensions are applied.
    """
    pairs = zip(linears, (head_dim, value_dim or head_dim), strict=True)
    key, value = (linear(inputs).unflatten(-1, (-1, size)).transpose(1, 2) for linear, size in pairs)
    if module is None:
        return key, value
    return apply_extensions(module, HEAD_STAGE, key, "key"), apply_extensions(module, HEAD_STAGE, value, "value")


def _get_expanded_latent(
    module: VariantAttention, latent: Tensor, linears: Sequence[nn.Linear], cache_layer: Any
) -> tuple[Tensor, Tensor]:
    latents_by_layer = vars(cache_layer).setdefault(EXPANDED_LATENTS, {})
    expanded = latents_by_layer.get(module.layer_idx)
    # Reordering or repeating the beams creates another tensor, and in-place changes increase the version.
    if expanded is None or expanded[0] is not latent or expanded[3] != latent._version:
        sizes = (module.heads.head_dim, module.heads.value_dim)
        expanded_keys_and_values = compute_keys_and_values(latent[:, 0], linears, *sizes, module)
        expanded = latents_by_layer[module.layer_idx] = (latent, *expanded_keys_and_values, latent._version)
    return expanded[1:3]


def should_absorb_projections(
    module: VariantAttention, query: Tensor, latent: Tensor, linears: Sequence[nn.Linear], options: dict[str, Any]
) -> bool:
    """Return True if the absorbed form supports a call and requires fewer multiplications.

    See `attend_to_latent` for the arguments.
    """
    # Additive scores are defined for keys, not for latents. With changed weights, the bias of the keys has an effect.
    if module.score is not None or not module.extensions.keys() <= {OUTPUT_STAGE}:
        return False
    # With m2l, the bias of the keys affects the outputs. A projection that was changed by quantization, LoRA or
    # offloading cannot be replaced by its weight.
    if M2L in module.dynamic_names or not all(is_plain_linear(linear, latent) for linear in linears):
        return False
    batch, heads, length, head_dim = query.shape
    if torch.compiler.is_compiling() or is_exporting():
        return length == 1  # one graph should support all lengths m
    sentences, _, key_length, rank = latent.shape
    if _needs_weight_sums(module, linears[1], options) and length > MAX_ROWS_WITH_WEIGHTS:
        return False
    numbers = heads * head_dim + module.heads.output * module.heads.value_dim  # size of all query and all value heads
    heads += module.heads.output
    kv_size = linears[0].out_features + linears[1].out_features
    rows = batch * length
    num_attended = key_length if module.key_range is None else module.key_range.count_attended_keys(key_length)
    absorbed = rows * rank * (numbers + heads * num_attended)
    expanded = sentences * key_length * rank * kv_size + rows * num_attended * numbers
    return absorbed < expanded


def count_latent_flops(
    module: VariantAttention,
    linears: Sequence[nn.Linear],
    num_keys: int,
    batch_size: int,
    is_step: bool,
    is_latent_cached: bool,
) -> tuple[int, int]:
    """Return the floating-point operations per key token and per query token in the cheaper form of latent attention.

    The projection that computes the latent is not included.

    Args:
        module: the attention module.
        linears: the key and value projections. They may be on the meta device.
        num_keys: m, the number of tokens that a query attends to.
        batch_size: b.
        is_step: True if a decoder computes one token, or False if a model processes a whole text at once.
        is_latent_cached: True if the same latent is used in all steps, as in cross-attention.
    """
    heads, (key, value) = module.heads, linears
    query = torch.empty(batch_size, heads.query, 1 if is_step else num_keys, heads.head_dim, device="meta")
    latent = torch.empty(batch_size, 1, num_keys, key.in_features, device="meta")
    plain = (
        nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        for linear in (key, value)
    )
    num_head_values = (
        heads.query * heads.head_dim + heads.output * heads.value_dim
    )  # size of all query and all value heads
    is_stored = is_latent_cached and should_store_expanded_latent(latent)
    if not is_stored and should_absorb_projections(module, query, latent, (next(plain), next(plain)), {}):
        return 0, 2 * key.in_features * (num_head_values + (heads.query + heads.output) * num_keys)
    expansion_flops, attention_flops = 2 * (key.weight.numel() + value.weight.numel()), 2 * num_keys * num_head_values
    # If keys and values are stored, or if there is only one pass, they are computed once per token. Otherwise, each
    # step recomputes them.
    return (
        (0, attention_flops + num_keys * expansion_flops)
        if is_step and not is_stored
        else (expansion_flops, attention_flops)
    )


def is_plain_linear(linear: nn.Module, latent: Tensor) -> bool:
    """Return True if calling a linear layer is equivalent to multiplying by its weight and adding its bias."""
    if type(linear) is not nn.Linear:
        return False
    weight = linear.weight
    is_whole = type(weight) is nn.Parameter and weight.dim() == 2 and weight.device == latent.device
    return is_whole and not linear._forward_hooks and not linear._forward_pre_hooks


def _attend_in_absorbed_form(
    module: VariantAttention,
    query: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    linears: Sequence[nn.Linear],
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    (key_linear, value_linear), value_dim = linears, module.heads.value_dim
    query = matmul_per_head(query, key_linear.weight, query.shape[-1])
    if key_linear.bias is not None and torch.is_grad_enabled() and key_linear.bias.requires_grad:
        # The bias of the keys adds the same number to all logits of a query and does not change the softmax. However,
        # distributed training (DDP) waits for a gradient of every parameter.
        query = query + 0 * key_linear.bias.sum()
    bias: Tensor | None = value_linear.bias
    sums_weights = _needs_weight_sums(module, value_linear, options)
    implementation = EAGER if sums_weights else module.implementation
    output, weights = get_attention_function(implementation)(module, query, latent, latent, mask, **options)
    output = matmul_per_head(output.transpose(1, 2), value_linear.weight, value_dim, transposed=True).transpose(1, 2)
    if bias is not None:
        bias = bias.view(-1, value_dim).repeat_interleave(output.shape[2] * value_dim // bias.shape[0], dim=0)
        summed_weights = weights if sums_weights else None  # [b, h_v, n, m]
        sums = (
            _find_queries_with_keys(mask, query.shape[0]) if summed_weights is None else summed_weights.sum(-1)
        )  # [b, h_v, n]
        output = output + (bias if sums is None else sums.transpose(1, 2)[..., None] * bias)
    return output, weights if should_return_weights(module, options) else None


def _needs_weight_sums(module: VariantAttention, value_linear: nn.Linear, options: dict[str, Any]) -> bool:
    """Return True if the value bias must be multiplied by the weights' row sums, which can differ from 0 and 1."""
    return value_linear.bias is not None and bool(options.get("dropout") or module.projection_names)


def _find_queries_with_keys(mask: Tensor | None, batch: int) -> Tensor | None:
    """Return a mask [b, 1 or h, 1 or n] of the queries with at least one allowed key, or None if there is no mask.

    For all other queries, the attention weights are zero.
    """
    if mask is None:
        return None
    reads = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1)
    return reads if reads.shape[0] in (1, batch) else repeat_for_beams(reads, batch)


def matmul_per_head(states: Tensor, weight: Tensor, head_dim: int, transposed: bool = False) -> Tensor:
    """Multiply each head in states [b, k g, n, x] by the rows of a weight [k d, r] that belong to the head's group.

    The head size x changes from d to r, or from r to d if `transposed` is True.
    """
    weight = weight.view(-1, head_dim, weight.shape[1])  # [k, d, r]
    weight = weight.mT if transposed else weight
    batch, heads, length, size = states.shape
    rows = states.reshape(batch, weight.shape[0], -1, size).transpose(0, 1).reshape(weight.shape[0], -1, size)
    products = torch.bmm(rows, weight).view(weight.shape[0], batch, -1, weight.shape[2])  # [k, b, g n, y]
    return products.transpose(0, 1).reshape(batch, heads, length, -1)
