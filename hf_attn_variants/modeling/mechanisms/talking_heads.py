"""Talking-heads attention, with projections across the heads before and after the softmax (arXiv 2003.02436).

P_l and P_w are defined in section 3 of the paper, and their input-dependent terms in section 5. The five fields
without a prefix apply to all attention modules. If any of the five fields with the prefix `encoder_` or `cross_` is
set, the encoder or cross-attention only uses the fields with this prefix. This module does not import torch, because
the commands use these names in their flags.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .head_sharing import get_kv_heads_field
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
    "DynamicTalkingHeads",
    "TalkingHeadsSettings",
    "count_talking_heads_flops",
    "describe_talking_heads_init",
    "get_dynamic_terms",
    "get_num_query_heads",
    "get_per_layer_talking_heads_fields",
    "get_settings_prefix",
    "get_talking_heads_init_std",
    "get_talking_heads_parameter_shapes",
    "get_talking_heads_prefixes",
    "has_talking_heads",
    "supports_cache",
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
# The dynamic projections, which are computed from query inputs (x) or key inputs (m), and the static projections to
# which they are added.
X2L, M2L, X2W, M2W = "x2l", "m2l", "x2w", "m2w"
DYNAMIC_PROJECTIONS = {X2L: LOGITS, M2L: LOGITS, X2W: WEIGHTS, M2W: WEIGHTS}
# P_l and P_w. Weight decay would pull them toward zero instead of the identity.
HEAD_PROJECTIONS = ("logits_proj", "weights_proj")
# A regular expression that matches talking-heads parameters in a state dict.
PROJECTION_KEYS = r"\.(logits|weights|[xm]2[lw])_proj$"


@dataclass(frozen=True)
class TalkingHeadsSettings(Mechanism):
    """The talking-heads settings of one attention module.

    Args:
        kind: the static projections: None, "logits", "weights" or "both".
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
    def from_config(cls, config: Any, prefix: str, layer: int) -> "TalkingHeadsSettings":
        """Return the talking-heads settings of one layer at a place.

        Args:
            config: a variant configuration with valid fields.
            prefix: the prefix of the place, one of `get_talking_heads_prefixes`.
            layer: the index of the layer in the encoder or decoder.
        """
        heads, group = get_num_query_heads(config, prefix), get_settings_prefix(config, prefix)
        kind, softmax, output, init, dynamic = (config.get_layer_value(group + name, layer) for name in TALKING_FIELDS)
        if kind in (None, NONE):
            return cls(None, heads, heads)
        softmax = softmax or heads
        output = output or (softmax if kind == LOGITS else heads)
        return cls(kind, softmax, output, init or IDENTITY, tuple(dynamic or ()))


class DynamicTalkingHeads(Mechanism):
    """The input-dependent terms of talking-heads projections. This class is not instantiated."""

    field = DYNAMIC
    paper = TalkingHeadsSettings.paper

    @classmethod
    def find_requesting_field(cls, config: Any, prefix: str) -> tuple[str, list[str]] | None:
        """Return the field for input-dependent terms, without a prefix, and the terms that any layer at a place uses.

        The result is None if no layer at the place uses such terms.
        """
        terms = get_dynamic_terms(config, prefix) if prefix in get_talking_heads_prefixes(config) else []
        return (cls.field, terms) if terms else None


def get_talking_heads_prefixes(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the talking-heads fields of a configuration: "", and for example "cross_"."""
    return tuple(prefix for prefix in PREFIXES if hasattr(config, prefix + KIND))


def has_talking_heads(config: Any, prefix: str | None = None) -> bool:
    """Return True if any layer at a place has talking heads. If `prefix` is None, all places are checked."""
    places = get_talking_heads_prefixes(config) if prefix is None else (prefix,)
    return any(talking.kind for place in places for talking in get_settings_per_layer(config, place))


def get_dynamic_terms(config: Any, prefix: str = "") -> list[str]:
    """Return the input-dependent terms that any layer at a place uses, in the order of `DYNAMIC_PROJECTIONS`."""
    terms = {name for talking in get_settings_per_layer(config, prefix) for name in talking.dynamic}
    return [name for name in DYNAMIC_PROJECTIONS if name in terms]


def describe_talking_heads_init(config: Any) -> str:
    """Describe how new talking-heads projections are initialized and how this changes the outputs."""
    talking = [
        heads for prefix in get_talking_heads_prefixes(config) for heads in get_settings_per_layer(config, prefix)
    ]
    if any(heads.init == RANDOM for heads in talking):
        return f'They are initialized randomly (`{INIT}="{RANDOM}"`), which changes the outputs. Train the model'
    if any(heads.dynamic for heads in talking):
        return f"They are initialized as the identity and the terms of `{DYNAMIC}` as zeros. The outputs do not change"
    return "They are initialized as the identity, so the outputs do not change"


def supports_cache(dynamic: Iterable[str] | None) -> bool:
    """Return True if a decoder can use a cache with these input-dependent terms in its self-attention."""
    return not any(name[0] == "m" for name in dynamic or ())


def get_talking_heads_parameter_shapes(
    heads: "AttentionHeads", query_dim: int, key_input_dim: int
) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each talking-heads parameter in an attention module.

    Args:
        heads: the head counts and talking-heads settings of the attention module.
        query_dim: the input size of the query projection.
        key_input_dim: the input size of the key and value projections.
    """
    mixed = {LOGITS: (heads.query, heads.softmax), WEIGHTS: (heads.softmax, heads.output)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}_proj": shape for name, shape in mixed.items() if heads.talking in (name, BOTH)
    }
    for name in heads.dynamic:
        input_dim = query_dim if name.startswith("x") else key_input_dim
        shapes[f"{name}_proj"] = (input_dim, *mixed[DYNAMIC_PROJECTIONS[name]])
    return shapes


def get_talking_heads_init_std(name: str, shape: tuple[int, ...], initialization: str) -> float | None:
    """Return the initial standard deviation of a parameter, or None if it is initialized as the identity.

    As in the authors' code, the variance is 1 / fan-in. A dynamic projection [input size, h_in, h_out] is added to a
    static projection. With identity initialization, dynamic projections are initialized to zero, so that the outputs
    do not change. Otherwise, their variance is scaled by 0.01 / h_in, because larger values made training difficult.

    Args:
        name: the name of the parameter.
        shape: its shape.
        initialization: the `talking_heads_init` of the attention module.
    """
    if name in HEAD_PROJECTIONS:
        return None if initialization == IDENTITY else shape[0] ** -0.5
    return 0.0 if initialization == IDENTITY else (1e-2 / shape[1] / shape[0]) ** 0.5


def count_talking_heads_flops(
    heads: "AttentionHeads", query_dim: int, key_input_dim: int, num_keys: int
) -> tuple[int, int]:
    """Return the number of floating-point operations per key token and per query token.

    Args:
        heads, query_dim, key_input_dim: see `get_talking_heads_parameter_shapes`.
        num_keys: the number of keys that a query attends to.
    """
    key_flops = query_flops = 0
    for name, shape in get_talking_heads_parameter_shapes(heads, query_dim, key_input_dim).items():
        query_flops += 2 * num_keys * shape[-2] * shape[-1]
        if name not in HEAD_PROJECTIONS:  # a dynamic projection is first computed for each token
            projection_flops = 2 * shape[0] * shape[1] * shape[2]
            query_flops += projection_flops if name[0] == "x" else 0
            key_flops += projection_flops if name[0] == "m" else 0
    return key_flops, query_flops


def get_num_query_heads(config: Any, prefix: str) -> int:
    """Return h_k, the number of query heads for one kind of attention."""
    return config.get_query_heads(get_kv_heads_field(prefix))


def get_per_layer_talking_heads_fields(config: Any, prefixes: Iterable[str]) -> set[str]:
    """Return the talking-heads fields with per-layer values at the given places."""
    return {prefix + name for prefix in prefixes for name in TALKING_FIELDS} & {*(config.per_layer_values or {})}


def get_settings_prefix(config: Any, prefix: str) -> str:
    """Return `prefix` if a per-place field with this prefix is set, and otherwise "", whose fields then apply."""
    per_layer_values = config.per_layer_values or {}
    names = [prefix + name for name in TALKING_FIELDS]
    return prefix if any(name in per_layer_values or getattr(config, name, None) is not None for name in names) else ""


def get_settings_per_layer(config: Any, prefix: str) -> list[TalkingHeadsSettings]:
    """Return the talking-heads settings of each layer at a place, or only one entry if all layers have the same."""
    listed = get_per_layer_talking_heads_fields(config, (get_settings_prefix(config, prefix),))
    layers = range(config.get_num_layers(prefix + KIND)) if listed else (0,)
    return [TalkingHeadsSettings.from_config(config, prefix, layer) for layer in layers]
