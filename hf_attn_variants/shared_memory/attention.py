"""Cross-attention whose beams share the encoder outputs, and the Transformers classes that it replaces."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..modeling.attention.latent_attention import by_head, is_plain, keys_and_values
from ..modeling.attention.shared_rows import rows_of_sentences, share_rows
from ..modeling.ops.query_folding import is_traced
from ..modeling.ops.softmax_attention import attention_with_weights, fused_attention
from ..modeling.upstream import Arguments, known_imports, refuse_unknown
from .cache_layers import SourceLayer, held_layer, hold_source, holds_anything

__all__ = [
    "CROSS_ATTENTIONS",
    "ENCODER_OUTPUTS",
    "IMPLEMENTATIONS",
    "KEYS_AND_VALUES",
    "KNOWN",
    "CrossAttention",
    "SharesMemory",
    "cross_attentions",
    "forward_owner",
    "kind_of",
    "shared_class",
]

# What a decoder's layer of upstream's calls its cross-attention.
CROSS_ATTENTIONS = ("EncDecAttention", "encoder_attn", "cross_attention")


@dataclass(frozen=True)
class CrossAttention:
    """One kind of cross-attention.

    Args:
        query, key, value, output: the names of its linear maps.
        head_dim: the name of the attribute that has d.
        roles: the arguments of its forward that ours reads (`upstream.ROLES`), in the order in which ours has them.
        returns: how many values it returns: the outputs and the weights, with a position bias between where three.
        has_finite_masks: whether a mask is added to a position bias, as the lowest finite number: a query that may
            read nothing then reads all alike, where it gets zeros else.
    """

    query: str
    key: str
    value: str
    output: str
    head_dim: str
    roles: tuple[str, ...] = ("states", "memory", "cache", "mask")
    returns: int = 2
    has_finite_masks: bool = False

    @property
    def attributes(self) -> tuple[str, ...]:
        """What our code reads of such a module."""
        return (
            *(self.query, self.key, self.value, self.output, self.head_dim),
            *("config", "dropout", "layer_idx", "scaling"),
        )


T5_ROLES = ("states", "memory", "cache", "mask", "bias")
T5 = CrossAttention("q", "k", "v", "o", "key_value_proj_dim", roles=T5_ROLES, returns=3, has_finite_masks=True)
UMT5 = CrossAttention("q", "k", "v", "o", "key_value_proj_dim", has_finite_masks=True)
BART = CrossAttention("q_proj", "k_proj", "v_proj", "out_proj", "head_dim")

# By the name of the class that has the forward: of one kind all are the same code under transformers 5.15 and 5.24.
KNOWN: dict[str, CrossAttention] = {
    "LongT5Attention": T5,
    "MT5Attention": T5,
    "SwitchTransformersAttention": T5,
    "T5Attention": T5,
    "UMT5Attention": UMT5,
    "BartAttention": BART,
    "BigBirdPegasusDecoderAttention": BART,
    "BlenderbotAttention": BART,
    "BlenderbotSmallAttention": BART,
    "M2M100Attention": BART,
    "MBartAttention": BART,
    "MarianAttention": BART,
    "NllbMoeAttention": BART,
    "PLBartAttention": BART,
    "PegasusAttention": BART,
    "PegasusXAttention": BART,
    "Speech2TextAttention": BART,
    "WhisperAttention": BART,  # which scales its queries, where the others scale logits
}


def forward_owner(cls: type) -> type:
    """Return the class in whose lines the forward of a module class stands."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def kind_of(cls: type) -> CrossAttention | None:
    """Return what is known of a module class: by whose forward it has; None for one that is not upstream's."""
    owner = forward_owner(cls)
    return KNOWN.get(owner.__name__) if owner.__module__.startswith("transformers.models.") else None


def cross_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module of each cross-attention of a model by its name, known or not."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in CROSS_ATTENTIONS:
            yield path, module


with known_imports():
    from transformers.cache_utils import EncoderDecoderCache


# What a cache holds of a source.
KEYS_AND_VALUES, ENCODER_OUTPUTS = "keys_and_values", "encoder_outputs"

# Upstream's implementations that are computed here too; under another one each call is upstream's.
IMPLEMENTATIONS = ("sdpa", "eager")

# A mixin is no module before it stands beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:

    class _Attention(nn.Module):
        config: Any
        dropout: float
        layer_idx: int
        scaling: float
else:
    _Attention = object


class SharesMemory(_Attention):
    """A cross-attention that reads keys and values that beams share, or the encoder's outputs.

    Listed before upstream's class. Upstream's own forward is called wherever it serves: for keys and values with a row
    for each query row, in training and where gradients are recorded.

    Class attributes:
        plain: upstream's class, or a subclass of it, which the module had before.
        kind: what is known of that.
        arguments: those of its forward by role.
        cross_cache: what it reads, and a cache holds of a source.
    """

    plain: type
    kind: CrossAttention
    arguments: Arguments
    cross_cache: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend from hidden states [b B, n, D] to the encoder's outputs [b, m, D]; arguments are upstream's."""
        states, memory, cache, mask, *bias = self.arguments.read(args, kwargs)
        if memory is None or not (cache is None or isinstance(cache, EncoderDecoderCache)):
            return super().forward(*args, **kwargs)
        layer = held_layer(cache, self.layer_idx)
        memory = memory if self.training else rows_of_sentences(memory, self.key_and_value_maps())
        source = None if self.cross_cache == KEYS_AND_VALUES else self._source(states, memory, cache, layer)
        if source is None:
            rows = memory.shape[0] if layer is None else layer.keys.shape[0]
            beams = states.shape[0] // rows if rows and states.shape[0] % rows == 0 else 1
            if beams <= 1 and _fits(mask, states):
                return super().forward(*args, **kwargs)
            if beams <= 1 or not self._shares_keys(cache, layer, beams):
                return super().forward(**self._repeated(beams, args, kwargs))
        refuse_unknown({name: value for name, value in kwargs.items() if name not in self.arguments.names})
        options = {"mask": self._mask(mask, states), "position_bias": bias[0] if bias else None}
        if source is not None and self._absorbs(states, source):
            output, weights = self._absorbed(self._query(states), source, **options)
        else:
            key, value = self._keys_and_values(memory, cache, layer, source)
            output, weights = self._attend(self._query(states), key, value, **options)
        output = self._part("output")(output.flatten(2))
        return (output, *bias, weights)

    def _source(self, states: torch.Tensor, memory: torch.Tensor, cache: Any, layer: Any) -> torch.Tensor | None:
        """Return the encoder's outputs where this call reads them, and have the cache hold them; else None."""
        if self.training or not self._is_computed_here() or not (layer is None or holds_anything(layer)):
            return None
        source: torch.Tensor = memory if layer is None else layer.source
        maps = self.key_and_value_maps()
        if not (is_plain(maps[0], source) and is_plain(maps[1], source) and states.dtype == maps[0].weight.dtype):
            return None
        if torch.is_grad_enabled() and any(
            each.requires_grad for each in (states, source, maps[0].weight, maps[1].weight)
        ):
            return None
        if is_traced() or torch.is_autocast_enabled(states.device.type):
            return source if layer is not None else None
        if source.shape[0] == 0 or states.shape[0] % source.shape[0]:
            return None
        if layer is None and cache is not None:
            layer = SourceLayer(source, maps, self._head_dim(), states.shape[0] // source.shape[0])
            if not hold_source(cache, self.layer_idx, layer):
                return None
        return source

    def _absorbs(self, states: torch.Tensor, source: torch.Tensor) -> bool:
        """Say whether reading the outputs takes fewer multiplications than making keys and values for one call."""
        if is_traced():
            return True
        rows, (memories, length, width) = states.shape[0] * states.shape[1], source.shape
        inner, head_dim = self.key_and_value_maps()[0].out_features, self._head_dim()
        absorbed = 2 * rows * (inner // head_dim) * width * (head_dim + length)
        return absorbed <= 2 * length * inner * (memories * width + rows)

    def _absorbed(
        self, query: torch.Tensor, source: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from [b B, h, n, d] to [b, m, D] itself: multi-query attention whose key and value head it is.

        A key's bias adds the same to all logits of a query, which a softmax does not see; a value's counts as often
        as the weights sum up to, once, or not at all where a query reads nothing.
        """
        (key_map, value_map), head_dim = self.key_and_value_maps(), self._head_dim()
        latent = source[:, None]
        output, weights = self._attend(by_head(query, key_map.weight, head_dim), latent, latent, mask, **options)
        output = by_head(output.transpose(1, 2), value_map.weight, head_dim, transposed=True).transpose(1, 2)
        if value_map.bias is not None:
            bias = value_map.bias.view(-1, head_dim)
            if mask is not None and mask.dtype == torch.bool:
                reads = mask.any(-1).transpose(1, 2)[..., None]  # [b or 1, n or 1, 1, 1]
                beams = output.shape[0] // reads.shape[0] if reads.shape[0] > 1 else 1
                bias = reads.repeat_interleave(beams, dim=0) * bias
            output = output + bias
        return output, weights

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        position_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options: dict[str, Any] = {"scaling": self.scaling, "dropout": self.dropout if self.training else 0.0}
        is_eager = self.config._attn_implementation_internal == "eager"
        # On a CPU the fused kernel has a thread for each memory and head of keys.
        on_cpu = key.device.type == "cpu" and not is_traced()
        if is_eager or (key is value and on_cpu and key.shape[0] < torch.get_num_threads()):
            output, weights = attention_with_weights(query, key, value, mask, position_bias, **options)
            return output, weights if is_eager else None
        return fused_attention(query, key, value, mask, position_bias, **options), None

    def _shares_keys(self, cache: Any, layer: Any, beams: int) -> bool:
        """Say whether keys and values can have a row for each sentence; asked of an empty layer, it is made so."""
        if not self._is_computed_here():
            return False
        return layer is not None or cache is None or share_rows(cache, self.layer_idx, beams)

    def _keys_and_values(
        self, memory: torch.Tensor, cache: Any, layer: Any, source: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if source is not None:  # which the cache goes on to hold: keys and values are for this call alone
            return keys_and_values(source, self.key_and_value_maps(), self._head_dim())
        if layer is not None:
            return layer.keys, layer.values
        key, value = keys_and_values(memory, self.key_and_value_maps(), self._head_dim())
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value

    def _repeated(self, beams: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of upstream's forward with the memory of each sentence repeated for its beams."""
        states, memory, _, mask, *_ = self.arguments.read(args, kwargs)
        instead = {"memory": memory if len(memory) == len(states) else memory.repeat_interleave(beams, dim=0)}
        if not _fits(mask, states):
            instead["mask"] = mask.repeat_interleave(states.shape[0] // mask.shape[0], dim=0)
        return self.arguments.by_name(args, kwargs, **instead)

    def _mask(self, mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor | None:
        """Return upstream's mask with one row where all queries of a memory have the same, finite where it was so."""
        if mask is None:
            return None
        if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
            mask = mask[:, :, :1]
        if mask.dtype == torch.bool and self.kind.has_finite_masks:
            return torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, torch.finfo(states.dtype).min)
        return mask

    def _query(self, states: torch.Tensor) -> torch.Tensor:
        return self._part("query")(states).unflatten(-1, (-1, self._head_dim())).transpose(1, 2)

    def _part(self, role: str) -> Any:
        return getattr(self, getattr(self.kind, role))

    def key_and_value_maps(self) -> tuple[Any, Any]:
        """Return the maps of keys and of values, whose weights are read where the encoder's outputs are."""
        return self._part("key"), self._part("value")

    def _head_dim(self) -> int:
        return getattr(self, self.kind.head_dim)

    def _is_computed_here(self) -> bool:
        # The field behind the property: properties of a configuration cost microseconds a layer and step.
        return self.config._attn_implementation_internal in IMPLEMENTATIONS

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy, or a pickle, names upstream's class: this one is made when it is asked for.
        return _instance, (self.plain, self.cross_cache), vars(self)


def _fits(mask: Any, states: torch.Tensor) -> bool:
    return not isinstance(mask, torch.Tensor) or mask.shape[0] in (1, states.shape[0])


@functools.cache
def shared_class(plain: type, cross_cache: str) -> type:
    """Return the class, of the same name, that a cross-attention of an upstream class gets.

    Args:
        plain: one of `KNOWN`, or a subclass with the same forward.
        cross_cache: `KEYS_AND_VALUES` or `ENCODER_OUTPUTS`.

    Raises:
        UpstreamChanged: where its forward takes or returns something else than what is known.
    """
    kind: Any = kind_of(plain)
    arguments = Arguments(forward_owner(plain), kind.roles, returns=kind.returns)
    lines = {"plain": plain, "kind": kind, "arguments": arguments, "cross_cache": cross_cache}
    lines |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (SharesMemory, plain), lines)


def _instance(plain: type, cross_cache: str) -> Any:
    cls: Any = shared_class(plain, cross_cache)
    return cls.__new__(cls)
