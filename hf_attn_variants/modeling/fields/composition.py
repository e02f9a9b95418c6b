"""The mechanisms that a configuration uses, and the pairs of mechanisms that cannot be combined.

`REFUSED` lists the pairs with their error messages. All other pairs combine. The `check` method of a mechanism
contains its requirements for the architecture, for the encoder or decoder and for its own fields.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..mechanisms.additive_score import AdditiveScore
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.latents import Latent
from ..mechanisms.mechanism import NONE, PREFIXES, Mechanism
from ..mechanisms.patterns.attention_pattern import AttentionPattern
from ..mechanisms.patterns.compressed_pattern import MemoryCompressed
from ..mechanisms.patterns.transient_global import TransientPattern
from ..mechanisms.sinusoidal_positions import DistanceBias
from ..mechanisms.talking_heads import DynamicTerms, TalkingHeads
from ..variant_names import EAGER, INCLUDED, RECORDING, SDPA

__all__ = [
    "REFUSED",
    "Refusal",
    "check_implementation",
    "check_included",
    "check_together",
    "used_mechanisms",
]

# The field that selects each mechanism, without the prefix of a place.
MECHANISMS = {
    "attention_kernel": "linear_attention",
    "attention_pattern": "patterns",
    "kv_lora_rank": "latents",
    "per_layer_values": "unequal_layers",
    "position_embedding_type": "sinusoidal_positions",
    "score_function": "additive_score",
    "talking_heads": "talking_heads",
}
# Values that select nothing: "absolute" is the name of an architecture's own positions.
IDLE = (None, NONE, "absolute")


def used_mechanisms(config: Any) -> frozenset[str]:
    """Return the mechanisms that attention modules of a configuration use.

    Grouped heads are not among them: every repository includes these.

    Example:
        >>> used_mechanisms(AttnVariantBertConfig(attention_pattern="sliding_window", attention_window=64))
        frozenset({'patterns'})
    """
    by_layer = config.per_layer_values if isinstance(config.per_layer_values, Mapping) else {}
    used = set()
    for field, mechanism in MECHANISMS.items():
        for name in (prefix + field for prefix in PREFIXES):
            layers = by_layer.get(name)
            values = [getattr(config, name, None), *(layers if isinstance(layers, list | tuple) else ())]
            if any(value not in IDLE for value in values):
                used.add(mechanism)
    return frozenset(used)


def check_included(used: frozenset[str]) -> None:
    """Check that the code of this repository includes the mechanisms that a configuration uses.

    Raises:
        ValueError: if it was saved without one of them.
    """
    missing = [] if INCLUDED is None else sorted(used - {*INCLUDED})
    if missing:
        raise ValueError(
            f"The code of this repository does not include {', '.join(missing)}, because the model was saved without. "
            "Install hf_attn_variants and import it before you load the model."
        )


class Refusal(NamedTuple):
    """Two mechanisms that the same attention cannot have.

    Args:
        one, other: classes of the mechanisms. A base class (`AttentionKernel`, `AttentionPattern`) includes all of its
            subclasses.
        words: error message. It formats the field and the value of `one` as {field} and {value}, and those of `other`
            as {other} and {beside}.
    """

    one: type[Mechanism]
    other: type[Mechanism]
    words: str


REFUSED = (
    Refusal(
        AttentionPattern,
        DynamicTerms,
        "`{field}` and `{other}` cannot stand together; got {value!r} and {beside}.",
    ),
    Refusal(
        MemoryCompressed,
        DistanceBias,
        '`{field}="{value}"` cannot stand beside a bias by distance: a key made of several tokens has no distance '
        '(`position_embedding_type="sinusoidal"` adds no such bias).',
    ),
    Refusal(
        MemoryCompressed,
        Latent,
        '`{field}="{value}"` cannot stand beside a latent, whose keys are not made; got {other}={beside}.',
    ),
    Refusal(
        TransientPattern,
        Latent,
        '`{field}="{value}"` and `{other}` cannot stand together; got {beside}.',
    ),
    Refusal(
        AdditiveScore,
        AttentionKernel,
        "`{field}` and `{other}` cannot stand together: a kernel has no scores; got {value!r} and {beside!r}.",
    ),
    Refusal(
        AttentionKernel,
        TalkingHeads,
        "`{field}` and `{other}` cannot stand together: heads talk before or after a softmax; got {value!r} and "
        "{beside!r}.",
    ),
    Refusal(
        AttentionKernel,
        AttentionPattern,
        "`{field}` and `{other}` cannot stand together: a window is of a softmax; got {value!r} and {beside!r}.",
    ),
    Refusal(
        AttentionKernel,
        Latent,
        "`{field}` and `{other}` cannot stand together: a latent keeps what a kernel does not read again; got "
        "{value!r} and {beside}.",
    ),
    Refusal(
        AttentionKernel,
        DistanceBias,
        "`{field}` is of attention without relative positions: T5's bias of a query and a key is no product of "
        'features. Give `position_embedding_type="sinusoidal"`, or `cross_attention_kernel` alone; got {value!r}.',
    ),
)
# Mechanisms that the attention functions of other packages would ignore, in the order of the checks. The error message
# contains the text of the row.
IGNORED_BY_OTHERS: tuple[tuple[type[Mechanism], str], ...] = (
    (TalkingHeads, '{field}="{value}"'),
    (AdditiveScore, '{field}="{value}"'),
    (AttentionKernel, "an attention_kernel"),
    (AttentionPattern, "an attention_pattern"),
)


def check_together(config: Any) -> None:
    """Check that no attention of a configuration has both mechanisms of a row of `REFUSED`.

    Raises:
        ValueError: if an attention has both, with the message of the row.
    """
    for prefix in PREFIXES:
        for row in REFUSED:
            one = row.one.requested_in(config, prefix)
            other = None if one is None else row.other.requested_in(config, prefix)
            if one is not None and other is not None:
                raise ValueError(row.words.format(field=one[0], value=one[1], other=other[0], beside=other[1]))


def check_implementation(config: Any, implementation: Any) -> None:
    """Check that an attention implementation can compute the mechanisms of a configuration.

    Raises:
        ValueError: if the implementation would ignore talking heads, a pattern, a score function or a kernel, or if it
            requires value heads of the size of the key heads.
    """
    if implementation in (None, "eager", "sdpa", EAGER, SDPA, RECORDING):
        return
    if config.value_head_dim is not None:
        raise ValueError(
            f'value_head_dim={config.value_head_dim} cannot run under attn_implementation="{implementation}", whose '
            'kernels want values of the size of keys: use "sdpa" or "eager".'
        )
    if used_mechanisms(config):
        _check_not_ignored(config, implementation)


def _check_not_ignored(config: Any, implementation: Any) -> None:
    for mechanism, words in IGNORED_BY_OTHERS:
        for prefix in PREFIXES:
            if (asked := mechanism.requested_in(config, prefix)) is not None:
                what = words.format(field=asked[0], value=asked[1])
                raise ValueError(
                    f'{what} cannot run under attn_implementation="{implementation}", which would ignore it: use '
                    '"sdpa" or "eager".'
                )
