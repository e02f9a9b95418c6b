"""What every kernel is: one class in one file, with its paper, its fields' checks, its tensors and its formula.

A kernel stands in one attention in a softmax's place. `kernel_table` has those there are. Letters as in
`softmax_attention`; F features a head.
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
    """A tensor that an attention with a kernel has beside its projections."""

    shape: tuple[int, ...]
    begin: Callable[[], torch.Tensor]  # makes what it holds in a new model, float32


@dataclass(frozen=True)
class AttentionKernel(Mechanism, ABC):
    """The kernel of one attention.

    Args:
        features: the width of learned maps, the number of random vectors or of rows (`attention_kernel_features`).
        is_causal: whether a query reads no later key.
        seed: of what is drawn.

    Class attributes:
        features_a_number: the features of each of a head's d numbers where the configuration does not say how many;
            None: it has no such size.
        learned, drawn: the names of its parameters, and of its buffers of random numbers.
        of_key_heads: those of them that have a part for each key head.
        counts_tokens: whether a token's place in the text counts, and padding before it has to be moved away.
        reads_window: whether it needs an `attention_window`.
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
            prefix: of the field that names the kernel.
            head_dim: d, the size of the attention's heads.
            path: the attention's, inside the base model: each has random numbers of its own.
            is_causal: whether its queries read no later keys.
            layer: the one that it is in.
        """
        features = config.attention_kernel_features or (cls.features_a_number or 1) * head_dim
        return cls(features, is_causal, zlib.crc32(f"{config.attention_kernel_seed}:{path}".encode()))

    @classmethod
    def check(cls, config: Any, field: str) -> None:
        """Check what this kernel alone asks of a configuration whose `field` names it.

        Raises:
            ValueError: for what it cannot be.
        """

    @classmethod
    def draws(cls, features: int | None, head_dim: int) -> bool:
        """Say whether anything of it is drawn by the seed.

        Args:
            features: as many as the configuration says; None: as many as it has by itself.
            head_dim: d.
        """
        return bool(cls.drawn)

    @property
    def is_exported_as_weights(self) -> bool:
        """Whether an exported graph has its weights: one of chunks would be of one length."""
        return self.is_causal

    def tensors(self, heads: AttentionHeads) -> dict[str, KernelTensor]:
        """Return what an attention with these heads computes with, by name."""
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
        """Attend in memory and time linear in n and m.

        Args:
            module: what has this kernel's tensors: the attention, or a conversion's `AttentionTensors`.
            query: [b, h, n, d], or [b B, h, n, d] of B beams of each memory.
            key, value: [b, k, m, d] and [b, k, m, d_v].
            read: which keys are read, [b or 1, 1, m, 1]; None = all.
            scaling: the factor of a softmax's dot products.
            state: where causal, what an earlier call returned of the keys before these.

        Returns:
            The outputs [b, n, h, d_v], zeros where nothing is read; and the state, of these keys too, or None. A
            kernel of cross-attention that returns one has a `read_state` (as `FeatureKernel`), which gives the outputs
            of later queries.
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
        """Return the weights [b, h, n, m] that it stands for; arguments as for `attend`."""

    @abstractmethod
    def flops(self, heads: AttentionHeads, attended: int) -> tuple[int, int]:
        """Return the floating-point operations of a key in one key head, and of a query in one query head.

        Args:
            heads: the attention's.
            attended: the keys that a query reads.
        """

    def state_numbers(self, heads: AttentionHeads) -> int:
        """Return how many numbers a decoder's cache holds for this attention: none, of a kernel without a state."""
        return 0
