"""Shared attention code for ModernBERT and NomicBERT, whose self-attention has rotary positions."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..attention.attention_interface import get_attention_function
from ..attention.attention_mixin import AttentionVariantMixin
from ..mechanisms.attention_extension import HEAD_STAGE, OUTPUT_STAGE, apply_extensions

__all__ = ["RotaryAttentionMixin"]


class RotaryAttentionMixin(AttentionVariantMixin):
    """Mixin for self-attention modules with rotary positions. It must precede the Transformers class in the bases.

    Class attributes:
        rotate: the function of Transformers that rotates the queries and keys.
    """

    roles = ("states", "mask", "rotary")
    rotate: ClassVar[Any]

    def project_states(self, states: Tensor) -> Sequence[Tensor]:
        """Compute the queries, keys and values, each [b, n, heads * head size], of hidden states [b, n, D]."""
        return self.q_proj(states), self.k_proj(states), self.v_proj(states)

    def get_attention_function(self) -> Any:
        """Return the attention function of the selected implementation."""
        return get_attention_function(self.implementation)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention over hidden states [b, n, D]. The arguments are the same as in Transformers."""
        (states, mask, rotary), options = self.arguments.split(args, kwargs)
        options |= self.prepare_attention_kwargs(states, None, None, options)
        heads = self.heads
        sizes = (heads.head_dim, heads.head_dim, heads.value_dim)
        query, key, value = (
            apply_extensions(self, HEAD_STAGE, part.unflatten(-1, (-1, size)).transpose(1, 2), role)  # [b, h, n, d]
            for part, size, role in zip(self.project_states(states), sizes, ("query", "key", "value"), strict=True)
        )
        query, key = self.rotate(query, key, *rotary)
        options |= {"dropout": self.attention_dropout if self.training else 0.0, "scaling": heads.head_dim**-0.5}
        output, weights = self.get_attention_function()(self, query, key, value, mask, **options)
        return self.compute_output(apply_extensions(self, OUTPUT_STAGE, output, states).flatten(2), states), weights
