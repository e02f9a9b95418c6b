"""Base class of the kernels that replace the softmax of an attention.

Each kernel is a class in its own file, with its paper, the checks of its fields, its tensors and its formula.
`kernel_table` lists the kernels. The letters are those of `softmax_attention`; F is the number of features per head.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch

from ...ops.variant_attention import AttentionHeads
from ..mechanism import Mechanism

__all__ = ["AttentionKernel", "KernelTensor"]


class KernelTensor(NamedTuple):
    """A tensor that an attention with a kernel has in addition to its projections."""

    shape: tuple[int, ...]
    begin: Callable[[], torch.Tensor]  # returns its initial values, float32


@dataclass(frozen=True)
class AttentionKernel(Mechanism, ABC):
    """The kernel of one attention.

    Args:
        features: the width of learned projections, or the number of random vectors or rows
            (`attention_kernel_features`).
        is_causal: `True` if a query does not attend to later keys.
        seed: the seed of the random numbers.

    Class attributes:
        features_a_number: the default number of features per dimension of a head; None if the kernel has no such size.
        learned, drawn: the names of its parameters, and of its buffers of random numbers.
        of_key_heads: the names of the tensors that have a part for each key head.
        counts_tokens: `True` if the position of a token matters, so that padding before it must be moved.
        reads_window: `True` if the kernel needs an `attention_window`.
    """

    features: int
    is_causal: bool
    seed: int

    field = "attention_kernel"
    features_a_number: ClassVar[int | None] = None
    learned: ClassVar[tuple[str, ...]] = ()
    drawn: ClassVar[tuple[str, ...]] = ()
    of_key_heads: ClassVar[tuple[str, ...]] = ()
    counts_tokens: ClassVar[bool] = False
    reads_window: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Any, prefix: str, head_dim: int, path: str, is_causal: bool, layer: int) -> Self:
        """Return the kernel of the attention at a path.

        Args:
            config: a variant configuration.
            prefix: the prefix of the field that names the kernel.
            head_dim: d, the size of the heads.
            path: the path of the attention inside the base model. Each attention has its own random numbers.
            is_causal: `True` if the queries do not attend to later keys.
            layer: the index of the layer.
        """
        features = config.attention_kernel_features or (cls.features_a_number or 1) * head_dim
        return cls(features, is_causal, zlib.crc32(f"{config.attention_kernel_seed}:{path}".encode()))

    @classmethod
    def check(cls, config: Any, field: str) -> None:
        """Check the requirements of this kernel in a configuration whose `field` names it.

        Raises:
            ValueError: if the configuration does not support the kernel.
        """

    @classmethod
    def draws(cls, features: int | None, head_dim: int) -> bool:
        """Check if any tensor of the kernel is drawn from the seed.

        Args:
            features: the number of features in the configuration; None for the default of the kernel.
            head_dim: d.
        """
        return bool(cls.drawn)

    @property
    def is_exported_as_weights(self) -> bool:
        """Whether an exported graph computes the weights, because a graph of chunks would have a fixed length."""
        return self.is_causal

    def tensors(self, heads: AttentionHeads) -> dict[str, KernelTensor]:
        """Return the tensors of the kernel for an attention with these heads: {name: tensor}."""
        return {}

    @abstractmethod
    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        read: torch.Tensor | None,
        scaling: float,
        state: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """Attend with memory and time that are linear in n and m.

        Args:
            module: the module with the tensors of this kernel: the attention, or `AttentionTensors` in a conversion.
            query: [b, h, n, d], or [b B, h, n, d] for B beams per row of keys.
            key, value: [b, k, m, d] and [b, k, m, d_v].
            read: the keys to attend to, boolean [b or 1, 1, m, 1]; None means all keys.
            scaling: the factor of the dot products of a softmax.
            state: the state that an earlier call returned for the keys before these (causal attention only).

        Returns:
            The outputs [b, n, h, d_v], zeros if a query attends to no key, and the state after these keys, or None. If
            a kernel of cross-attention returns a state, its method `read_state` computes the outputs of later queries
            (see `FeatureKernel`).
        """

    @abstractmethod
    def weights(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        read: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """Return the equivalent attention weights [b, h, n, m]; the arguments are those of `attend`."""

    @abstractmethod
    def flops(self, heads: AttentionHeads, attended: int) -> tuple[int, int]:
        """Return the floating-point operations per key in one key head, and per query in one query head.

        Args:
            heads: the heads of the attention.
            attended: the number of keys that a query attends to.
        """

    def state_numbers(self, heads: AttentionHeads) -> int:
        """Return how many numbers a decoder's cache stores for this attention: 0 for a kernel without a state."""
        return 0
