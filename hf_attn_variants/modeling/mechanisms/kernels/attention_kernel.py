"""The base class of kernels that replace the softmax, and functions that install and initialize their tensors.

Each kernel is a class that contains its paper, field checks, tensors and formula. `kernel_table` lists the kernels.
The symbols are defined in `softmax_attention`. F is the number of features per head.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ...ops.variant_attention import AttentionHeads, VariantAttention
from ...transformers_internals import guarded_imports
from ..mechanism import Mechanism

with guarded_imports():
    from transformers import initialization as init

__all__ = [
    "AttentionKernel",
    "KernelTensorSpec",
    "draw_orthogonal_vectors",
    "draw_vectors",
    "get_kernel_tensors",
    "init_kernel",
    "install_kernel",
]


def draw_vectors(count: int, size: int, seed: int, are_orthogonal: bool) -> Tensor:
    """Draw random vectors [count, size] from the standard normal distribution.

    Args:
        count, size: the number of vectors and their size.
        seed: the seed of the generator.
        are_orthogonal: True to make each group of `size` vectors mutually orthogonal (arXiv 2009.14794, section 2.4).
    """
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, size, generator=generator)
    if not are_orthogonal:
        return vectors
    directions = draw_orthogonal_vectors(count, size, generator)
    return directions * vectors.norm(dim=1, keepdim=True)  # orthogonal vectors with the same norms


def draw_orthogonal_vectors(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw random unit vectors [count, size]. Each group of `size` vectors is mutually orthogonal."""
    blocks = [torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(-(-count // size))]
    return torch.cat([torch.empty(0, size), *blocks])[:count]


class KernelTensorSpec(NamedTuple):
    """A kernel tensor that an attention module stores in addition to its projections."""

    shape: tuple[int, ...]
    initialize: Callable[[], Tensor]  # returns the initial values in float32


@dataclass(frozen=True)
class AttentionKernel(Mechanism, ABC):
    """The kernel of one attention module.

    Args:
        features: the width of learned projections, or the number of random vectors or rows
            (`attention_kernel_features`).
        is_causal: True if a query does not attend to later keys.
        seed: the seed of the random numbers.

    Class attributes:
        features_per_dimension: the default number of features per head dimension, or None if the kernel has no such
            setting.
        learned_parameters, random_buffers: the names of the parameters and of the random buffers.
        tensors_per_key_head: the names of the tensors that have one part per key head.
        depends_on_positions: True if the outputs depend on token positions, so that left padding must be moved to the
            end.
        needs_window: True if the kernel requires an `attention_window`.
    """

    features: int
    is_causal: bool
    seed: int

    field = "attention_kernel"
    features_per_dimension: ClassVar[int | None] = None
    learned_parameters: ClassVar[tuple[str, ...]] = ()
    random_buffers: ClassVar[tuple[str, ...]] = ()
    tensors_per_key_head: ClassVar[tuple[str, ...]] = ()
    depends_on_positions: ClassVar[bool] = False
    needs_window: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Any, prefix: str, head_dim: int, path: str, is_causal: bool, layer: int) -> Self:
        """Create the kernel of the attention module at a path.

        Args:
            config: a variant configuration.
            prefix: the prefix of the field that selects the kernel.
            head_dim: d, the size of a query or key head.
            path: the path of the attention module inside the base model, which is part of the seed, so that modules
                have different random numbers.
            is_causal: True if queries do not attend to later keys.
            layer: the index of the layer.
        """
        features = config.attention_kernel_features or (cls.features_per_dimension or 1) * head_dim
        return cls(features, is_causal, zlib.crc32(f"{config.attention_kernel_seed}:{path}".encode()))

    @classmethod
    def check(cls, config: Any, field: str) -> None:
        """Check that a configuration whose `field` selects this kernel meets its requirements.

        Raises:
            ValueError: if the configuration does not support the kernel.
        """

    @classmethod
    def uses_random_numbers(cls, features: int | None, head_dim: int) -> bool:
        """Return True if any of the kernel's tensors depend on the seed.

        Args:
            features: the number of features in the configuration, or None for the kernel's default.
            head_dim: d, the size of a query or key head.
        """
        return bool(cls.random_buffers)

    @property
    def exports_explicit_weights(self) -> bool:
        """True if exported graphs compute explicit weights, because a graph with chunks would have a fixed length."""
        return self.is_causal

    def get_tensor_specs(self, heads: AttentionHeads) -> dict[str, KernelTensorSpec]:
        """Return the kernel's tensors for an attention module with these heads: {name: tensor}."""
        return {}

    @abstractmethod
    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        scaling: float,
        state: Any = None,
    ) -> tuple[Tensor, Any]:
        """Compute attention with memory and time that are linear in n and m.

        Args:
            module: the object that contains this kernel's tensors, which is the attention module or, during
                conversion, `AttentionTensors`.
            query: [b, h, n, d], or [b B, h, n, d] for B beams per row of keys.
            key, value: [b, k, m, d] and [b, k, m, d_v].
            key_mask: a boolean mask [b or 1, 1, m, 1] of the keys to attend to, or None for all keys.
            scaling: the factor by which a softmax would multiply the dot products.
            state: the state that an earlier call returned for the previous keys (only for causal attention).

        Returns:
            The outputs [b, n, h, d_v], which are zero for queries without any keys, and the state after these keys, or
            None if the kernel has no state. If a cross-attention kernel returns a state, its method `attend_to_state`
            computes the outputs of later queries (see `FeatureKernel`).
        """

    @abstractmethod
    def compute_weights(
        self, module: Any, query: Tensor, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Return the equivalent attention weights [b, h, n, m]. See `attend` for the arguments."""

    @abstractmethod
    def count_flops(self, heads: AttentionHeads, num_keys: int) -> tuple[int, int]:
        """Return the floating-point operations for one key in one key head, and for one query in one query head.

        Args:
            heads: the head counts of the attention module.
            num_keys: the number of keys that a query attends to.
        """

    def count_state_values(self, heads: AttentionHeads) -> int:
        """Return the number of values that a decoder's cache stores for this module (0 if the kernel has no state)."""
        return 0


def install_kernel(module: VariantAttention, kernel: AttentionKernel | None) -> None:
    """Set the kernel of an attention module and add the kernel's uninitialized tensors, if there is a kernel.

    The module's head counts must already be set.
    """
    module.kernel = kernel
    if kernel is None:
        return
    like = next(module.parameters())
    for name, tensor in kernel.get_tensor_specs(module.heads).items():
        empty = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
        if name in kernel.random_buffers:
            module.register_buffer(name, empty)
        else:
            module.register_parameter(name, nn.Parameter(empty))
        module._is_hf_initialized = False


def get_kernel_tensors(module: Any) -> dict[str, Tensor]:
    """Return the tensors that `install_kernel` added to an attention module: {name: tensor}."""
    kernel = getattr(module, "kernel", None)
    return (
        {}
        if kernel is None
        else {name: getattr(module, name) for name in (*kernel.learned_parameters, *kernel.random_buffers)}
    )


def init_kernel(module: nn.Module) -> None:
    """Initialize the tensors that `install_kernel` added, except those loaded from a checkpoint."""
    attention: Any = module
    if getattr(module, "kernel", None) is not None:
        for name, tensor in attention.kernel.get_tensor_specs(attention.heads).items():
            parameter = getattr(attention, name)
            init.copy_(parameter, tensor.initialize().to(parameter))
