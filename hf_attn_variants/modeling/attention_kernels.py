"""Attention without a softmax: the fields of a configuration that say by which kernel, their checks, and one's kernel.

`attention_kernel` names the features phi of which an attention's weights are phi(q) phi(k)^T, each row divided by its
sum: "elu" (arXiv 2006.16236), "hedgehog" (2402.04347), "favor" (2009.14794) or "rfa" (2103.02143); "hybrid" is a
softmax in a window and hedgehog's features outside of it (2410.10254), "linformer" a softmax over keys and values that
are projected along the length (2006.04768). Of an encoder-decoder the field without a
prefix is the decoder's self-attention, `encoder_attention_kernel` the encoder's and `cross_attention_kernel` that of
cross-attention. The maths is in `linear_attention`, `hybrid_attention` and `length_projection`.
"""

import zlib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .attention_patterns import Reach, has_pattern
from .field_checks import check_size

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "KernelFields",
    "asks_for_padding_alone",
    "check_kernels",
    "checked_kernel",
    "has_kernel",
]

KERNELS = ("elu", "hedgehog", "favor", "rfa", "hybrid", "linformer")
PREFIXES = ("", "encoder_", "cross_")
# Of a head of d numbers: hedgehog's maps are as wide as the head, vectors and rows are as many as in the papers.
DEFAULT_FEATURES = {"hedgehog": 1, "favor": 4, "rfa": 2, "hybrid": 1, "linformer": 4}
# Whose features are random vectors, and whose are learned.
RANDOM, LEARNED = ("favor", "rfa"), ("hedgehog", "rfa", "hybrid", "linformer")
MAX_FEATURES, MAX_SEED = 2**16, 2**31


# Fields are of no configuration before they stand beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    class _Config(PreTrainedConfig):
        num_attention_heads: int = 0
        num_hidden_layers: int = 0
        hidden_size: int = 0

        def validate(self) -> None: ...  # which a decorator gives upstream's
else:
    _Config = object


@dataclass(kw_only=True, repr=False)
class KernelFields(_Config):
    """The fields of kernels that every configuration here has.

    Args:
        attention_kernel: what self-attention (of an encoder-decoder: the decoder's) has in the place of a softmax, so
            that time and memory are linear in the length: None (a softmax), "elu", "hedgehog", "favor", "rfa",
            "hybrid", which has a softmax within `attention_window`, or, of encoders, "linformer". By layer None = the
            layer has a softmax.
        attention_kernel_features: the width of hedgehog's learned maps, the number of favor's and rfa's random
            vectors, that of linformer's rows. None = the head's size d, 4 d, 2 d, and 4 d (or as many as positions).
        attention_kernel_seed: of the random vectors.
    """

    attention_kernel: str | None = field(
        default=None,
        metadata={
            "variant": "what self-attention (encoder-decoders: a decoder's) has for a softmax",
            "kernel": True,
            "by_layer": True,
        },
    )
    attention_kernel_features: int | None = field(
        default=None, metadata={"variant": "width of learned maps, number of random vectors or rows", "kernel": True}
    )
    attention_kernel_seed: int = field(default=0, metadata={"variant": "of random vectors", "kernel": True})

    @classmethod
    def kernel_fields(cls) -> tuple[str, ...]:
        """Return the fields that say what attentions have in the place of a softmax."""
        return tuple(each.name for each in fields(cls) if "kernel" in each.metadata)


class AttentionKernel(NamedTuple):
    """The kernel of one attention."""

    name: str
    features: int  # the width of hedgehog's maps, the number of random vectors or of linformer's rows
    is_causal: bool
    seed: int  # of its random vectors
    window: int | None = None  # of a hybrid: w, as `attention_window` has it
    length: int | None = None  # of linformer: the most tokens

    @property
    def maps(self) -> str:
        """The kernel that its features are of."""
        return "hedgehog" if self.name == "hybrid" else self.name

    @property
    def reach(self) -> Reach:
        """What a query reads by a softmax, of a hybrid."""
        return Reach.of(self.window, 1, 0, self.is_causal)

    def width(self, head_dim: int) -> int:
        """Return F, how many features a head of d numbers has."""
        return {"elu": head_dim, "favor": self.features}.get(self.name, 2 * self.features)

    def state_numbers(self, kv_heads: int, head_dim: int) -> int:
        """Return the numbers of a state: a key/value head's sums of values and of weights; a window's tokens."""
        kept = 0 if self.window is None else 2 * self.reach.before * head_dim
        return kv_heads * (self.width(head_dim) * (head_dim + 1) + kept)

    @classmethod
    def of(
        cls, config: Any, prefix: str, head_dim: int, path: str, is_causal: bool, layer: int
    ) -> "AttentionKernel | None":
        """Return the kernel that a configuration gives the attention at a path, if it gives one.

        Args:
            config: a variant configuration.
            prefix: of the field that names the kernel.
            head_dim: d, the size of the attention's heads.
            path: the attention's, inside the base model: each has random vectors of its own.
            is_causal: whether its queries read no later keys.
            layer: the one that it is in.
        """
        if getattr(config, f"{prefix}attention_kernel", None) is None:
            return None
        name = config.layer_value(f"{prefix}attention_kernel", layer)
        if name is None:
            return None
        features = config.attention_kernel_features or DEFAULT_FEATURES.get(name, 1) * head_dim
        window = config.layer_value(f"{prefix}attention_window", layer) if name == "hybrid" else None
        length = most_tokens(config) if name == "linformer" else None
        features = features if length is None else min(features, length)
        seed = zlib.crc32(f"{config.attention_kernel_seed}:{path}".encode())
        return cls(name, features, is_causal, seed, window, length)


def most_tokens(config: Any) -> int | None:
    """Return how many tokens (of audio: positions) an encoder of this configuration reads; None: any number."""
    return getattr(config, "max_source_positions", getattr(config, "max_position_embeddings", None))


def has_kernel(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration has a kernel.

    Args:
        is_causal: of a decoder's self-attention alone; None = any.
    """
    return bool(_kernels(config, PREFIXES[:1] if is_causal else PREFIXES))


def check_kernels(config: Any) -> None:
    """Check the kernel fields of a configuration.

    Raises:
        ValueError: for an unknown kernel, a size that breaks its rule or is of no kernel, a hybrid without a window
            in each layer that has it or in cross-attention, linformer where there is no encoder of a fixed length, and
            a kernel beside what needs a softmax: talking heads, a pattern, a latent, T5's relative positions.
    """
    kernels = _kernels(config)
    for each, name in kernels.items():
        checked_kernel(each, name)
    check_size("attention_kernel_seed", config.attention_kernel_seed, 0, MAX_SEED)
    if config.attention_kernel_features is not None:
        check_size("attention_kernel_features", config.attention_kernel_features, 1, MAX_FEATURES)
        if not set(kernels.values()) & set(DEFAULT_FEATURES):
            raise ValueError(
                f"`attention_kernel_features` is of the kernels {', '.join(DEFAULT_FEATURES)}; got "
                f"{config.attention_kernel_features} with {kernels or 'no kernel'}."
            )
    for each, name in kernels.items():
        _check_composition(config, each, name)


def checked_kernel(field: str, value: Any) -> str | None:
    """Return the value of a field that names a kernel.

    Raises:
        ValueError: for an unknown kernel.
    """
    if value is not None and value not in KERNELS:
        known = ", ".join(f'"{kernel}"' for kernel in KERNELS)
        raise ValueError(f"`{field}` must be None (softmax), or one of {known}; got {value!r}.")
    return value


def _kernels(config: Any, prefixes: tuple[str, ...] = PREFIXES) -> dict[str, str]:
    """Return the kernels that a configuration names, by field."""
    fields = [f"{prefix}attention_kernel" for prefix in prefixes]
    return {name: value for name in fields if (value := getattr(config, name, None)) is not None}


def _check_composition(config: Any, field: str, name: str) -> None:
    prefix = field.removesuffix("attention_kernel")
    if config.talking_heads is not None:
        raise ValueError(
            f"`{field}` and `talking_heads` cannot stand together: heads talk before or after a softmax; got {name!r} "
            f"and {config.talking_heads!r}."
        )
    pattern = f"{prefix}attention_pattern"
    if getattr(config, pattern, None) is not None:
        raise ValueError(
            f"`{field}` and `{pattern}` cannot stand together: a window is of a softmax; got {name!r} and "
            f"{getattr(config, pattern)!r}."
        )
    if name == "hybrid":
        _check_window(config, field, prefix)
    if name == "linformer":
        _check_length(config, field, prefix)
    rank = f"{prefix}kv_lora_rank"
    if getattr(config, rank, None) is not None:
        raise ValueError(
            f"`{field}` and `{rank}` cannot stand together: a latent keeps what a kernel does not read again; got "
            f"{name!r} and {getattr(config, rank)}."
        )
    is_biased = hasattr(config, "relative_attention_num_buckets") and prefix != "cross_"
    if is_biased and getattr(config, "position_embedding_type", None) != "sinusoidal":
        raise ValueError(
            f"`{field}` is of attention without relative positions: T5's bias of a query and a key is no product of "
            f'features. Give `position_embedding_type="sinusoidal"`, or `cross_attention_kernel` alone; got {name!r}.'
        )


def _check_window(config: Any, field: str, prefix: str) -> None:
    if prefix == "cross_":
        raise ValueError(
            f'`{field}="hybrid"` is of self-attention: a query has no place among the keys of cross-attention.'
        )
    window = f"{prefix}attention_window"
    layers = range(config.layer_count(window))
    values = [config.layer_value(window, layer) for layer in layers if config.layer_value(field, layer) is not None]
    if None in values:
        got = values if any(values) else None
        raise ValueError(f'`{field}="hybrid"` needs `{window}`, in each layer that has it; got {got}.')


def _check_length(config: Any, field: str, prefix: str) -> None:
    is_decoder = not prefix and (getattr(config, "is_decoder", False) or hasattr(config, "encoder_attention_kernel"))
    if prefix == "cross_" or is_decoder:
        raise ValueError(
            f'`{field}="linformer"` is of encoders: its rows are sums over all tokens, and those of a decoder grow.'
        )
    length, rows = most_tokens(config), config.attention_kernel_features
    if length is None or getattr(config, "position_embedding_type", None) == "sinusoidal":
        raise ValueError(
            f'`{field}="linformer"` needs a largest number of tokens: `max_position_embeddings`, of learned positions.'
        )
    if rows is not None and rows > length:
        raise ValueError(
            f"`attention_kernel_features` of linformer is at most the number of positions, {length}; got {rows}."
        )


def asks_for_padding_alone(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration wants masks of padding alone: it knows the rest by itself."""
    return has_pattern(config, is_causal) or has_kernel(config, is_causal)
