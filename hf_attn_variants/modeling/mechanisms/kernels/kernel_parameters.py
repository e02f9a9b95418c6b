"""The tensors of an attention's kernel: added to the attention, and initialised."""

from typing import Any

import torch
from torch import nn

from ...ops.variant_attention import VariantAttention
from ...upstream import known_imports
from .attention_kernel import AttentionKernel

with known_imports():
    from transformers import initialization as init

__all__ = ["init_kernel", "install_kernel", "kernel_tensors"]


def install_kernel(module: VariantAttention, kernel: AttentionKernel | None) -> None:
    """Note the kernel of an attention that has its heads, if any, and add what it computes with, uninitialised."""
    module.kernel = kernel
    if kernel is None:
        return
    like = next(module.parameters())
    for name, tensor in kernel.tensors(module.heads).items():
        empty = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
        if name in kernel.drawn:
            module.register_buffer(name, empty)
        else:
            module.register_parameter(name, nn.Parameter(empty))
        module._is_hf_initialized = False


def kernel_tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return what `install_kernel` added to an attention, by name."""
    kernel = getattr(module, "kernel", None)
    return {} if kernel is None else {name: getattr(module, name) for name in (*kernel.learned, *kernel.drawn)}


def init_kernel(module: nn.Module) -> None:
    """Initialise what `install_kernel` added, but what is loaded."""
    attention: Any = module
    if getattr(module, "kernel", None) is not None:
        for name, tensor in attention.kernel.tensors(attention.heads).items():
            here = getattr(attention, name)
            init.copy_(here, tensor.begin().to(here))
