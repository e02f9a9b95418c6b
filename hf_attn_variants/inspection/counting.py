"""Parameters, floating-point operations and cache sizes of a model, counted on its modules.

The model may be on the meta device. A multiplication with an addition counts as two FLOPs. Only matrix products are
counted: softmax, norms and biases are not.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..conversion.cache_budget import cache_bytes_per_token, cached_numbers
from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.attention.latent_attention import count_latent_flops
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.fields.variant_config import supports_decoder_cache
from ..modeling.mechanisms.talking_heads import count_mixing_flops, has_talking_heads
from ..modeling.ops.variant_attention import VariantAttention

__all__ = [
    "CacheSizes",
    "attention_parameters",
    "attention_projection_flops",
    "check_sizes",
    "flops_per_token",
    "itemsize_of",
    "kv_cache_bytes",
    "kv_cache_bytes_per_token",
    "largest_batch",
    "runs_once_per_sequence",
    "untie_head",
]

# The least number of bytes per number of a kernel's state, because sums are float32 in half precision too.
STATE_ITEMSIZE = 4
# The names of linear layers that run once per sequence, whatever its length.
ONCE_PER_SEQUENCE = re.compile(
    r"(.*\.)?pooler(\..*)?|cls\.seq_relationship|sop_classifier\..*|classification_head\..*|pre_classifier|"
    r"sequence_summary\..*"
)


class CacheSizes(NamedTuple):
    """The sizes that the cache of a sequence depends on, in the order of the arguments of `kv_cache_bytes`."""

    itemsize: int
    length: int
    source_length: int
    num_beams: int


def check_sizes(**sizes: int | None) -> None:
    """Check that sizes are at least 1.

    Args:
        **sizes: The values of the arguments. None is not checked.

    Raises:
        ValueError: If a size is below 1.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def untie_head(model: AttnVariantModelMixin, config: Mapping[str, Any]) -> AttnVariantModelMixin:
    """Untie the output embeddings of a model if `tie_word_embeddings` in its `config.json` is False.

    This is necessary because the configuration class of T5 always sets `tie_word_embeddings` to True. The model is
    changed in place and returned.
    """
    head = model.get_output_embeddings()
    if head is not None and model.config.tie_word_embeddings and config.get("tie_word_embeddings") is False:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return model


def itemsize_of(dtype: str) -> int:
    """Return the bytes per number of a floating-point dtype.

    Args:
        dtype: The name of the dtype, for example "float32".

    Raises:
        ValueError: If torch has no floating-point dtype with this name.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"`dtype` must be the name of a floating-point dtype of torch (float32), got {dtype!r}.")
    return torch_dtype.itemsize


def kv_cache_bytes_per_token(model: AttnVariantModelMixin, itemsize: int) -> dict[str, int] | None:
    """Return the `cache_bytes_per_token` of a variant model, with `itemsize` bytes per number."""
    sizes = []
    for site, path, module in model.named_attentions():
        numbers = cached_numbers(site.get_heads(model.config, path), model.config.hidden_size)
        sizes.append((site, 0 if _keeps_state(module, site) else itemsize * numbers))
    return cache_bytes_per_token(model.config, sizes)


def kv_cache_bytes(
    model: AttnVariantModelMixin,
    itemsize: int,
    length: int,
    source_length: int,
    num_beams: int = 1,
    repeats_source: bool = False,
) -> int | None:
    """Return the bytes of the whole cache of a sequence, or None if the model has no cache.

    The cache of a window holds at most the window. The cache of a kernel holds its state too.

    Args:
        model: A variant model.
        itemsize: The number of bytes per number.
        length: The number of tokens that the decoder has read or generated.
        source_length: The number of tokens that the encoder has read.
        num_beams: The number of beams. Each beam has its own generated tokens, and all beams share the source.
        repeats_source: Whether the source is stored for each beam, as the Transformers classes do.
    """
    is_shared = (
        model.config.is_encoder_decoder and not has_talking_heads(model.config, "cross_") and not repeats_source
    )
    sizes = []
    for site, path, module in model.named_attentions():
        core, heads = _core(module, site), site.get_heads(model.config, path)
        tokens = source_length if site.is_cross_attention else length
        tokens = tokens if core.key_range is None else min(tokens, core.key_range.before)
        size = itemsize * tokens * cached_numbers(heads, model.config.hidden_size)
        if core.kernel is not None:  # cross-attention caches the keys and values of the state too
            state = max(itemsize, STATE_ITEMSIZE) * core.kernel.num_state_values(heads)
            size = state + (0 if core.kernel.is_causal else size)
        sizes.append((site, size if site.is_cross_attention and is_shared else num_beams * size))
    cache = cache_bytes_per_token(model.config, sizes)
    return None if cache is None else sum(cache.values())


def largest_batch(memory: int | None, weights: int, cache: int | None) -> int | None:
    """Return how many caches fit into the memory together with the weights, or 0 if the weights do not fit.

    Args:
        memory: The available bytes, or None.
        weights: The bytes of the weights.
        cache: The bytes of the cache of one sequence, or None.
    """
    return None if memory is None or not cache else max(0, (memory - weights) // cache)


def _core(module: Any, site: AttentionSite) -> VariantAttention:
    """Return the submodule of an attention module that calls the attention function."""
    return module.get_submodule(site.core)


def _keeps_state(module: nn.Module, site: AttentionSite) -> bool:
    """Return whether the cache holds the state of a causal kernel instead of keys and values."""
    kernel = _core(module, site).kernel
    return kernel is not None and kernel.is_causal


def flops_per_token(
    model: AttnVariantModelMixin, length: int, source_length: int, decodes: bool = False, batch_size: int = 1
) -> dict[str, int]:
    """Return the floating-point operations per token of the forward pass.

    With latents, the operations depend on how many tokens a call reads. A call on a whole text computes the keys and
    values of each latent once (expanded form). A call on a single token may use multi-query attention on the latents
    instead (absorbed form) if that is cheaper.

    Args:
        model: A variant model.
        length: The number of tokens that a token attends to in an encoder-only model or in a decoder.
        source_length: The same number for the encoder of an encoder-decoder and for cross-attention.
        decodes: Whether a token of the decoder is the next one of a generation. Latents are then counted in the form
            that the model uses (`latent_attention.should_absorb_projections`), and otherwise in the expanded form.
        batch_size: The number of sequences per batch, which the form of short latents depends on (`is_short_latent`).

    Returns:
        {"encoder": ..., "decoder": ...} for the parts that the model has. The encoder includes the keys, values and
        latents of cross-attention. Heads that run once per sequence are not counted.
    """
    config = model.config
    flops: Counter[str] = Counter()
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    linears = {k.removeprefix(prefix): module for k, module in model.named_modules() if isinstance(module, nn.Linear)}
    has_decoder = any(site.get_stack_name(config) == "decoder" for site, _, _ in model.named_attentions())
    decodes = decodes and supports_decoder_cache(config)
    for site, path, module in model.named_attentions():
        runs, stack = model.count_module_runs(config, path), site.get_stack_name(config)
        heads = site.get_heads(config, path)
        key_stack = "encoder" if site.is_cross_attention else stack
        projections = {role: linears.pop(f"{path}.{linear}") for role, linear in site.projections.items()}
        flops[stack] += 2 * runs * (projections["query"].weight.numel() + projections["output"].weight.numel())
        latent = linears.pop(site.get_latent_path(path), None)  # layers may share a latent, which counts once
        flops[key_stack] += 0 if latent is None else 2 * runs * latent.weight.numel()
        attended = source_length if site.is_cross_attention or site.stack == "encoder" else length
        core = _core(module, site)
        attended = attended if core.key_range is None else core.key_range.num_attended_keys(attended)
        if core.compression is not None:
            attended = core.compression.num_attended_keys(attended)
        query_dim = projections["query"].in_features
        key_dim = projections["key"].in_features if site.is_cross_attention else query_dim
        parts = [count_mixing_flops(heads, query_dim, key_dim, attended)]
        key_value = (projections["key"], projections["value"])
        if decodes and heads.rank is not None:
            is_step, is_cached = stack == "decoder", site.is_cross_attention
            parts.append(count_latent_flops(core, key_value, attended, batch_size, is_step, is_cached))
        else:
            parts.append(_attention_flops(core, key_value, attended))
        parts += [extra.count_flops() for extra in (core.compression, core.score) if extra is not None]
        for per_key, per_query in parts:
            flops[key_stack] += runs * per_key
            flops[stack] += runs * per_query
    for name, linear in linears.items():
        if not runs_once_per_sequence(model, name):
            parent = name.split(".")[0] if config.is_encoder_decoder else None
            stack = parent if parent in ("encoder", "decoder") else "decoder" if has_decoder else "encoder"
            flops[stack] += 2 * model.count_module_runs(config, name) * linear.weight.numel()
    return {stack: flops[stack] for stack in ("encoder", "decoder") if stack in flops}


def _attention_flops(core: VariantAttention, key_value: tuple[nn.Linear, nn.Linear], attended: int) -> tuple[int, int]:
    """Return the FLOPs per key token and per query token.

    A key token costs its key and value projections. A query token costs its scores and weighted sums.

    Args:
        core: The attention.
        key_value: The key and the value projection.
        attended: The number of keys that a query reads.
    """
    heads, per_key = core.heads, 2 * sum(projection.weight.numel() for projection in key_value)
    if core.kernel is not None:
        key_features, query_features = core.kernel.count_flops(heads, attended)
        return per_key + heads.key * key_features, heads.query * query_features
    return per_key, 2 * attended * (heads.query * heads.head_dim + heads.output * heads.value_dim)


def attention_projection_flops(model: AttnVariantModelMixin) -> int:
    """Return the floating-point operations per token of the linear layers of all attention modules.

    Operations that depend on the sequence length are not counted. With latents, the keys and values of each token are
    counted once (expanded form).

    Args:
        model: A variant model. A multi-head model has the same count as the Transformers model.

    Example:
        >>> attention_projection_flops(convert(model, 4)) / attention_projection_flops(convert(model, 12))
    """
    flops: dict[int, int] = {}
    for site, path, module in model.named_attentions():
        runs = model.count_module_runs(model.config, path)
        flops |= {id(linear): 2 * runs * linear.weight.numel() for linear in _linear_layers(model, site, path, module)}
    return sum(flops.values())


def attention_parameters(model: AttnVariantModelMixin) -> int:
    """Return the number of parameters of all attention modules.

    These are the linear layers, the latent projections (shared ones count once) and the talking-heads projections.
    """
    sizes: dict[int, int] = {}
    for site, path, module in model.named_attentions():
        linears = _linear_layers(model, site, path, module)
        parameters = [parameter for linear in linears for parameter in linear.parameters()]
        parameters += module.get_submodule(site.core).parameters(recurse=False)
        sizes |= {id(parameter): parameter.numel() for parameter in parameters}
    return sum(sizes.values())


def _linear_layers(model: AttnVariantModelMixin, site: AttentionSite, path: str, module: nn.Module) -> list[Any]:
    """Return the linear layers of an attention module, with its latent projection."""
    parent, _, name = site.get_latent_path(path).rpartition(".")
    latent = getattr(model.base_model.get_submodule(parent), name, None) if name else None
    linears = [module.get_submodule(name) for name in site.projections.values()]
    return linears if latent is None else [*linears, latent]


def runs_once_per_sequence(model: nn.Module, name: str) -> bool:
    """Return whether the linear layer of this name runs once per sequence instead of once per token."""
    if name.split(".")[0] == "classifier":
        return not type(model).__name__.endswith("ForTokenClassification")
    return ONCE_PER_SEQUENCE.fullmatch(name) is not None
