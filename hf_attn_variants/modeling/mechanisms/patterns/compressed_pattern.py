"""Memory-compressed attention: a strided convolution shortens keys and values (arXiv 1801.10198, section 4.2.4).

All queries attend to all n / s compressed keys. The convolution is as wide as its stride s, so that its inputs do not
overlap. Each key/value head has its own convolution. It is initialized as the mean of s tokens, so that checkpoints
without these parameters can be loaded. The symbols are defined in `softmax_attention`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.padded_rows import is_boolean_key_mask
from ...transformers_internals import guarded_imports
from .attention_pattern import AttentionPattern

with guarded_imports():
    from transformers import initialization as init

__all__ = ["MemoryCompressedPattern", "MemoryCompression", "compress_keys_and_values", "create_compression"]


class MemoryCompressedPattern(AttentionPattern):
    """A pattern in which queries attend to all keys after a convolution has combined several tokens into one key."""

    name = "memory_compressed"
    paper = ("Generating Wikipedia by summarizing long sequences: memory-compressed attention", "1801.10198")
    needed = ("attention_block_size",)
    learned = True

    @classmethod
    def check(cls, config: Any, prefix: str) -> None:
        """Check that the pattern is not used in a decoder, because several tokens are combined into one key.

        Raises:
            ValueError: if the pattern is used in a decoder.
        """
        is_decoder = getattr(config, "is_decoder", False) or hasattr(config, "encoder_attention_pattern")
        if is_decoder and not prefix:
            raise ValueError(
                f'`{prefix}attention_pattern="memory_compressed"` is not supported in a decoder, because compressed '
                "keys contain later tokens. Choose another pattern."
            )

    @classmethod
    def get_key_range(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> None:
        """Return None, because queries attend to all compressed keys."""
        return None


class MemoryCompression(nn.Module):
    """The convolutions for the keys and values of an attention module.

    Args:
        key_heads, value_heads: the number of key heads k and the number of value heads.
        head_dim, value_dim: the size d of a key head and the size d_v of a value head.
        stride: s, the number of tokens per compressed key.
        like: a tensor whose dtype and device are used for the parameters.
    """

    def __init__(
        self, key_heads: int, value_heads: int, head_dim: int, value_dim: int, stride: int, like: Tensor
    ) -> None:
        super().__init__()
        self.stride = stride
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        # [heads, s d, d] or [heads, s d_v, d_v]: s adjacent tokens become one.
        self.key_conv = nn.Parameter(torch.empty(key_heads, stride * head_dim, head_dim, **options))
        self.value_conv = nn.Parameter(torch.empty(value_heads, stride * value_dim, value_dim, **options))

    def init_variant_parameters(self) -> None:
        """Initialize each convolution as the mean of its input tokens."""
        for conv in (self.key_conv, self.value_conv):
            mean = torch.eye(conv.shape[-1], dtype=conv.dtype, device=conv.device) / self.stride
            init.copy_(conv, mean.repeat(self.stride, 1).expand_as(conv))

    def count_attended_keys(self, key_length: int) -> int:
        """Return the number of compressed keys for `key_length` tokens."""
        return -(-key_length // self.stride)

    def count_flops(self) -> tuple[int, int]:
        """Return the number of floating-point operations per key token and per query token."""
        return 2 * (self.key_conv.numel() + self.value_conv.numel()) // self.stride, 0

    def forward(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the compressed keys [b, k, m / s, d], the compressed values and their mask.

        If m is not a multiple of s, the last key covers fewer tokens.

        Args:
            key, value: the keys and values of all tokens. Padding counts as zeros.
            mask: a boolean mask [b, 1, 1 or n, m] that is False for padding, or None if there is no padding. A
                compressed key is masked only if all of its s tokens are padding.

        Raises:
            ValueError: if the mask is additive or differs between queries.
        """
        if mask is not None:
            if not is_boolean_key_mask(mask):
                raise ValueError(
                    "The mask must be a boolean padding mask of shape [b, m] or [b, 1, 1, m] with "
                    f'`attention_pattern="memory_compressed"`, got {list(mask.shape)} of type {mask.dtype}.'
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


def create_compression(module: nn.Module, heads: Any, site: Any, config: Any) -> MemoryCompression | None:
    """Create the compression of an attention module, or return None if its keys are not compressed."""
    prefix = site.stack_prefix
    if site.is_cross_attention or getattr(config, f"{prefix}attention_pattern") != MemoryCompressedPattern.name:
        return None
    stride = getattr(config, f"{prefix}attention_block_size")
    sizes = (heads.key, heads.value, heads.head_dim, heads.value_dim)
    return MemoryCompression(*sizes, stride, next(module.parameters()))


def compress_keys_and_values(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function so that it first compresses the keys and values if the module has a compression."""

    @wraps(attend)
    def forward(
        module: Any,  # a `VariantAttention`, whose import would be circular
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if module.compression is not None:
            if kwargs.get("global_attention_mask") is not None:
                raise ValueError(
                    '`global_attention_mask` is not supported with `attention_pattern="memory_compressed"`. Remove it.'
                )
            key, value, attention_mask = module.compression(key, value, attention_mask)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    return forward
