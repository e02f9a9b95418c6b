"""The configuration fields of linear attention, which replaces the softmax by a kernel, and their checks.

`attention_kernel` is the name of the kernel (`kernel_table`). In an encoder-decoder, it applies to the self-attention
of the decoder. `encoder_attention_kernel` applies to the encoder, and `cross_attention_kernel` applies to
cross-attention.
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


# This class becomes a configuration only with a class of Transformers, so only the type checker sees it as one.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    class _Config(PreTrainedConfig):
        num_attention_heads: int = 0
        num_hidden_layers: int = 0
        hidden_size: int = 0

        def validate(self) -> None: ...  # a decorator of Transformers adds this method
else:
    _Config = object


@dataclass(kw_only=True, repr=False)
class KernelFields(_Config):
    """The kernel fields that all configurations of this package have.

    Args:
        attention_kernel: the kernel that replaces the softmax of self-attention, with time and memory linear in the
            length. In an encoder-decoder, it applies to the decoder. None = softmax; "elu", "relu", "hedgehog",
            "favor", "rfa"; "hybrid", with a softmax within `attention_window`; "linformer", only for encoders. None
            in `per_layer_values` = the layer has a softmax.
        attention_kernel_features: the width of the learned features ("hedgehog"), the number of random vectors
            ("favor", "rfa") or the number of rows ("linformer"). None = d, 4 d, 2 d or 4 d, where d is the head
            size. The default for "linformer" is at most the number of positions.
        attention_kernel_seed: the seed of the random vectors.
    """

    attention_kernel: str | None = variant_field("attention_kernel")
    attention_kernel_features: int | None = variant_field("attention_kernel_features")
    attention_kernel_seed: int = variant_field("attention_kernel_seed")

    @classmethod
    def kernel_fields(cls) -> tuple[str, ...]:
        """Return the fields that select a kernel instead of a softmax and set its options."""
        return tuple(each.name for each in fields(cls) if "kernel" in each.metadata)


def has_kernel(config: Any, is_causal: bool | None = None) -> bool:
    """Return whether an attention of this configuration has a kernel.

    Args:
        config: any configuration.
        is_causal: True = check only the field without a prefix, the self-attention of a decoder. None = check all.
    """
    return bool(kernels_of(config, PREFIXES[:1] if is_causal else PREFIXES))


def asks_for_padding_alone(config: Any, is_causal: bool | None = None) -> bool:
    """Return whether an attention of this configuration only needs a padding mask and handles the rest itself."""
    return has_pattern(config, is_causal) or has_kernel(config, is_causal)


def check_kernels(config: Any) -> None:
    """Check the kernel fields of a configuration.

    Raises:
        ValueError: if a size breaks its rule, or if the model does not support a kernel (`AttentionKernel.check`).
    """
    check_size("attention_kernel_seed", config.attention_kernel_seed, 0, MAX_SEED)
    if config.attention_kernel_features is not None:
        check_size("attention_kernel_features", config.attention_kernel_features, 1, MAX_FEATURES)
    for each, name in kernels_of(config).items():
        kernel_class(name).check(config, each)
