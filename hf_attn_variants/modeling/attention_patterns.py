"""Which keys a query reads: the fields of a configuration that say it, their checks, and one attention's reach.

`attention_pattern="sliding_window"`: each token reads those near it (Longformer, arXiv 2004.05150, section 3.1), and
the first `num_global_tokens` read everything and are read by everything (section 3.1, "Global Attention"). The other
patterns are those of `block_patterns`. Of an encoder-decoder the fields without a prefix are the decoder's
self-attention, those with `encoder_` the encoder's; cross-attention reads the whole source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "LEARNED_PATTERNS",
    "PATTERNS",
    "PATTERN_FIELDS",
    "BlockPatternFields",
    "Reach",
    "TransientGlobal",
    "check_patterns",
    "checked_pattern_size",
    "has_pattern",
    "takes_global_mask",
]

# The fields of a pattern without their prefix, with what they are where nothing is given.
PATTERN_FIELDS: Mapping[str, Any] = {
    "attention_pattern": None,
    "attention_window": None,
    "attention_dilation": 1,
    "num_global_tokens": 0,
    "attention_block_size": None,
    "num_random_blocks": 0,
    "attention_seed": 0,
    "num_summary_tokens": 0,
    "split_attention_heads": False,
}
# Of each pattern the fields that it needs, and those that it may have.
PATTERNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sliding_window": (("attention_window",), ("attention_dilation", "num_global_tokens")),
    "random_blocks": (("attention_block_size", "num_random_blocks"), ("attention_seed", "num_global_tokens")),
    "strided": (("attention_block_size",), ("split_attention_heads", "num_global_tokens")),
    "fixed": (("attention_block_size", "num_summary_tokens"), ("split_attention_heads", "num_global_tokens")),
    "local_blocks": (("attention_block_size",), ("num_global_tokens",)),
    "memory_compressed": (("attention_block_size",), ()),
    "transient_global": (("attention_window", "attention_block_size"), ()),
}
# Those with parameters, which no conversion makes.
LEARNED_PATTERNS = ("memory_compressed", "transient_global")
# Farther than any text: a layer without a window. Sizes beyond are mistakes.
MAX_SIZE = 2**31


@dataclass(kw_only=True, repr=False)
class BlockPatternFields:
    """The fields of patterns that are made of blocks.

    Args:
        attention_block_size: l, the tokens of a block; "strided": the stride; "memory_compressed": the tokens that
            become one.
        num_random_blocks: "random_blocks": how many others a block reads beside itself and its neighbours.
        attention_seed: "random_blocks": what they are drawn from, once a layer.
        num_summary_tokens: "fixed": how many tokens at each block's end all others read.
        split_attention_heads: "strided" and "fixed": whether half of the heads read near and the others far tokens,
            and not each head both.
    """

    attention_block_size: int | None = field(
        default=None, metadata={"variant": "tokens in a block of the pattern", "pattern": True}
    )
    num_random_blocks: int = field(
        default=0, metadata={"variant": "blocks that a block reads by chance", "pattern": True}
    )
    attention_seed: int = field(default=0, metadata={"variant": "what these are drawn from", "pattern": True})
    num_summary_tokens: int = field(
        default=0, metadata={"variant": "tokens at the end of a block that all read", "pattern": True}
    )
    split_attention_heads: bool = field(
        default=False, metadata={"variant": "half of the heads read near, the others far tokens", "pattern": True}
    )


class Reach(NamedTuple):
    """The keys that one attention's queries read, by positions: key j for query i where i - before <= j <= i + after.

    Of these every `step`-th, counted from the query; and, either of them among the first `global_tokens`, any two.
    """

    before: int
    after: int
    step: int = 1
    global_tokens: int = 0

    @classmethod
    def of(cls, window: int | None, dilation: int, global_tokens: int, is_causal: bool) -> "Reach":
        """Return the reach of a window: half of it on each side, or where causal the query and those before it.

        Args:
            window: w; None = there is none, everything is read.
            dilation: the step from one key to the next.
            global_tokens: the number of the first tokens that are global.
            is_causal: whether a query reads no later key.
        """
        if window is None:
            return cls(MAX_SIZE, 0 if is_causal else MAX_SIZE)
        if is_causal:
            return cls((window - 1) * dilation, 0, dilation)
        return cls(window // 2 * dilation, window // 2 * dilation, dilation, global_tokens)

    @property
    def is_causal(self) -> bool:
        """Whether a query reads no later key."""
        return self.after == 0

    def keys_read(self, memory: int) -> int:
        """Return how many of `memory` keys a query in their midst reads, but for global tokens, which read all."""
        return min(memory, (self.before + self.after) // self.step + 1 + self.global_tokens)

    def allowed(self, queries: Any, keys: Any) -> Any:
        """Return which of the keys at positions [m] the queries at positions [n] read, [n, m]."""
        distance = keys - queries[:, None]
        near = (distance >= -self.before) & (distance <= self.after) & (distance % self.step == 0)
        return near | (keys < self.global_tokens) | (queries < self.global_tokens)[:, None]

    def covers(self, length: int, memory: int) -> bool:
        """Say whether the last `length` of `memory` positions read all of these (causal: all before them)."""
        return self.step == 1 and memory - 1 <= self.before and (self.is_causal or memory - 1 <= self.after)


class TransientGlobal(NamedTuple):
    """The tokens within `radius` of a query, and a summary of each `block` tokens (`transient_global`)."""

    radius: int
    block: int

    @property
    def is_causal(self) -> bool:
        """Never: it is of an encoder."""
        return False

    @property
    def before(self) -> int:
        """All keys: an encoder has no cache."""
        return MAX_SIZE

    def keys_read(self, memory: int) -> int:
        """Return how many of `memory` keys and their summaries a query in their midst reads."""
        return min(memory, 2 * self.radius + 1) + memory // self.block


def check_patterns(config: Any) -> None:
    """Check the pattern fields of a configuration, each stack's.

    Raises:
        ValueError: for an unknown pattern, a size that breaks its rule, a size without its pattern or a pattern
            without a size it needs, global tokens in a decoder, a pattern beside input-dependent talking heads, and
            compressed memory where it has no meaning.
    """
    for prefix in _prefixes(config):
        pattern = getattr(config, f"{prefix}attention_pattern")
        if pattern is not None and (not isinstance(pattern, str) or pattern not in PATTERNS):
            names = ", ".join(f'"{name}"' for name in PATTERNS)
            raise ValueError(f"`{prefix}attention_pattern` must be None or one of {names}; got {pattern!r}.")
        needed, _ = PATTERNS.get(pattern or "", ((), ()))
        for name, default in PATTERN_FIELDS.items():
            value = getattr(config, prefix + name)
            if name != "attention_pattern":
                checked_pattern_size(prefix + name, value)
                if name == "attention_window" and getattr(config, f"{prefix}attention_kernel") == "hybrid":
                    continue  # where the softmax is; all is read
                _check_fits(prefix, name, value, default, pattern)
            if name in needed and value == default:
                raise ValueError(f'`{prefix}attention_pattern="{pattern}"` needs `{prefix}{name}`; got {value}.')
        if pattern is None:
            continue
        block, summary = (getattr(config, prefix + name) for name in ("attention_block_size", "num_summary_tokens"))
        if summary > (block or summary):
            raise ValueError(
                f"`{prefix}num_summary_tokens` are of a block, at most `{prefix}attention_block_size`; got {summary} "
                f"and {block}."
            )
        _check_decoder(config, prefix)
        if pattern == "memory_compressed":
            _check_compression(config, prefix)
        if pattern == "transient_global":
            _check_summaries(config, prefix)
        if config.talking_heads_dynamic:
            raise ValueError(
                f"`{prefix}attention_pattern` and `talking_heads_dynamic` cannot stand together; got {pattern!r} and "
                f"{config.talking_heads_dynamic}."
            )


def _check_fits(prefix: str, name: str, value: Any, default: Any, pattern: str | None) -> None:
    if value == default or name in sum(PATTERNS.get(pattern or "", ((), ())), ()):
        return
    having = [f'"{each}"' for each, fields in PATTERNS.items() if name in sum(fields, ())]
    raise ValueError(
        f"`{prefix}{name}` is of `{prefix}attention_pattern` {' or '.join(having)}; got {value!r} with "
        f"{prefix}attention_pattern={pattern!r}."
    )


def checked_pattern_size(field: str, value: Any) -> Any:
    """Return the value of a pattern's field.

    Raises:
        ValueError: unless a window is an even whole number from 2 (or None), a block's size (or None) and a dilation
            whole numbers from 1, `split_attention_heads` a boolean, and the others whole numbers from 0.
    """
    if field.endswith("split_attention_heads"):
        if not isinstance(value, bool):
            raise ValueError(f"`{field}` must be True or False; got {value!r}.")
        return value
    if value is None and field.endswith(("attention_window", "attention_block_size")):
        return None
    least, rule, wrong = 0, "a whole number", False
    if field.endswith("attention_window"):
        least, rule, wrong = 2, "an even whole number, half of it on each side of a token", value and value % 2
    elif field.endswith(("dilation", "block_size")):
        least = 1
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or wrong or not least <= value <= MAX_SIZE:
        raise ValueError(f"`{field}` must be {rule}, at least {least}; got {value!r}.")
    return value


def has_pattern(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration has a pattern.

    Args:
        is_causal: of a decoder's self-attention alone; None = any.
    """
    names = [f"{prefix}attention_pattern" for prefix in _prefixes(config)]
    return any(getattr(config, name, None) is not None for name in (names[:1] if is_causal else names))


def takes_global_mask(config: Any) -> bool:
    """Say whether a model of this configuration is an encoder that takes a `global_attention_mask`."""
    pattern = getattr(config, "attention_pattern", None)
    has_bias = hasattr(config, "relative_attention_num_buckets")
    _, optional = PATTERNS.get(pattern or "", ((), ()))
    return not (config.is_encoder_decoder or has_bias) and "num_global_tokens" in optional


def _prefixes(config: Any) -> tuple[str, ...]:
    return ("", "encoder_") if hasattr(config, "encoder_attention_pattern") else ("",)


def _check_decoder(config: Any, prefix: str) -> None:
    is_decoder = getattr(config, "is_decoder", False) or len(_prefixes(config)) > 1
    if not prefix and is_decoder and config.num_global_tokens:
        raise ValueError(
            "`num_global_tokens` is of encoders: a decoder's tokens read no later ones; got "
            f"{config.num_global_tokens}."
        )


def _check_compression(config: Any, prefix: str) -> None:
    is_decoder = not prefix and (getattr(config, "is_decoder", False) or len(_prefixes(config)) > 1)
    has_bias = "absolute" not in config.position_types and config.position_embedding_type != "sinusoidal"
    rank = getattr(config, f"{prefix}kv_lora_rank")
    reason = None
    if is_decoder:
        reason = "a decoder, whose tokens read no later ones, and several are read as one"
    elif has_bias:
        reason = (
            'a bias by distance, which one of several tokens has not (`position_embedding_type="sinusoidal"` has none)'
        )
    elif rank is not None:
        reason = f"a latent, whose keys are not made; got {prefix}kv_lora_rank={rank}"
    if reason is not None:
        raise ValueError(f'`{prefix}attention_pattern="memory_compressed"` cannot stand beside {reason}.')


def _check_summaries(config: Any, prefix: str) -> None:
    if not (prefix and config.makes_summaries):
        raise ValueError(
            f'`{prefix}attention_pattern="transient_global"` is of the encoder of T5; got model_type '
            f"{config.model_type!r}."
        )
    if (rank := config.encoder_kv_lora_rank) is not None:
        raise ValueError(
            '`encoder_attention_pattern="transient_global"` and `encoder_kv_lora_rank` cannot stand together; got '
            f"{rank}."
        )
