"""Talking-heads attention: projections across the heads, before and after the softmax (arXiv 2003.02436).

P_l and P_w are defined in section 3 of the paper, and their input-dependent terms in section 5. The five fields
without a prefix apply to every attention. If any of the five fields with `encoder_` (or `cross_`) is given, the
encoder (or cross-attention) uses only the fields with this prefix. The module does not import torch, because the
commands create flags from these names.
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
    "HEAD_PROJECTIONS",
    "IDENTITY",
    "INIT",
    "KIND",
    "LOGITS",
    "M2L",
    "OUTPUT",
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
    "count_fields",
    "describe_initialization",
    "dynamic_terms",
    "has_talking_heads",
    "layers_of",
    "listed_by_layer",
    "mixing_flops",
    "projection_shapes",
    "projection_std",
    "query_heads_there",
    "supports_cache",
    "talking_group",
    "talking_places",
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
# The dynamic projections of the query inputs (x) and of the key inputs (m), and the static projections that they are
# added to.
X2L, M2L, X2W, M2W = "x2l", "m2l", "x2w", "m2w"
DYNAMIC_PROJECTIONS = {X2L: LOGITS, M2L: LOGITS, X2W: WEIGHTS, M2W: WEIGHTS}
# P_l and P_w. Weight decay would pull them away from the identity, towards heads that do not attend at all.
HEAD_PROJECTIONS = ("logits_proj", "weights_proj")
# A regular expression for the talking-heads parameters in a state dict.
PROJECTION_KEYS = r"\.(logits|weights|[xm]2[lw])_proj$"


@dataclass(frozen=True)
class TalkingHeads(Mechanism):
    """The talking-heads settings of one attention.

    Args:
        kind: the static projections of the attention: None, "logits", "weights" or "both".
        softmax: h, the number of softmax heads.
        output: h_v, the number of value heads.
        init: the initialization of the projections.
        dynamic: the input-dependent terms that are added to the projections.
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
        """Return the talking-heads settings of one layer at a place.

        Args:
            config: a variant configuration with valid fields.
            prefix: the prefix of the place, one of `talking_places`.
            layer: the index of the layer in the encoder or decoder.
        """
        heads, group = query_heads_there(config, prefix), talking_group(config, prefix)
        kind, softmax, output, init, dynamic = (config.layer_value(group + name, layer) for name in TALKING_FIELDS)
        if kind in (None, NONE):
            return cls(None, heads, heads)
        softmax = softmax or heads
        output = output or (softmax if kind == LOGITS else heads)
        return cls(kind, softmax, output, init or IDENTITY, tuple(dynamic or ()))

    def kept_when_loaded(self, wanted: "TalkingHeads", has_bias: bool) -> list[tuple[str, tuple[Any, Any]]]:
        """Return the fields that loading a checkpoint must not change, each with its current and its wanted value.

        Args:
            wanted: the wanted settings of the same attention.
            has_bias: `True` if the attention has the position bias of T5, with a column for each softmax head.
        """
        pairs: list[tuple[str, tuple[Any, Any]]] = [(OUTPUT, (self.output, wanted.output))]
        if self.kind is not None or has_bias:
            pairs.append((SOFTMAX, (self.softmax, wanted.softmax)))
        if self.kind is not None:
            dynamic = (list(self.dynamic), list(wanted.dynamic))
            pairs = [(KIND, (self.kind, wanted.kind)), *pairs, (DYNAMIC, dynamic)]
        return pairs


class DynamicTerms(Mechanism):
    """The input-dependent terms of talking heads. The class is not instantiated."""

    field = DYNAMIC
    paper = TalkingHeads.paper

    @classmethod
    def requested_in(cls, config: Any, prefix: str) -> tuple[str, list[str]] | None:
        """Return the field without a prefix and the terms in the layers of a place, or None if there are no terms."""
        terms = dynamic_terms(config, prefix) if prefix in talking_places(config) else []
        return (cls.field, terms) if terms else None


def talking_places(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the places that have talking-heads fields in a configuration; "" comes first."""
    return tuple(prefix for prefix in PREFIXES if hasattr(config, prefix + KIND))


def has_talking_heads(config: Any, prefix: str | None = None) -> bool:
    """Check if any layer of a place has talking heads; None selects all places."""
    places = talking_places(config) if prefix is None else (prefix,)
    return any(talking.kind for place in places for talking in layers_of(config, place))


def dynamic_terms(config: Any, prefix: str = "") -> list[str]:
    """Return the input-dependent terms in the layers of a place, in the order of `DYNAMIC_PROJECTIONS`."""
    terms = {name for talking in layers_of(config, prefix) for name in talking.dynamic}
    return [name for name in DYNAMIC_PROJECTIONS if name in terms]


def describe_initialization(config: Any) -> str:
    """Return a description of the initialization of new talking heads and of its effect on the outputs."""
    talking = [heads for prefix in talking_places(config) for heads in layers_of(config, prefix)]
    if any(heads.init == RANDOM for heads in talking):
        return f'they are drawn at random (`{INIT}="{RANDOM}"`), and the outputs change: train them'
    if any(heads.dynamic for heads in talking):
        return f"they begin as the identity, the terms of `{DYNAMIC}` as zeros, and no output changes"
    return "they begin as the identity, and no output changes"


def supports_cache(dynamic: Iterable[str] | None) -> bool:
    """Check if a decoder can use a cache when its self-attention has these input-dependent terms."""
    return not any(name[0] == "m" for name in dynamic or ())


def count_fields(config: Any, kv_heads_fields: Iterable[str]) -> list[str]:
    """Return the fields with the numbers of softmax and value heads that places with talking heads set themselves.

    Args:
        config: a variant configuration.
        kv_heads_fields: the key/value head fields of the encoder or decoder that the model has.
    """
    stacks = {*kv_heads_fields}
    places = [place for place in talking_places(config) if not place or key_value_field(place) in stacks]
    names = [place + name for place in places if has_talking_heads(config, place) for name in (SOFTMAX, OUTPUT)]
    return [name for name in names if getattr(config, name) is not None]


def projection_shapes(heads: "AttentionHeads", query_dim: int, key_input_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each talking-heads parameter of an attention.

    Args:
        heads: the head counts and the talking-heads settings of the attention.
        query_dim: the size of the inputs of the query projection.
        key_input_dim: the size of the inputs of the key and value projections.
    """
    mixed = {LOGITS: (heads.query, heads.softmax), WEIGHTS: (heads.softmax, heads.output)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}_proj": shape for name, shape in mixed.items() if heads.talking in (name, BOTH)
    }
    for name in heads.dynamic:
        input_dim = query_dim if name.startswith("x") else key_input_dim
        shapes[f"{name}_proj"] = (input_dim, *mixed[DYNAMIC_PROJECTIONS[name]])
    return shapes


def projection_std(name: str, shape: tuple[int, ...], initialization: str) -> float | None:
    """Return the initial standard deviation of a talking-heads parameter, or None if it starts as the identity.

    The variance is 1 / fan-in, as in the code of the authors. A dynamic projection [input size, h_in, h_out] is added
    to another projection. With identity initialization it starts as zeros, so that the outputs do not change.
    Otherwise its variance is scaled by 0.01 / h_in, because larger values made training difficult.

    Args:
        name: the name of the parameter.
        shape: its shape.
        initialization: the `talking_heads_init` of the attention.
    """
    if name in HEAD_PROJECTIONS:
        return None if initialization == IDENTITY else shape[0] ** -0.5
    return 0.0 if initialization == IDENTITY else (1e-2 / shape[1] / shape[0]) ** 0.5


def mixing_flops(heads: "AttentionHeads", query_dim: int, key_input_dim: int, attended: int) -> tuple[int, int]:
    """Return the floating-point operations per key token, and per query token.

    Args:
        heads, query_dim, key_input_dim: the arguments of `projection_shapes`.
        attended: the number of keys that a query attends to.
    """
    of_key = of_query = 0
    for name, shape in projection_shapes(heads, query_dim, key_input_dim).items():
        of_query += 2 * attended * shape[-2] * shape[-1]
        if name not in HEAD_PROJECTIONS:  # a dynamic projection is first computed from each token
            of_term = 2 * shape[0] * shape[1] * shape[2]
            of_query += of_term if name[0] == "x" else 0
            of_key += of_term if name[0] == "m" else 0
    return of_key, of_query


def query_heads_there(config: Any, prefix: str) -> int:
    """Return h_k, the number of query heads at a place."""
    return config.query_heads(key_value_field(prefix))


def listed_by_layer(config: Any, prefixes: Iterable[str]) -> set[str]:
    """Return the talking-heads fields of the given places that have per-layer values."""
    return {prefix + name for prefix in prefixes for name in TALKING_FIELDS} & {*(config.per_layer_values or {})}


def talking_group(config: Any, prefix: str) -> str:
    """Return the prefix of the fields that a place uses: its own if any of these is given, otherwise ""."""
    by_layer = config.per_layer_values or {}
    names = [prefix + name for name in TALKING_FIELDS]
    return prefix if any(name in by_layer or getattr(config, name, None) is not None for name in names) else ""


def layers_of(config: Any, prefix: str) -> list[TalkingHeads]:
    """Return the talking-heads settings of each layer of a place, or one entry if all layers are equal."""
    listed = listed_by_layer(config, (talking_group(config, prefix),))
    layers = range(config.layer_count(prefix + KIND)) if listed else (0,)
    return [TalkingHeads.of(config, prefix, layer) for layer in layers]
