"""Sinusoidal positions, which have no parameters and support texts of any length (arXiv 1706.03762, section 3.5).

They are enabled by `position_embedding_type="sinusoidal"`. In BERT and related models, they replace the learned
positions. In T5 and UMT5, they replace the relative position bias and are added once to the inputs of the encoder and
of the decoder.

The paper multiplies word embeddings by sqrt(d), which gives them an initial standard deviation of 1. Here, word
embeddings are not scaled. Instead, the positions are multiplied by the initial standard deviation of the word
embeddings.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..transformers_internals import MethodSignature, check_attributes, get_transformers_class
from .mechanism import Mechanism

__all__ = [
    "PositionEmbeddingsMixin",
    "RelativePositionBias",
    "SinusoidalInputsMixin",
    "SinusoidalPositions",
    "compute_sinusoids",
    "has_sinusoids",
]

_FREQUENCY_BASE = 10000.0


def has_sinusoids(config: Any) -> bool:
    """Return True if a configuration from this package or from Transformers requests sinusoidal positions."""
    return SinusoidalPositions.find_requesting_field(config, "") is not None


def compute_sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return sinusoidal embeddings of positions [..., n] as a float32 tensor [..., n, width].

    Even dimensions contain sines and odd dimensions contain cosines. Source: arXiv 1706.03762, section 3.5.
    """
    # In float32, the angles for long texts have errors in the thousandths, but MPS devices do not support float64.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    dimensions = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    angles = positions[..., None].to(dtype) * torch.exp(dimensions * (-math.log(_FREQUENCY_BASE) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width].float()


class SinusoidalPositions(Mechanism, nn.Module):
    """Sinusoidal embeddings that replace a table of learned positions.

    Args:
        width: the size of an embedding.
        spread: the factor by which the embeddings are multiplied.
        first: the position id of the first token in a text.
        like: the table that the embeddings replace. The embeddings have the dtype of this table, and converting the
            model with `to` also changes their dtype.
    """

    like: Tensor

    field = "position_embedding_type"
    name = "sinusoidal"
    paper = ("Attention is all you need: sinusoidal positions", "1706.03762")

    def __init__(self, width: int, spread: float, first: int, like: Tensor) -> None:
        super().__init__()
        self.width, self.spread, self.first = width, spread, first
        self.register_buffer("like", like.detach().new_empty(0), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the embeddings [b, n, width] of positions [b, n]."""
        return (compute_sinusoids(positions - self.first, self.width) * self.spread).to(self.like.dtype)


class RelativePositionBias(Mechanism):
    """The relative position bias of T5 and UMT5, which is implemented in Transformers.

    This class is not instantiated.
    """

    field = "relative_attention_num_buckets"
    paper = ("Exploring the limits of transfer learning with a unified text-to-text transformer", "1910.10683")

    @classmethod
    def find_requesting_field(cls, config: Any, prefix: str) -> tuple[str, Any] | None:
        """Return the field and its value, or None for cross-attention or a model with sinusoidal positions."""
        is_without = prefix == "cross_" or has_sinusoids(config)
        return None if is_without else super().find_requesting_field(config, "")


_Base: Any = object  # the type of the Transformers class with which a mixin is combined


class PositionEmbeddingsMixin(_Base):
    """Mixin for the embeddings of BERT and related models.

    It must precede the Transformers class in the list of base classes.
    """

    position_embeddings: Any  # the table of Transformers, or sinusoids
    arguments: MethodSignature
    roles: tuple[str, ...] = ("ids", "embedded", "positions", "types", "cache_length")
    transformers_attributes = ("position_embeddings",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.arguments = MethodSignature(get_transformers_class(cls, PositionEmbeddingsMixin), cls.roles)

    def install_positions(self, config: Any) -> None:
        """Replace the learned positions with sinusoidal positions if the configuration requests them."""
        if has_sinusoids(config) and isinstance(self.position_embeddings, nn.Embedding):
            table = self.position_embeddings.weight
            check_attributes(self, ("padding_idx",) if config.positions_after_padding else ())
            first = self.padding_idx + 1 if config.positions_after_padding else 0
            self.position_embeddings = SinusoidalPositions(table.shape[1], config.initializer_range, first, table)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings [b, n, size] of the inputs. The arguments are the same as in the Transformers class.

        With sinusoidal positions, texts may be longer than the position buffers in Transformers.
        """
        if not isinstance(self.position_embeddings, SinusoidalPositions):
            return super().forward(*args, **kwargs)
        ids, embedded, positions, *more = self.arguments.read(args, kwargs)
        read, new = embedded if ids is None else ids, {}
        batch, length = read.shape[:2]
        # RoBERTa computes position ids itself, because it skips padding.
        if positions is None and not self.position_embeddings.first:
            past = more[1] if len(more) > 1 and more[1] is not None else 0
            new["positions"] = (torch.arange(length, device=read.device) + past)[None]
        if more and more[0] is None:
            new["types"] = torch.zeros(batch, length, dtype=torch.long, device=read.device)
        return super().forward(**self.arguments.to_keywords(args, kwargs, **new))


class SinusoidalInputsMixin(_Base):
    """Mixin that adds sinusoidal positions to the inputs of a T5 or UMT5 encoder or decoder.

    The position of a token is the number of non-padding tokens before it, including tokens in the cache. As with the
    relative position bias, left padding therefore does not change the outputs.
    """

    input_arguments: MethodSignature

    transformers_attributes = ("embed_tokens", "is_decoder")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.input_arguments = MethodSignature(
            get_transformers_class(cls, SinusoidalInputsMixin), ("ids", "embedded", "mask", "cache")
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the encoder or decoder. The arguments are the same as in the Transformers class."""
        ids, embedded, mask, cache = self.input_arguments.read(args, kwargs)
        if not has_sinusoids(self.config) or (ids is None) == (embedded is None):
            return super().forward(*args, **kwargs)
        states = self.embed_tokens(ids) if embedded is None else embedded
        past = 0 if cache is None or not self.is_decoder else cache.get_seq_length()
        added = (
            compute_sinusoids(_compute_positions(states, mask, past), states.shape[-1])
            * self.config.initializer_factor
        )
        embedded = states + added.to(states.dtype)
        return super().forward(**self.input_arguments.to_keywords(args, kwargs, ids=None, embedded=embedded))


def _compute_positions(states: Tensor, mask: Tensor | None, past: int | Tensor) -> Tensor:
    """Return the positions [b or 1, n] of inputs [b, n, D]. The mask [b, past + n] is zero for padding."""
    length = states.shape[1]
    if mask is not None and mask.dim() == 2:
        return ((mask != 0).long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=states.device) + past)[None]
