"""The table of attention kernels.

This module does not import torch, because the commands use these names in their flags.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from ..mechanism import PREFIXES, get_registered_class, register_mechanism

if TYPE_CHECKING:
    from .attention_kernel import AttentionKernel

__all__ = [
    "KERNELS",
    "get_kernel_class",
    "get_kernel_names",
    "get_learned_parameter_names",
    "get_random_buffer_names",
    "register_kernel",
]

KERNELS = ["elu", "relu", "hedgehog", "favor", "rfa", "hybrid", "linformer"]


def register_kernel(kernel: Any) -> Any:
    """Register an `AttentionKernel` of a plugin under its name. Use this function as a class decorator.

    Raises:
        ValueError: if another kernel has the same name, or if the class is not in a file of its own.
    """
    return register_mechanism(kernel, KERNELS)


def get_kernel_class(name: str) -> "type[AttentionKernel]":
    """Return the class of the kernel with this name."""
    return get_registered_class("attention_kernel", name) or _get_kernel_classes()[name]


@cache
def _get_kernel_classes() -> "dict[str, type[AttentionKernel]]":
    from .elementwise_kernels import EluKernel, ReluKernel
    from .favor_kernel import FavorKernel
    from .hedgehog_kernel import HedgehogKernel
    from .hybrid_kernel import HybridKernel
    from .linformer_kernel import LinformerKernel
    from .rfa_kernel import RfaKernel

    return {
        kernel.name: kernel
        for kernel in (EluKernel, ReluKernel, HedgehogKernel, FavorKernel, RfaKernel, HybridKernel, LinformerKernel)
    }


def get_kernel_names(config: Any, prefixes: tuple[str, ...] = PREFIXES) -> dict[str, str]:
    """Return {field: kernel name} for the kernels of a configuration of this package or of Transformers."""
    fields = [f"{prefix}attention_kernel" for prefix in prefixes]
    return {name: value for name in fields if (value := getattr(config, name, None)) is not None}


def get_learned_parameter_names() -> tuple[str, ...]:
    """Return the names of all kernel parameters."""
    return tuple(dict.fromkeys(name for kernel in KERNELS for name in get_kernel_class(kernel).learned_parameters))


def get_random_buffer_names() -> tuple[str, ...]:
    """Return the names of all random buffers of kernels. Checkpoints without a kernel do not contain them."""
    return tuple(dict.fromkeys(name for kernel in KERNELS for name in get_kernel_class(kernel).random_buffers))
