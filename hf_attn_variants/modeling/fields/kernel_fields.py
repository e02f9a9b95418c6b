"""Attention without a softmax: the fields of a configuration that say by which kernel, and their checks.

`attention_kernel` names it (`kernel_table`). Of an encoder-decoder the field without a prefix is the decoder's
self-attention, `encoder_attention_kernel` the encoder's and `cross_attention_kernel` that of cross-attention.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..mechanisms.kernels.kernel_table import kernel_class, kernels_of
from ..mechanisms.mechanism import PREFIXES
from ..mechanisms.patterns.pattern_table import has_pattern
from .field_checks import check_size
from .field_table import variant_field

__all__ = ["KernelFields", "asks_for_padding_alone", "check_kernels", "has_kernel"]

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
            that time and memory are linear in the length: None (a softmax), "elu", "relu", "hedgehog", "favor", "rfa",
            "hybrid", which has a softmax within `attention_window`, or, of encoders, "linformer". By layer None = the
            layer has a softmax.
        attention_kernel_features: the width of hedgehog's learned maps, the number of favor's and rfa's random
            vectors, that of linformer's rows. None = the head's size d, 4 d, 2 d, and 4 d (or as many as positions).
        attention_kernel_seed: of the random vectors.
    """

    attention_kernel: str | None = variant_field("attention_kernel")
    attention_kernel_features: int | None = variant_field("attention_kernel_features")
    attention_kernel_seed: int = variant_field("attention_kernel_seed")

    @classmethod
    def kernel_fields(cls) -> tuple[str, ...]:
        """Return the fields that say what attentions have in the place of a softmax."""
        return tuple(each.name for each in fields(cls) if "kernel" in each.metadata)


def has_kernel(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration has a kernel.

    Args:
        config: any.
        is_causal: of a decoder's self-attention alone; None = any.
    """
    return bool(kernels_of(config, PREFIXES[:1] if is_causal else PREFIXES))


def asks_for_padding_alone(config: Any, is_causal: bool | None = None) -> bool:
    """Say whether an attention of this configuration wants masks of padding alone: it knows the rest by itself."""
    return has_pattern(config, is_causal) or has_kernel(config, is_causal)


def check_kernels(config: Any) -> None:
    """Check the kernel fields of a configuration.

    Raises:
        ValueError: if a size breaks its rule, or a kernel cannot be part of this model (`AttentionKernel.check`).
    """
    check_size("attention_kernel_seed", config.attention_kernel_seed, 0, MAX_SEED)
    if config.attention_kernel_features is not None:
        check_size("attention_kernel_features", config.attention_kernel_features, 1, MAX_FEATURES)
    for each, name in kernels_of(config).items():
        kernel_class(name).check(config, each)
