"""Finds the mechanisms that a configuration uses, and checks that they can be combined.

`UNSUPPORTED_PAIRS` lists the pairs that cannot be combined, with the reasons. All other mechanisms can be combined.
Each mechanism's `check` method contains its requirements for the architecture, for the encoder or decoder, and for its
own fields.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..mechanisms.additive_score import AdditiveScore
from ..mechanisms.attention_extension import WEIGHT_STAGE, AttentionExtension, install_extension
from ..mechanisms.attention_sink import AttentionSink
from ..mechanisms.clipped_softmax import ClippedSoftmax
from ..mechanisms.dex import DifferentialExtension
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.kernels.elementwise_kernels import EluKernel, ReluKernel
from ..mechanisms.kernels.linformer_kernel import LinformerKernel
from ..mechanisms.knocking_heads import KnockingHeads
from ..mechanisms.latents import LatentAttention
from ..mechanisms.mechanism import NONE, PREFIXES, Mechanism, get_registered_class
from ..mechanisms.output_gate import OutputGate
from ..mechanisms.patterns.attention_pattern import AttentionPattern
from ..mechanisms.patterns.compressed_pattern import MemoryCompressedPattern
from ..mechanisms.patterns.transient_global import TransientGlobalPattern
from ..mechanisms.score_function import ScoreFunction
from ..mechanisms.score_table import get_score_class
from ..mechanisms.sinusoidal_positions import RelativePositionBias
from ..mechanisms.talking_heads import DynamicTalkingHeads, TalkingHeadsSettings
from ..ops.variant_attention import VariantAttention
from ..variant_names import EAGER, INCLUDED_MECHANISMS, RECORDING_IMPLEMENTATION, SDPA
from .field_table import VARIANT_FIELDS

__all__ = [
    "ATTENTION_EXTENSIONS",
    "EXTENSION_FIELDS",
    "ROTARY_LATENT_REASON",
    "UNSUPPORTED_PAIRS",
    "check_combinations",
    "check_implementation",
    "check_mechanisms_included",
    "create_score_function",
    "get_registered_mechanisms",
    "get_requested_extensions",
    "get_used_mechanisms",
    "install_extensions",
]

EXTENSION_FIELDS = tuple(row.name for row in VARIANT_FIELDS if "extension" in row.tags)
# The field that selects each mechanism, without the prefix of a place.
MECHANISMS = {
    "attention_kernel": "linear_attention",
    "attention_pattern": "patterns",
    "kv_lora_rank": "latents",
    "per_layer_values": "unequal_layers",
    "position_embedding_type": "sinusoidal_positions",
    "score_function": "additive_score",
    "talking_heads": "talking_heads",
    "value_head_dim": "unequal_values",
    **{name: name for name in EXTENSION_FIELDS},
}
# Values that select no mechanism. "absolute" selects the default positions of the architecture.
UNUSED_VALUES = (None, NONE, False, "absolute")

# The attention extensions in the order in which they are applied. DEX is the last one because the output projection
# expresses it.
ATTENTION_EXTENSIONS = (KnockingHeads, AttentionSink, ClippedSoftmax, OutputGate, DifferentialExtension)
_WEIGHT_EXTENSIONS = [extension for extension in ATTENTION_EXTENSIONS if extension.stage == WEIGHT_STAGE]


def get_used_mechanisms(config: Any) -> frozenset[str]:
    """Return the mechanisms that a model with this configuration uses.

    Grouped heads are not included in the result, because all repositories support them.

    Example:

    ```py
    >>> from hf_attn_variants import AttnVariantBertConfig
    >>> from hf_attn_variants.modeling.fields.composition import get_used_mechanisms
    >>> get_used_mechanisms(AttnVariantBertConfig(attention_pattern="sliding_window", attention_window=64))
    frozenset({'patterns'})
    ```
    """
    return frozenset(
        mechanism
        for field, mechanism in MECHANISMS.items()
        if any(value not in UNUSED_VALUES for value in _iterate_values(config, field))
    )


def get_registered_mechanisms(config: Any) -> list[type[Mechanism]]:
    """Return the classes from plugins that a model with this configuration uses."""
    fields = ("attention_kernel", "score_function")
    classes = [get_registered_class(field, value) for field in fields for value in _iterate_values(config, field)]
    return list(dict.fromkeys(filter(None, classes)))


def _iterate_values(config: Any, field: str) -> Iterator[Any]:
    """Yield the values of a field in all places and layers."""
    per_layer_values = config.per_layer_values if isinstance(config.per_layer_values, Mapping) else {}
    for name in (prefix + field for prefix in PREFIXES):
        layers = per_layer_values.get(name)
        yield from (getattr(config, name, None), *(layers if isinstance(layers, list | tuple) else ()))


def check_mechanisms_included(used_mechanisms: frozenset[str]) -> None:
    """Check that the code in this repository includes the mechanisms that a configuration uses.

    Raises:
        ValueError: if the code was saved without one of the mechanisms.
    """
    missing = [] if INCLUDED_MECHANISMS is None else sorted(used_mechanisms - {*INCLUDED_MECHANISMS})
    if missing:
        raise ValueError(
            f"The code of this repository does not include {', '.join(missing)}, because the saved model "
            "did not use them. Install hf_attn_variants and import it before you load the model."
        )


class UnsupportedPair(NamedTuple):
    """Two mechanisms that cannot be combined in the same attention module.

    Args:
        first, second: the classes of the mechanisms. A base class (`AttentionKernel`, `AttentionPattern`) represents
            all of its subclasses.
        reason: the reason, which is shown after the first sentence of the error message.
    """

    first: type[Mechanism]
    second: type[Mechanism]
    reason: str

    def format_message(self, first: tuple[str, Any], second: tuple[str, Any]) -> str:
        """Return the error message, given the field and the value of each mechanism."""
        return f"`{first[0]}` and `{second[0]}` cannot be combined, got {first[1]!r} and {second[1]!r}. {self.reason}"


UNSUPPORTED_PAIRS = (
    UnsupportedPair(AttentionPattern, DynamicTalkingHeads, "Patterns do not support input-dependent projections."),
    UnsupportedPair(
        MemoryCompressedPattern,
        RelativePositionBias,
        "Keys that are computed from several tokens have no distance. "
        'Use `position_embedding_type="sinusoidal"`, which adds no relative position bias.',
    ),
    UnsupportedPair(
        MemoryCompressedPattern,
        LatentAttention,
        "Latent attention does not compute the keys that would be compressed.",
    ),
    UnsupportedPair(
        TransientGlobalPattern,
        LatentAttention,
        "Summaries require keys and values, which latent attention does not compute.",
    ),
    UnsupportedPair(ScoreFunction, AttentionKernel, "A kernel does not compute scores."),
    UnsupportedPair(AttentionKernel, TalkingHeadsSettings, "Talking heads require a softmax, which kernels replace."),
    UnsupportedPair(AttentionKernel, AttentionPattern, "Patterns require a softmax, which kernels replace."),
    UnsupportedPair(AttentionKernel, LatentAttention, "The cache stores the sums of a kernel instead of latents."),
    UnsupportedPair(
        AttentionKernel,
        RelativePositionBias,
        "A relative position bias is not a product of features. "
        'Use `position_embedding_type="sinusoidal"`, or only `cross_attention_kernel`.',
    ),
    *(UnsupportedPair(kind, AttentionKernel, "A kernel does not compute a softmax.") for kind in _WEIGHT_EXTENSIONS),
)
# Mechanisms that do not support rotary positions (RoFormer, arXiv 2104.09864), with the reasons.
ROTARY_LATENT_REASON = (
    "Latents require a rotary part of their own, as in DeepSeek's MLA (arXiv 2405.04434, section 2.1.3). Use fewer "
    "key/value heads instead."
)
_NOT_A_DISTANCE = "The scores of rotated queries and keys would not depend only on the distance of two tokens."
UNSUPPORTED_WITH_ROTARY: tuple[tuple[type[Mechanism], str], ...] = (
    (LatentAttention, ROTARY_LATENT_REASON),
    (AdditiveScore, _NOT_A_DISTANCE),
    (EluKernel, f'{_NOT_A_DISTANCE} Use "favor" or "rfa", which estimate the softmax, or "hedgehog" or "hybrid".'),
    (ReluKernel, f'{_NOT_A_DISTANCE} Use "favor" or "rfa", which estimate the softmax, or "hedgehog" or "hybrid".'),
    (LinformerKernel, "It adds up keys that are rotated by different angles."),
    (MemoryCompressedPattern, "It adds up keys that are rotated by different angles."),
)
# Mechanisms that attention functions from other packages would ignore, in the order of the checks.
IGNORED_BY_OTHERS: tuple[type[Mechanism], ...] = (
    TalkingHeadsSettings,
    ScoreFunction,
    AttentionKernel,
    AttentionPattern,
    *_WEIGHT_EXTENSIONS,
)


def check_combinations(config: Any) -> None:
    """Check that no attention module combines two mechanisms that are listed in `UNSUPPORTED_PAIRS`.

    Raises:
        ValueError: if an attention module uses both mechanisms of a pair, or a mechanism that does not support the
            rotary positions of the architecture. The message contains the reason. The error is also raised if the
            value of an extension is invalid.
    """
    has_rotary_positions = getattr(config, "rope_parameters", None) is not None
    for prefix in PREFIXES:
        for extension in ATTENTION_EXTENSIONS:
            extension.find_requesting_field(config, prefix)
        for mechanism, reason in UNSUPPORTED_WITH_ROTARY if has_rotary_positions else ():
            if (requested := mechanism.find_requesting_field(config, prefix)) is not None:
                raise ValueError(
                    f"`{requested[0]}` must not be {requested[1]!r} in a model with rotary positions. {reason}"
                )
        for row in UNSUPPORTED_PAIRS:
            first = row.first.find_requesting_field(config, prefix)
            second = None if first is None else row.second.find_requesting_field(config, prefix)
            if first is not None and second is not None:
                raise ValueError(row.format_message(first, second))


def get_requested_extensions(config: Any, prefix: str) -> dict[type[AttentionExtension], tuple[str, Any]]:
    """Return the extensions of the attention modules at a place, with the field and the value that request each."""
    requested = {extension: extension.find_requesting_field(config, prefix) for extension in ATTENTION_EXTENSIONS}
    return {extension: request for extension, request in requested.items() if request is not None}


def create_score_function(module: VariantAttention, config: Any, prefix: str) -> ScoreFunction | None:
    """Create the score function of an attention module, or return None if it uses dot products.

    Args:
        module: the attention module, whose head counts must already be set.
        config: a variant configuration.
        prefix: the prefix of the module's place.
    """
    if (requested := ScoreFunction.find_requesting_field(config, prefix)) is None:
        return None
    heads, score = module.heads, get_score_class(requested[1])
    return score(heads.query, heads.key, heads.head_dim, next(module.parameters()))


def install_extensions(module: VariantAttention, config: Any, prefix: str, query_dim: int) -> None:
    """Add the extensions that a configuration requests at a place to one of its attention modules.

    Args:
        module: the attention module, whose head counts must already be set.
        config: a variant configuration.
        prefix: the prefix of the place.
        query_dim: the input size of the query projection.
    """
    for extension, (_, value) in get_requested_extensions(config, prefix).items():
        install_extension(module, extension(value, module.heads, query_dim, next(module.parameters())))


def check_implementation(config: Any, implementation: Any) -> None:
    """Check that an attention implementation supports the mechanisms in a configuration.

    Raises:
        ValueError: if the implementation would ignore talking heads, a pattern, a score function or a kernel, or if it
            requires value heads and key heads to have the same size.
    """
    if implementation in (None, "eager", "sdpa", EAGER, SDPA, RECORDING_IMPLEMENTATION):
        return
    if config.value_head_dim is not None:
        raise ValueError(
            '`attn_implementation` must be "sdpa" or "eager" with '
            f'value_head_dim={config.value_head_dim}, got "{implementation}". Its kernels require value '
            "heads and key heads of the same size."
        )
    if get_used_mechanisms(config):
        _check_no_mechanism_is_ignored(config, implementation)


def _check_no_mechanism_is_ignored(config: Any, implementation: Any) -> None:
    for mechanism in IGNORED_BY_OTHERS:
        for prefix in PREFIXES:
            if (requested := mechanism.find_requesting_field(config, prefix)) is not None:
                raise ValueError(
                    f'`attn_implementation` must be "sdpa" or "eager" with {requested[0]}="{requested[1]}", got '
                    f'"{implementation}". It would ignore this mechanism.'
                )
