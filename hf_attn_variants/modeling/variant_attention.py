"""What the functions here read of an attention of ours. For type checkers: at run time it is upstream's class."""

from typing import Any

from torch import Tensor, nn

from .additive_score import AdditiveScore
from .attention_kernels import AttentionKernel
from .attention_sites import AttentionHeads
from .memory_compression import MemoryCompression

__all__ = ["KernelAttention", "VariantAttention"]


class VariantAttention(nn.Module):
    """An attention of upstream's with `AttentionVariantMixin`; nothing is made of this class, which says types alone.

    What upstream's constructors set is `Any`: each host's is another.
    """

    config: Any
    dropout: Any
    is_causal: Any
    layer_idx: Any
    num_key_value_groups: Any
    scaling: Any
    _is_hf_initialized: bool

    heads: AttentionHeads
    projection_names: tuple[str, ...]
    dynamic_names: tuple[str, ...]
    keeps_cache: bool
    implementation: str
    is_own: bool
    kv_a_proj: nn.Module  # where the latent is smaller than the input
    reach: Any  # a `Reach`, `BlockPattern` or `TransientGlobal`; None: all is read
    score: AdditiveScore | None
    compression: MemoryCompression | None
    padding_rule: int
    kernel: AttentionKernel | None


class KernelAttention(VariantAttention):
    """One with a kernel, and what `install_kernel` adds, each where the kernel has it."""

    kernel: AttentionKernel
    kernel_scale: Tensor
    kernel_vectors: Tensor
    length_proj: Tensor
    window_log_factor: Tensor
