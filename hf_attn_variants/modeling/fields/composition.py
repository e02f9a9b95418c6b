"""Which mechanisms go together: a table of the pairs that do not, each with what the error says.

All other pairs combine. What a mechanism asks of a host, of a stack or of its own fields is in its own `check`.
"""

from typing import Any, NamedTuple

from ..mechanisms.additive_score import AdditiveScore
from ..mechanisms.kernels.attention_kernel import AttentionKernel
from ..mechanisms.latents import Latent
from ..mechanisms.mechanism import PREFIXES, Mechanism
from ..mechanisms.patterns.attention_pattern import AttentionPattern
from ..mechanisms.patterns.compressed_pattern import MemoryCompressed
from ..mechanisms.patterns.transient_pattern import TransientPattern
from ..mechanisms.sinusoidal_positions import DistanceBias
from ..mechanisms.talking_heads import DynamicTerms, TalkingHeads
from ..variant_names import EAGER, RECORDING, SDPA
from .used_mechanisms import used_mechanisms

__all__ = ["REFUSED", "Refusal", "check_implementation", "check_together"]


class Refusal(NamedTuple):
    """Two mechanisms that one attention cannot have.

    Args:
        one, other: their classes. A base class (`AttentionKernel`, `AttentionPattern`) stands for all of its kind.
        words: the error's; {field} and {value} are the first one's, {other} and {beside} the second one's.
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
# What attention functions other than ours would ignore, in the order in which the error looks for it. It names the
# field with its value, or says this.
IGNORED_BY_OTHERS: tuple[tuple[type[Mechanism], str], ...] = (
    (TalkingHeads, '{field}="{value}"'),
    (AdditiveScore, '{field}="{value}"'),
    (AttentionKernel, "an attention_kernel"),
    (AttentionPattern, "an attention_pattern"),
)


def check_together(config: Any) -> None:
    """Check that no attention of a configuration has two mechanisms of a row of `REFUSED`.

    Raises:
        ValueError: where one has; the message is the row's.
    """
    for prefix in PREFIXES:
        for row in REFUSED:
            one = row.one.asked_for(config, prefix)
            other = None if one is None else row.other.asked_for(config, prefix)
            if one is not None and other is not None:
                raise ValueError(row.words.format(field=one[0], value=one[1], other=other[0], beside=other[1]))


def check_implementation(config: Any, implementation: Any) -> None:
    """Check that an attention implementation can compute what a configuration asks for.

    Raises:
        ValueError: where it would ignore talking heads, a pattern, a score or a kernel, or takes values to be as wide
            as keys.
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
            if (asked := mechanism.asked_for(config, prefix)) is not None:
                what = words.format(field=asked[0], value=asked[1])
                raise ValueError(
                    f'{what} cannot run under attn_implementation="{implementation}", which would ignore it: use '
                    '"sdpa" or "eager".'
                )
