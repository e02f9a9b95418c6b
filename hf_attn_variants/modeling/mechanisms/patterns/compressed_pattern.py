"""Memory-compressed attention: keys and values shortened by a convolution with a stride (1801.10198, section 4.2.4).

Every query reads all n / s of them, which overlap nothing: the convolution is as wide as its stride s. Each key/value
head has its own. It begins as the mean of s tokens, by which a checkpoint that knows nothing of it loads. Letters as
in `softmax_attention`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from ...ops.padded_rows import is_of_keys
from ...upstream import known_imports
from .attention_pattern import AttentionPattern

with known_imports():
    from transformers import initialization as init

__all__ = ["MemoryCompressed", "MemoryCompression", "compressing", "compression_of"]


class MemoryCompressed(AttentionPattern):
    """All keys, a convolution of several tokens each."""

    name = "memory_compressed"
    paper = ("Generating Wikipedia by summarizing long sequences: memory-compressed attention", "1801.10198")
    needed = ("attention_block_size",)
    learned = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check that several tokens can be read as one.

        Raises:
            ValueError: in a decoder.
        """
        is_decoder = getattr(config, "is_decoder", False) or hasattr(config, "encoder_attention_pattern")
        if is_decoder and not prefix:
            raise ValueError(
                f'`{prefix}attention_pattern="memory_compressed"` cannot stand beside a decoder, whose tokens read no '
                "later ones, and several are read as one."
            )

    @classmethod
    def reach(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> None:
        """Return None: all of the fewer keys are read."""
        return None


class MemoryCompression(nn.Module):
    """The two convolutions of an attention.

    Args:
        key_heads, value_heads: k, and the heads of the values.
        head_dim, value_dim: d and d_v.
        stride: s.
        like: a tensor with their dtype and device.
    """

    def __init__(
        self, key_heads: int, value_heads: int, head_dim: int, value_dim: int, stride: int, like: torch.Tensor
    ) -> None:
        super().__init__()
        self.stride = stride
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        # [heads, s d, d] or [heads, s d_v, d_v]: of s tokens beside each other one.
        self.key_conv = nn.Parameter(torch.empty(key_heads, stride * head_dim, head_dim, **options))
        self.value_conv = nn.Parameter(torch.empty(value_heads, stride * value_dim, value_dim, **options))

    def init_projections(self) -> None:
        """Let each begin as the mean."""
        for conv in (self.key_conv, self.value_conv):
            mean = torch.eye(conv.shape[-1], dtype=conv.dtype, device=conv.device) / self.stride
            init.copy_(conv, mean.repeat(self.stride, 1).expand_as(conv))

    def keys_read(self, memory: int) -> int:
        """Return how many keys `memory` tokens become."""
        return -(-memory // self.stride)

    def flops(self) -> tuple[int, int]:
        """Return the floating-point operations of a token of the memory, and of a token that asks."""
        return 2 * (self.key_conv.numel() + self.value_conv.numel()) // self.stride, 0

    def forward(
        self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys [b, k, m / s, d] and values of [b, k, m, d], the last of what is left over, and their mask.

        Args:
            key, value: of all tokens; those that are padding count as zeros.
            mask: of tokens, boolean [b, 1, 1 or n, m]; None = there is no padding. One of s is enough to be read.

        Raises:
            ValueError: for a mask that is added, or that says for each query what it reads.
        """
        if mask is not None:
            if not is_of_keys(mask):
                raise ValueError(
                    '`attention_pattern="memory_compressed"` reads several tokens as one: its mask must be boolean '
                    f"and of padding alone, [b, m] or [b, 1, 1, m]; got {list(mask.shape)} of {mask.dtype}."
                )
            mask = mask[..., :1, :]
            key, value = (states * mask.transpose(-1, -2) for states in (key, value))
        missing = -key.shape[2] % self.stride
        short = [
            nn.functional.pad(states, (0, 0, 0, missing)).unflatten(2, (-1, self.stride)).flatten(3) @ conv
            for states, conv in ((key, self.key_conv), (value, self.value_conv))
        ]
        if mask is not None:
            mask = nn.functional.pad(mask, (0, missing)).unflatten(-1, (-1, self.stride)).any(-1)
        return *short, mask


def compression_of(module: nn.Module, heads: Any, site: Any, config: Any) -> MemoryCompression | None:
    """Return the compression of an attention with these `AttentionHeads`, in its weights' dtype; None: it has none."""
    prefix = site.stack_prefix
    if site.is_cross_attention or getattr(config, f"{prefix}attention_pattern") != MemoryCompressed.name:
        return None
    stride = getattr(config, f"{prefix}attention_block_size")
    sizes = (heads.key, heads.value, heads.head_dim, heads.value_dim)
    return MemoryCompression(*sizes, stride, next(module.parameters()))


def compressing(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function behind upstream's interface that shortens keys and values where a module does."""

    @wraps(attend)
    def forward(
        module: Any,  # a `VariantAttention`, which is made of what is here
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if module.compression is not None:
            if kwargs.get("global_attention_mask") is not None:
                raise ValueError('`global_attention_mask` is not for `attention_pattern="memory_compressed"`.')
            key, value, attention_mask = module.compression(key, value, attention_mask)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    return forward
