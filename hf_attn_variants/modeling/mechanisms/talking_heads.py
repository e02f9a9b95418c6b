"""Talking heads: logits and weights mixed across heads, before and after the softmax (arXiv 2003.02436).

P_l and P_w are of its section 3, their input-dependent terms of section 5. Of an encoder-decoder the fields without a
prefix are the decoder's self-attention's; the encoder (`encoder_...`) and cross-attention (`cross_...`) have the same
where they say nothing of their own: the paper's ablation is by place. Nothing here imports torch, for commands make
flags of these names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .head_sharing import key_value_field
from .mechanism import NONE, PREFIXES, Mechanism

if TYPE_CHECKING:
    from ..ops.variant_attention import AttentionHeads

__all__ = [
    "BOTH",
    "DYNAMIC",
    "DYNAMIC_PROJECTIONS",
    "IDENTITY",
    "INIT",
    "KIND",
    "LOGITS",
    "M2L",
    "OUTPUT",
    "PROJECTIONS",
    "PROJECTION_KEYS",
    "RANDOM",
    "SOFTMAX",
    "TALKING_FIELDS",
    "TALKING_HEADS",
    "TALKING_HEADS_INITS",
    "WEIGHTS",
    "X2L",
    "DynamicTerms",
    "TalkingHeads",
    "beginning_of_talking_heads",
    "count_fields",
    "dynamic_terms",
    "is_own_value",
    "keeps_cache",
    "layers_to_check",
    "listed_by_layer",
    "mixing_flops",
    "projection_shapes",
    "projection_std",
    "query_heads_there",
    "talking_places",
    "talks",
]

TALKING_FIELDS = KIND, SOFTMAX, OUTPUT, INIT, DYNAMIC = (
    "talking_heads",
    "num_softmax_heads",
    "num_value_heads",
    "talking_heads_init",
    "talking_heads_dynamic",
)
TALKING_HEADS = LOGITS, WEIGHTS, BOTH = "logits", "weights", "both"
TALKING_HEADS_INITS = IDENTITY, RANDOM = "identity", "random"
# Of inputs that ask (x) and of the memory (m). Each dynamic projection with the static one that it is added to.
X2L, M2L, X2W, M2W = "x2l", "m2l", "x2w", "m2w"
DYNAMIC_PROJECTIONS = {X2L: LOGITS, M2L: LOGITS, X2W: WEIGHTS, M2W: WEIGHTS}
# P_l and P_w. Weight decay would pull them away from the identity, towards heads that do not attend at all.
PROJECTIONS = ("logits_proj", "weights_proj")
# The talking-heads parameters among a model's keys.
PROJECTION_KEYS = r"\.(logits|weights|[xm]2[lw])_proj$"


@dataclass(frozen=True)
class TalkingHeads(Mechanism):
    """How the heads of one attention talk.

    Args:
        kind: which projections there are: None, "logits", "weights", "both".
        softmax: h, the heads of the softmax.
        output: h_v, those of the values.
        init: what the projections begin as.
        dynamic: the input-dependent terms that are added to them.
    """

    kind: str | None
    softmax: int
    output: int
    init: str = IDENTITY
    dynamic: tuple[str, ...] = ()

    field = KIND
    paper = ("Talking-heads attention", "2003.02436")
    inherits = True

    @classmethod
    def of(cls, config: Any, prefix: str, layer: int) -> "TalkingHeads":
        """Return how heads talk in a layer's attention of the place that a prefix stands for.

        Args:
            config: a variant configuration, whose fields are checked.
            prefix: of the place, one of `talking_places`.
            layer: of its stack.
        """
        heads = query_heads_there(config, prefix)
        kind = _kind(config, prefix, layer)
        if kind is None:
            return cls(None, heads, heads)
        softmax = _count(config, prefix, SOFTMAX, layer)
        softmax = heads if softmax is None else softmax
        output = _count(config, prefix, OUTPUT, layer)
        output = (softmax if kind == LOGITS else heads) if output is None else output
        dynamic = tuple(_value(config, prefix, DYNAMIC, layer) or ())
        return cls(kind, softmax, output, _value(config, prefix, INIT, layer), dynamic)

    def kept_when_loaded(self, wanted: "TalkingHeads", has_bias: bool) -> list[tuple[str, tuple[Any, Any]]]:
        """Return what loading a checkpoint must not change: each field, with its value here and the wanted one.

        Args:
            wanted: how the heads of the same attention are to talk.
            has_bias: whether it has T5's position bias, with a column for each softmax head, talking or not.
        """
        pairs: list[tuple[str, tuple[Any, Any]]] = [(OUTPUT, (self.output, wanted.output))]
        if self.kind is not None or has_bias:
            pairs.append((SOFTMAX, (self.softmax, wanted.softmax)))
        if self.kind is not None:
            dynamic = (list(self.dynamic), list(wanted.dynamic))
            pairs = [(KIND, (self.kind, wanted.kind)), *pairs, (DYNAMIC, dynamic)]
        return pairs


class DynamicTerms(Mechanism):
    """The input-dependent terms of talking heads; nothing is made of this class."""

    field = DYNAMIC
    paper = TalkingHeads.paper

    @classmethod
    def asked_for(cls, config: Any, prefix: str) -> tuple[str, list[str]] | None:
        """Return the field without a prefix, and the terms that layers of a place have; None: they have none."""
        terms = dynamic_terms(config, prefix) if prefix in talking_places(config) else []
        return (cls.field, terms) if terms else None


def talking_places(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the attentions that a configuration has fields of talking heads for, "" first."""
    return tuple(prefix for prefix in PREFIXES if hasattr(config, prefix + KIND))


def talks(config: Any, prefix: str | None = None) -> bool:
    """Say whether heads talk in any layer of a place; None: of any place."""
    places = talking_places(config) if prefix is None else (prefix,)
    return any(_kind(config, place, layer) is not None for place in places for layer in layers_to_check(config, place))


def dynamic_terms(config: Any, prefix: str = "") -> list[str]:
    """Return the input-dependent terms that layers of a place have, in their own order."""
    layers = layers_to_check(config, prefix) if talks(config, prefix) else ()
    terms = {name for layer in layers for name in TalkingHeads.of(config, prefix, layer).dynamic}
    return [name for name in DYNAMIC_PROJECTIONS if name in terms]


def beginning_of_talking_heads(config: Any) -> str:
    """Say what new talking heads begin as and what that does to the outputs."""
    talking = [
        TalkingHeads.of(config, prefix, layer)
        for prefix in talking_places(config)
        for layer in range(config.layer_count(prefix + KIND))
    ]
    if any(each.init == RANDOM for each in talking):
        return f'they are drawn at random (`{INIT}="{RANDOM}"`), and the outputs change: train them'
    if any(each.dynamic for each in talking):
        return f"they begin as the identity, the terms of `{DYNAMIC}` as zeros, and no output changes"
    return "they begin as the identity, and no output changes"


def keeps_cache(dynamic: Iterable[str] | None) -> bool:
    """Say whether a decoder whose self-attention has these input-dependent terms keeps a cache."""
    return not any(name[0] == "m" for name in dynamic or ())


def count_fields(config: Any, kv_heads_fields: Iterable[str]) -> list[str]:
    """Return the fields of heads of softmax and values that places which talk have values of their own of.

    Args:
        config: a variant configuration.
        kv_heads_fields: of key/value heads, of the stacks that a model has.
    """
    stacks = {*kv_heads_fields}
    names = [name for name in (SOFTMAX, OUTPUT) if talks(config, "") and getattr(config, name) is not None]
    for prefix in talking_places(config)[1:]:
        if key_value_field(prefix) in stacks and talks(config, prefix):
            own = [prefix + name for name in (SOFTMAX, OUTPUT)]
            names += [name for name in own if getattr(config, name) is not None]
    return names


def projection_shapes(heads: "AttentionHeads", query_dim: int, memory_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each talking-heads parameter of an attention.

    Args:
        heads: the attention's head counts, and how they talk.
        query_dim: the size of the inputs that queries are made from.
        memory_dim: the size of the inputs that keys and values are made from.
    """
    mixed = {LOGITS: (heads.query, heads.softmax), WEIGHTS: (heads.softmax, heads.output)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}_proj": shape for name, shape in mixed.items() if heads.talking in (name, BOTH)
    }
    for name in heads.dynamic:
        input_dim = query_dim if name.startswith("x") else memory_dim
        shapes[f"{name}_proj"] = (input_dim, *mixed[DYNAMIC_PROJECTIONS[name]])
    return shapes


def projection_std(name: str, shape: tuple[int, ...], initialization: str) -> float | None:
    """Return the standard deviation that a new talking-heads parameter is drawn with; None = it is the identity.

    Fan-in scaling, as in the authors' code. A dynamic projection [input size, h_in, h_out], which is added to another
    one, begins as zeros beside an identity, so that no output changes; else it is drawn at variance scale 0.01 / h_in,
    for larger values made training hard.

    Args:
        name: the parameter's name.
        shape: its shape.
        initialization: the attention's `talking_heads_init`.
    """
    if name in PROJECTIONS:
        return None if initialization == IDENTITY else shape[0] ** -0.5
    return 0.0 if initialization == IDENTITY else (1e-2 / shape[1] / shape[0]) ** 0.5


def mixing_flops(heads: "AttentionHeads", query_dim: int, memory_dim: int, attended: int) -> tuple[int, int]:
    """Return the floating-point operations of a token of the memory, and of a token that asks.

    Args:
        heads, query_dim, memory_dim: as for `projection_shapes`.
        attended: the keys that a query reads.
    """
    of_memory = of_query = 0
    for name, shape in projection_shapes(heads, query_dim, memory_dim).items():
        of_query += 2 * attended * shape[-2] * shape[-1]
        if name not in PROJECTIONS:  # a dynamic one is first computed from each token of its side
            of_term = 2 * shape[0] * shape[1] * shape[2]
            of_query += of_term if name[0] == "x" else 0
            of_memory += of_term if name[0] == "m" else 0
    return of_memory, of_query


def query_heads_there(config: Any, prefix: str) -> int:
    """Return h_k, the query heads of a place."""
    return config.query_heads(key_value_field(prefix))


def listed_by_layer(config: Any, prefixes: Iterable[str]) -> set[str]:
    """Return the fields of talking heads of some places that have a value for each layer."""
    return {prefix + name for prefix in prefixes for name in TALKING_FIELDS} & {*(config.per_layer_values or {})}


def is_own_value(config: Any, prefix: str, name: str) -> bool:
    """Say whether a place has a value of its own of a field."""
    return prefix + name in (config.per_layer_values or {}) or getattr(config, prefix + name, None) is not None


def layers_to_check(config: Any, prefix: str) -> Iterable[int]:
    """Return the layers of a place to look at: the first stands for all where none differs."""
    listed = listed_by_layer(config, ("", prefix))
    return range(config.layer_count(prefix + KIND)) if listed else (0,)


def _value(config: Any, prefix: str, name: str, layer: int) -> Any:
    """Return what a field is in a layer of a place: the place's own, or that without a prefix."""
    prefix = prefix if prefix and is_own_value(config, prefix, name) else ""
    return config.layer_value(prefix + name, layer)


def _kind(config: Any, prefix: str, layer: int) -> str | None:
    kind = _value(config, prefix, KIND, layer)
    return None if kind == NONE else kind


def _count(config: Any, prefix: str, name: str, layer: int) -> int | None:
    """Return a number of heads; None: as many as there are otherwise.

    One without a prefix that says no more than "as many as query heads", or that nothing talks by, is not inherited.
    """
    count = _value(config, prefix, name, layer)
    if not prefix or is_own_value(config, prefix, name):
        return count
    means_nothing = _kind(config, "", layer) is None or count == query_heads_there(config, "")
    return None if means_nothing else count
