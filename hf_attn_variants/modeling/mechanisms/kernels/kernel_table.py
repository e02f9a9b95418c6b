"""The table of attention kernels.

This module does not import torch, because the commands use these names in their flags.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from ..mechanism import PREFIXES

if TYPE_CHECKING:
    from .attention_kernel import AttentionKernel

__all__ = ["KERNELS", "get_kernel_class", "get_kernel_names", "get_learned_parameter_names", "get_random_buffer_names"]

KERNELS = ("elu", "relu", "hedgehog", "favor", "rfa", "hybrid", "linformer")


@cache
def get_kernel_class(name: str) -> "type[AttentionKernel]":
    """Return the class of the kernel with this name."""
    from .elementwise_kernels import EluKernel, ReluKernel
    from .favor_kernel import FavorKernel
    from .hedgehog_kernel import HedgehogKernel
    from .hybrid_kernel import HybridKernel
    from .linformer_kernel import LinformerKernel
    from .rfa_kernel import RfaKernel

    return {
        kernel.name: kernel
        for kernel in (EluKernel, ReluKernel, HedgehogKernel, FavorKernel, RfaKernel, HybridKernel, LinformerKernel)
    }[name]


def get_kernel_names(config: Any, prefixes: tuple[str, ...] = PREFIXES) -> dict[str, str]:
    """Return the kernels in a configuration from this package or from Transformers: {field: kernel name}."""
    fields = [f"{prefix}attention_kernel" for prefix in prefixes]
    return {name: value for name in fields if (value := getattr(config, name, None)) is not None}


def get_learned_parameter_names() -> tuple[str, ...]:
    """Return the names of all kernel parameters."""
    return tuple(dict.fromkeys(name for kernel in KERNELS for name in get_kernel_class(kernel).learned_parameters))


def get_random_buffer_names() -> tuple[str, ...]:
    """Return the names of all random buffers of kernels. Checkpoints without a kernel do not contain them."""
    return tuple(dict.fromkeys(name for kernel in KERNELS for name in get_kernel_class(kernel).random_buffers))
