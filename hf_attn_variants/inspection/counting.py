"""What a model has and does, counted on its modules, on the meta device too: parameters, operations, cache.

FLOPs count two for each multiplication and addition of a matrix product; softmax, norms and biases are left out.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..conversion.cache_budget import cache_bytes_per_token, cached_numbers
from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.attention.latent_attention import latent_flops
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..modeling.fields.variant_config import can_cache
from ..modeling.mechanisms.talking_heads import mixing_flops, talks
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
    "runs_once_a_sequence",
    "untie_head",
]

# Bytes of a number of a kernel's state, at least: sums are in float32 under half precision too.
STATE_ITEMSIZE = 4
# Linear maps that run once a sequence, whatever its length.
ONCE_A_SEQUENCE = re.compile(
    r"(.*\.)?pooler(\..*)?|cls\.seq_relationship|sop_classifier\..*|classification_head\..*|pre_classifier|"
    r"sequence_summary\..*"
)


class CacheSizes(NamedTuple):
    """What a sequence's cache is of, as `kv_cache_bytes` takes it."""

    itemsize: int
    length: int
    source_length: int
    num_beams: int


def check_sizes(**sizes: int | None) -> None:
    """Raise ValueError unless each of these sizes, where it is given, is at least 1."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}.")


def untie_head(model: AttnVariantModelMixin, config: Mapping[str, Any]) -> AttnVariantModelMixin:
    """Give a model's output embeddings a weight of their own if its config.json says so, and return the model.

    T5's configuration class sets `tie_word_embeddings` to True, and the weight file decides whether the head is tied.
    """
    head = model.get_output_embeddings()
    if head is not None and model.config.tie_word_embeddings and config.get("tie_word_embeddings") is False:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return model


def itemsize_of(dtype: str) -> int:
    """Return the bytes of a number of a floating-point type of torch, by its name."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"`dtype` must be the name of a floating-point type of torch, float32 for example; got {dtype!r}."
        )
    return found.itemsize


def kv_cache_bytes_per_token(model: AttnVariantModelMixin, itemsize: int) -> dict[str, int] | None:
    """Return `cache_bytes_per_token` of a variant model, with `itemsize` bytes a number."""
    sizes = []
    for site, path, module in model.named_attentions():
        numbers = cached_numbers(site.heads(model.config, path), model.config.hidden_size)
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
    """Return the bytes of a sequence's whole cache: of a window no more than it keeps, of a kernel its state too.

    None without a cache.

    Args:
        model: a variant model.
        itemsize: bytes a number.
        length, source_length: tokens that a decoder has seen, and that an encoder has read.
        num_beams: of the sequence's search; each has what it generated, all of them one source.
        repeats_source: whether each beam has the source, too, as in transformers' own classes.
    """
    is_read_once = model.config.is_encoder_decoder and not talks(model.config, "cross_") and not repeats_source
    sizes = []
    for site, path, module in model.named_attentions():
        core, heads = _core(module, site), site.heads(model.config, path)
        kept = source_length if site.is_cross_attention else length
        kept = kept if core.reach is None else min(kept, core.reach.before)
        size = itemsize * kept * cached_numbers(heads, model.config.hidden_size)
        if core.kernel is not None:  # cross-attention keeps what its state is of, too
            state = max(itemsize, STATE_ITEMSIZE) * core.kernel.state_numbers(heads)
            size = state + (0 if core.kernel.is_causal else size)
        sizes.append((site, size if site.is_cross_attention and is_read_once else num_beams * size))
    cache = cache_bytes_per_token(model.config, sizes)
    return None if cache is None else sum(cache.values())


def largest_batch(memory: int | None, weights: int, cache: int | None) -> int | None:
    """Return how many caches fit into a memory beside the weights; 0 where these do not."""
    return None if memory is None or not cache else max(0, (memory - weights) // cache)


def _core(module: Any, site: AttentionSite) -> VariantAttention:
    """Return what calls the attention function, of one of this package's attentions."""
    return module.get_submodule(site.core)


def _keeps_state(module: nn.Module, site: AttentionSite) -> bool:
    kernel = _core(module, site).kernel
    return kernel is not None and kernel.is_causal


def flops_per_token(
    model: AttnVariantModelMixin, length: int, source_length: int, decodes: bool = False, batch_size: int = 1
) -> dict[str, int]:
    """Return the floating-point operations that one token takes in the forward pass.

    Without latents they are the same whether a decoder reads a whole text or one token. With them they are not:
    a pass over a whole text makes keys and values of each token's latent once; one token alone is multi-query
    attention on the latents, where that costs less.

    Args:
        model: a variant model.
        length: tokens that each token attends to in an encoder-only or a decoder stack, its window's where it has one.
        source_length: the same in the encoder of an encoder-decoder, and in cross-attention.
        decodes: count a decoder's token as the next one of a generation, and latents everywhere in the form that the
            model takes (`latent_attention.absorbs`, `is_short`); otherwise all are tokens of whole texts, whose keys
            and values are made from the latents.
        batch_size: sequences at once, by which latents of few tokens are told (`is_short`).

    Returns:
        {"encoder": ..., "decoder": ...}, the stacks that the model has. The encoder's includes what a token of it
        costs in the cross-attentions' keys, values or latent; a head that reads a sequence once is left out.
    """
    config = model.config
    flops: Counter[str] = Counter()
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    linears = {name.removeprefix(prefix): each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    has_decoder = any(site.stack_of(config) == "decoder" for site, _, _ in model.named_attentions())
    decodes = decodes and can_cache(config)
    for site, path, module in model.named_attentions():
        runs, stack, heads = model.module_runs(config, path), site.stack_of(config), site.heads(config, path)
        memory_stack = "encoder" if site.is_cross_attention else stack
        maps = {role: linears.pop(f"{path}.{linear}") for role, linear in site.projections.items()}
        flops[stack] += 2 * runs * (maps["query"].weight.numel() + maps["output"].weight.numel())
        latent = linears.pop(site.latent_path(path), None)  # there once, where layers share it
        flops[memory_stack] += 0 if latent is None else 2 * runs * latent.weight.numel()
        attended = source_length if site.is_cross_attention or site.stack == "encoder" else length
        core = _core(module, site)
        attended = attended if core.reach is None else core.reach.keys_read(attended)
        if core.compression is not None:
            attended = core.compression.keys_read(attended)
        query_dim = maps["query"].in_features
        memory_dim = maps["key"].in_features if site.is_cross_attention else query_dim
        parts = [mixing_flops(heads, query_dim, memory_dim, attended)]
        key_value = (maps["key"], maps["value"])
        if decodes and heads.rank is not None:
            is_step, is_kept = stack == "decoder", site.is_cross_attention
            parts.append(latent_flops(core, key_value, attended, batch_size, is_step, is_kept))
        else:
            parts.append(_attention_flops(core, key_value, attended))
        parts += [each.flops() for each in (core.compression, core.score) if each is not None]
        for of_memory, of_query in parts:
            flops[memory_stack] += runs * of_memory
            flops[stack] += runs * of_query
    for name, linear in linears.items():
        if not runs_once_a_sequence(model, name):
            inside = name.split(".")[0] if config.is_encoder_decoder else None
            where = inside if inside in ("encoder", "decoder") else "decoder" if has_decoder else "encoder"
            flops[where] += 2 * model.module_runs(config, name) * linear.weight.numel()
    return {stack: flops[stack] for stack in ("encoder", "decoder") if stack in flops}


def _attention_flops(core: VariantAttention, maps: tuple[nn.Linear, nn.Linear], attended: int) -> tuple[int, int]:
    """Return the FLOPs of a token of the memory, its key and value, and of a token that asks: scores, weighted sums.

    Args:
        core: the attention.
        maps: those of keys and of values.
        attended: the keys that a query reads.
    """
    heads, of_memory = core.heads, 2 * sum(each.weight.numel() for each in maps)
    if core.kernel is not None:
        of_key, of_query = core.kernel.flops(heads, attended)
        return of_memory + heads.key * of_key, heads.query * of_query
    return of_memory, 2 * attended * (heads.query * heads.head_dim + heads.output * heads.value_dim)


def attention_projection_flops(model: AttnVariantModelMixin) -> int:
    """Return the floating-point operations a token that the attentions' linear maps of all layers take.

    What depends on the sequence length is not in it; keys and values of a latent are made of each token.

    Args:
        model: a variant model; the multi-head one counts as upstream's does.
    """
    found: dict[int, int] = {}
    for site, path, module in model.named_attentions():
        runs = model.module_runs(model.config, path)
        found |= {id(each): 2 * runs * each.weight.numel() for each in _maps(model, site, path, module)}
    return sum(found.values())


def attention_parameters(model: AttnVariantModelMixin) -> int:
    """Return the parameters of the attentions: linear maps, latents' maps (shared ones once), talking heads."""
    found: dict[int, int] = {}
    for site, path, module in model.named_attentions():
        parameters = [parameter for each in _maps(model, site, path, module) for parameter in each.parameters()]
        parameters += module.get_submodule(site.core).parameters(recurse=False)
        found |= {id(parameter): parameter.numel() for parameter in parameters}
    return sum(found.values())


def _maps(model: AttnVariantModelMixin, site: AttentionSite, path: str, module: nn.Module) -> list[Any]:
    """Return an attention's linear maps, that of its latent among them."""
    parent, _, name = site.latent_path(path).rpartition(".")
    latent = getattr(model.base_model.get_submodule(parent), name, None) if name else None
    maps = [module.get_submodule(each) for each in site.projections.values()]
    return maps if latent is None else [*maps, latent]


def runs_once_a_sequence(model: nn.Module, name: str) -> bool:
    """Return whether a model's linear map of this name reads a sequence once, and not each of its tokens."""
    if name.split(".")[0] == "classifier":
        return not type(model).__name__.endswith("ForTokenClassification")
    return ONCE_A_SEQUENCE.fullmatch(name) is not None
