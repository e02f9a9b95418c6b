"""Functions that add the tensors of a kernel to an attention module and initialize them."""

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
    """Set the kernel of an attention module, if any, and add its uninitialized tensors.

    The head counts of the module must be set before.
    """
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
    """Return the tensors that `install_kernel` added to an attention module: {name: tensor}."""
    kernel = getattr(module, "kernel", None)
    return {} if kernel is None else {name: getattr(module, name) for name in (*kernel.learned, *kernel.drawn)}


def init_kernel(module: nn.Module) -> None:
    """Initialize the tensors that `install_kernel` added, except those loaded from a checkpoint."""
    attention: Any = module
    if getattr(module, "kernel", None) is not None:
        for name, tensor in attention.kernel.tensors(attention.heads).items():
            here = getattr(attention, name)
            init.copy_(here, tensor.begin().to(here))
