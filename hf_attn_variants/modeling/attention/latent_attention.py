"""Latent attention: keys and values made from a latent of the memory, which is all that a cache keeps.

Of the memory y [b, m, D] the latent is c = A y [b, m, r]; where r = D it is y itself, and there is no A. One attention
in two forms, with W_k,i, W_v,i the maps of head i, q_i its queries and P_i its weights:

    expanded:  K_i = c W_k,i^T + b_k,i,  V_i = c W_v,i^T + b_v,i,  then attention as ever
    absorbed:  logits_i = (q_i W_k,i) c^T,  outputs_i = (P_i c) W_v,i^T + (row sums of P_i) b_v,i

The absorbed form is multi-query attention whose one key and value head is c: nothing of the memory's length is
projected. b_k,i adds the same number to all logits of a query, which a softmax does not see.

Sources: MLA, arXiv 2405.04434, section 2.1.2 and appendix C; with r = D slim attention, 2503.05840. Letters as in
`softmax_attention`.
"""

from typing import Any

import torch
from torch import nn

from ..mechanisms.talking_heads import M2L
from ..ops.query_folding import is_exporting
from ..ops.variant_attention import VariantAttention, wants_weights
from ..upstream import known_imports
from ..upstream_checks import check_caches
from ..variant_names import EAGER
from .attention_interface import attention_function
from .shared_rows import SharedRows, beams_of, has_hooks, note_beams, rows_of_sentences

with known_imports():
    from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

check_caches()

__all__ = [
    "EXPANDED",
    "absorbs",
    "attend_to_latent",
    "by_head",
    "holds_latent",
    "is_plain",
    "is_short",
    "keys_and_values",
    "latent_flops",
    "shared_latent",
]

# The attribute of a cache's layer that holds keys and values made once from a short latent, {layer: (c, K, V)}.
EXPANDED = "_expanded_latents"
# A value's bias is multiplied by the row sums of the weights, which are made for that, of at most so many queries.
MAX_ROWS_WITH_WEIGHTS = 16


class LatentLayer(SharedRows, DynamicLayer):
    """The layer of a dynamic cache that keeps a latent [b, 1, m, r] as it is, where `update` copies it.

    It may be the encoder's outputs themselves, which other callers read as well: nothing writes into it.
    """

    def __init__(self, latent: torch.Tensor, beams: int = 1) -> None:
        super().__init__()
        self.beams = beams
        self.lazy_initialization(latent, latent)
        self.keys, self.values = latent, latent[..., :0]

    def reset(self) -> None:
        """Let go of the latent; upstream's releases before 5.23 write zeros over it."""
        self.keys = self.values = None
        self.is_initialized, self.beams = False, 1
        vars(self).pop(EXPANDED, None)


class SharedLatentLayer(DynamicLayer):
    """The layer of a cache that shows the latent of the first layer, so that the latent is reordered once for all."""

    def __init__(self, first: Any) -> None:
        self.first = first  # upstream's constructor would set what is read from it

    keys = property(lambda self: self.first.keys)
    values = property(lambda self: self.first.values)
    is_initialized = property(lambda self: self.first.is_initialized)
    is_compileable = property(lambda self: self.first.is_compileable)
    dtype = property(lambda self: self.first.keys.dtype)  # the first's own attribute until 5.23
    device = property(lambda self: self.first.device)

    def get_seq_length(self) -> int:
        """Return the length of the first layer."""
        return self.first.get_seq_length()

    def _left_to_the_first(self, *args: Any, **kwargs: Any) -> None:
        pass

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = crop = offload = prefetch = (
        _left_to_the_first
    )


def attend_to_latent(
    module: VariantAttention,
    query: torch.Tensor,
    latent: torch.Tensor,
    mask: torch.Tensor | None,
    maps: tuple[nn.Linear, nn.Linear],
    layer: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to keys and values that are made from a latent, in the form that costs less.

    Args:
        module: the attention, with its `implementation` and `layer_idx`.
        query: [b, h_k, n, d]; of several beams a memory, the beams of a sentence follow each other.
        latent: c, [b, 1, m, r].
        mask: as in `attention_with_weights`.
        maps: W_k [k d, r] and W_v [k d_v, r] with their biases.
        layer: of a cache that holds this latent for good (cross-attention), where keys and values of a short one may
            be kept beside it.
        options: the further arguments of the attention function; its scaling is of queries of d numbers.

    Returns:
        The outputs [b, n, h_v, d_v], and the weights [b, h_v, n, m] where the implementation gives them.
    """
    attend = attention_function(module.implementation)
    # Hooks may expect a row for each beam. They come first: an exported graph must not depend on the number of rows.
    if layer is not None and any(has_hooks(each) for each in maps) and 0 < len(latent) < len(query):
        latent, layer = latent.repeat_interleave(len(query) // len(latent), dim=0), None
    # Nothing says of a tensor of the inference mode whether it was written in place.
    is_kept = layer is not None and not getattr(layer, "is_compileable", False) and not latent.is_inference()
    if is_kept and is_short(latent):
        key, value = _kept_expanded(module, latent, maps, layer)
    elif module.is_own and absorbs(module, query, latent, maps, options):
        return _absorbed(module, query, latent, mask, maps, **options)
    else:
        key, value = keys_and_values(latent[:, 0], maps, module.heads.head_dim, module.heads.value_dim)
    return attend(module, query, key, value, mask, **options)


def is_short(latent: torch.Tensor) -> bool:
    """Say whether keys and values of a latent [b, 1, m, r] are no more numbers than the maps that make them.

    Then reading the maps in every step costs more than keeping what they make.
    """
    batch, _, length, rank = latent.shape
    return not (torch.compiler.is_compiling() or is_exporting()) and batch * length <= rank


def shared_latent(cache: Any, memory: torch.Tensor, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the one latent of all cross-attentions, from the cache or, the first time, into it.

    The cache's first layer holds it, the others have it from that one: so one tensor is reordered, repeated and
    selected. Its keys are c, its values have no width.

    Args:
        cache: the decoder's, if any; a plain one has no place for a memory.
        memory: c [b, m, r]; not looked at where the cache has it.
        layer: of the attention that asks.
        states: the decoder's [b B, n, D], of the B beams of each memory.

    Returns:
        c [b, 1, m, r] and the cache's layer that holds it, if there is a cache.
    """
    if not isinstance(cache, EncoderDecoderCache):
        return rows_of_sentences(memory)[:, None], None
    cross = cache.cross_attention_cache
    if not holds_latent(cache):
        memory = rows_of_sentences(memory)
        latent = memory[:, None]
        if cross.is_compileable:
            note_beams(cache, 0, states, memory)
            cross.update(latent, latent[..., :0], 0)
            del cross.layers[1:]
        else:
            cross.layers[:] = [LatentLayer(latent, beams_of(states, memory))]
    first: Any = cross.layers[0]
    while len(cross.layers) <= layer:
        cross.layers.append(SharedLatentLayer(first))
    cache.is_updated[0] = cache.is_updated[layer] = True
    return first.keys, first


def holds_latent(cache: Any) -> bool:
    """Say whether the cache of a decoder has the latent of its cross-attentions already."""
    return isinstance(cache, EncoderDecoderCache) and bool(cache.is_updated.get(0))


def keys_and_values(
    memory: torch.Tensor, maps: tuple[nn.Module, nn.Module], head_dim: int, value_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [b, k, m, d] and values [b, k, m, d_v] that maps make from a latent, or another memory.

    Args:
        memory: [b, m, r].
        maps: those of keys and of values.
        head_dim: d.
        value_dim: d_v; None = d.
    """
    sizes = (head_dim, head_dim if value_dim is None else value_dim)
    key, value = (
        states(memory).unflatten(-1, (-1, size)).transpose(1, 2) for states, size in zip(maps, sizes, strict=True)
    )
    return key, value


def _kept_expanded(
    module: VariantAttention, latent: torch.Tensor, maps: tuple[nn.Linear, nn.Linear], layer: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    by_layer = vars(layer).setdefault(EXPANDED, {})
    expanded = by_layer.get(module.layer_idx)
    # Beams that were reordered or repeated have another latent, and one that was written in place another version.
    if expanded is None or expanded[0] is not latent or expanded[3] != latent._version:
        sizes = (module.heads.head_dim, module.heads.value_dim)
        made = keys_and_values(latent[:, 0], maps, *sizes)
        expanded = by_layer[module.layer_idx] = (latent, *made, latent._version)
    return expanded[1:3]


def absorbs(
    module: VariantAttention,
    query: torch.Tensor,
    latent: torch.Tensor,
    maps: tuple[nn.Linear, nn.Linear],
    options: dict[str, Any],
) -> bool:
    """Say whether the absorbed form serves a call and takes fewer multiplications; arguments: `attend_to_latent`'s."""
    if module.score is not None:  # of keys, which are no latents
        return False
    # With m2l a key's bias counts. Maps that a quantiser, LoRA or an offloader has taken over are more than a weight.
    if M2L in module.dynamic_names or not all(is_plain(each, latent) for each in maps):
        return False
    batch, heads, length, head_dim = query.shape
    if torch.compiler.is_compiling() or is_exporting():
        return length == 1  # a graph should serve every length of the memory
    memories, _, memory_length, rank = latent.shape
    if _sums_weights(module, maps[1], options) and length > MAX_ROWS_WITH_WEIGHTS:
        return False
    numbers = heads * head_dim + module.heads.output * module.heads.value_dim  # of all query and all value heads
    heads += module.heads.output
    kv_size = maps[0].out_features + maps[1].out_features
    rows = batch * length
    read = memory_length if module.reach is None else module.reach.keys_read(memory_length)
    absorbed = rows * rank * (numbers + heads * read)
    expanded = memories * memory_length * rank * kv_size + rows * read * numbers
    return absorbed < expanded


def latent_flops(
    module: VariantAttention,
    maps: tuple[nn.Linear, nn.Linear],
    attended: int,
    batch_size: int,
    is_step: bool,
    is_memory_kept: bool,
) -> tuple[int, int]:
    """Return the floating-point operations of a token of the memory, and of a token that asks, in the cheaper form.

    What makes the latent is not counted.

    Args:
        module: the attention.
        maps: those of keys and of values; they may be on the meta device.
        attended: m, the tokens of the memory that a query reads.
        batch_size: b.
        is_step: whether one token asks, a decoder's next one, and not all of a text at once.
        is_memory_kept: whether all steps read the same memory, as in cross-attention.
    """
    heads, (key, value) = module.heads, maps
    query = torch.empty(batch_size, heads.query, 1 if is_step else attended, heads.head_dim, device="meta")
    latent = torch.empty(batch_size, 1, attended, key.in_features, device="meta")
    plain = (
        nn.Linear(each.in_features, each.out_features, each.bias is not None, device="meta") for each in (key, value)
    )
    numbers = heads.query * heads.head_dim + heads.output * heads.value_dim  # of all query and all value heads
    is_kept = is_memory_kept and is_short(latent)
    if not is_kept and absorbs(module, query, latent, (next(plain), next(plain)), {}):
        return 0, 2 * key.in_features * (numbers + (heads.query + heads.output) * attended)
    expanded, attends = 2 * (key.weight.numel() + value.weight.numel()), 2 * attended * numbers
    # Made once of each token of a memory that is kept, or read in one pass; anew in each step of a decoder.
    return (0, attends + attended * expanded) if is_step and not is_kept else (expanded, attends)


def is_plain(linear: nn.Module, latent: torch.Tensor) -> bool:
    """Say whether a map is no more than its weight and bias, which may be read beside a latent in place of a call."""
    if type(linear) is not nn.Linear:
        return False
    weight = linear.weight
    is_whole = type(weight) is nn.Parameter and weight.dim() == 2 and weight.device == latent.device
    return is_whole and not linear._forward_hooks and not linear._forward_pre_hooks


def _absorbed(
    module: VariantAttention,
    query: torch.Tensor,
    latent: torch.Tensor,
    mask: torch.Tensor | None,
    maps: tuple[nn.Linear, nn.Linear],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    (key_map, value_map), value_dim = maps, module.heads.value_dim
    query = by_head(query, key_map.weight, query.shape[-1])
    if key_map.bias is not None and torch.is_grad_enabled() and key_map.bias.requires_grad:
        # A key's bias adds the same to all logits of a query, which a softmax does not see. But training on several
        # processes (DDP) waits for a gradient of every parameter.
        query = query + 0 * key_map.bias.sum()
    bias: torch.Tensor | None = value_map.bias
    sums_weights = _sums_weights(module, value_map, options)
    implementation = EAGER if sums_weights else module.implementation
    output, weights = attention_function(implementation)(module, query, latent, latent, mask, **options)
    output = by_head(output.transpose(1, 2), value_map.weight, value_dim, transposed=True).transpose(1, 2)
    if bias is not None:
        bias = bias.view(-1, value_dim).repeat_interleave(output.shape[2] * value_dim // bias.shape[0], dim=0)
        by_weights = weights if sums_weights else None  # [b, h_v, n, m]
        sums = _reads_anything(mask, query.shape[0]) if by_weights is None else by_weights.sum(-1)  # [b, h_v, n]
        output = output + (bias if sums is None else sums.transpose(1, 2)[..., None] * bias)
    return output, weights if wants_weights(module, options) else None


def _sums_weights(module: VariantAttention, value_map: nn.Linear, options: dict[str, Any]) -> bool:
    """Say whether the row sums of the weights, which a value's bias counts with, are other numbers than 0 and 1."""
    return value_map.bias is not None and bool(options.get("dropout") or module.projection_names)


def _reads_anything(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Return which queries may read anything, [b, 1 or h, 1 or n]; None: all. The others' weights are zeros."""
    if mask is None:
        return None
    reads = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1)
    return reads if reads.shape[0] in (1, batch) else reads.repeat_interleave(batch // reads.shape[0], dim=0)


def by_head(states: torch.Tensor, weight: torch.Tensor, head_dim: int, transposed: bool = False) -> torch.Tensor:
    """Multiply each head of states [b, k g, n, x] by its group's part of a map [k d, r]: x = d to r, or r to d."""
    weight = weight.view(-1, head_dim, weight.shape[1])  # [k, d, r]
    weight = weight.mT if transposed else weight
    batch, heads, length, size = states.shape
    rows = states.reshape(batch, weight.shape[0], -1, size).transpose(0, 1).reshape(weight.shape[0], -1, size)
    products = torch.bmm(rows, weight).view(weight.shape[0], batch, -1, weight.shape[2])  # [k, b, g n, y]
    return products.transpose(0, 1).reshape(batch, heads, length, -1)
