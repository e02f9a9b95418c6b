"""Positions without parameters, for texts of any length: sines and cosines of the position (arXiv 1706.03762, 3.5).

`position_embedding_type="sinusoidal"`: in BERT and its relatives in place of the learned positions, in T5 and UMT5 in
place of the bias by distance, added once to what a stack reads.

The paper multiplies words by sqrt(d), by which they begin with a spread of 1. Here words keep their size, and the
positions are multiplied by the spread that words begin with: the same before a LayerNorm, and T5's words have it.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..upstream import Arguments, check_attributes, upstream_class
from .mechanism import Mechanism

__all__ = ["AddsSinusoids", "DistanceBias", "EmbeddingsMixin", "SinusoidalPositions", "has_sinusoids", "sinusoids"]

BASE = 10000.0


def has_sinusoids(config: Any) -> bool:
    """Say whether a configuration, any, asks for sinusoidal positions."""
    return SinusoidalPositions.asked_for(config, "") is not None


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sines (even places) and cosines (odd places) of positions [..., n] as [..., n, width], float32.

    Source: arXiv 1706.03762, section 3.5.
    """
    # In float32 the angles of a long text would be off by thousandths; Apple's GPUs have nothing else.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    places = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    angles = positions[..., None].to(dtype) * torch.exp(places * (-math.log(BASE) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width].float()


class SinusoidalPositions(Mechanism, nn.Module):
    """Sinusoids in the place of a table of learned positions.

    Args:
        width: numbers a position.
        spread: what they are multiplied by.
        first: the number that the model calls the first position.
        like: the table that they replace; the embeddings have its dtype, and follow the model to another one.
    """

    like: torch.Tensor

    field = "position_embedding_type"
    name = "sinusoidal"
    paper = ("Attention is all you need: sinusoidal positions", "1706.03762")

    def __init__(self, width: int, spread: float, first: int, like: torch.Tensor) -> None:
        super().__init__()
        self.width, self.spread, self.first = width, spread, first
        self.register_buffer("like", like.detach().new_empty(0), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [b, n, width] of positions [b, n]."""
        return (sinusoids(positions - self.first, self.width) * self.spread).to(self.like.dtype)


class DistanceBias(Mechanism):
    """The bias by distance of T5 and UMT5, upstream's own, in whose place sinusoids stand; nothing is made of it."""

    field = "relative_attention_num_buckets"
    paper = ("Exploring the limits of transfer learning with a unified text-to-text transformer", "1910.10683")

    @classmethod
    def asked_for(cls, config: Any, prefix: str) -> tuple[str, Any] | None:
        """Return the field with its value; None in cross-attention too, and beside sinusoidal positions."""
        is_without = prefix == "cross_" or has_sinusoids(config)
        return None if is_without else super().asked_for(config, "")


# A mixin is no module before it stands beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:

    class _Embeddings(nn.Module):
        padding_idx: int
        position_embeddings: Any  # upstream's table, or sinusoids

    class _Stack(nn.Module):
        config: Any
        embed_tokens: Any
        is_decoder: bool
else:
    _Embeddings = _Stack = object


class EmbeddingsMixin(_Embeddings):
    """What a variant adds to the embeddings of BERT or of a relative; listed before them among the bases."""

    arguments: Arguments
    roles: tuple[str, ...] = ("ids", "embedded", "positions", "types", "cache_length")
    upstream_attributes = ("position_embeddings",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.arguments = Arguments(upstream_class(cls, EmbeddingsMixin), cls.roles)

    def install_positions(self, config: Any) -> None:
        """Put sinusoids in the place of the learned positions, where the configuration asks for them."""
        if has_sinusoids(config) and isinstance(self.position_embeddings, nn.Embedding):
            table = self.position_embeddings.weight
            check_attributes(self, ("padding_idx",) if config.positions_after_padding else ())
            first = self.padding_idx + 1 if config.positions_after_padding else 0
            self.position_embeddings = SinusoidalPositions(table.shape[1], config.initializer_range, first, table)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Embed as upstream does; with sinusoids a text may be longer than upstream's buffers of positions."""
        if not isinstance(self.position_embeddings, SinusoidalPositions):
            return super().forward(*args, **kwargs)
        ids, embedded, positions, *more = self.arguments.read(args, kwargs)
        read, new = embedded if ids is None else ids, {}
        batch, length = read.shape[:2]
        # RoBERTa numbers the tokens itself, by what is no padding.
        if positions is None and not self.position_embeddings.first:
            past = more[1] if len(more) > 1 and more[1] is not None else 0
            new["positions"] = (torch.arange(length, device=read.device) + past)[None]
        if more and more[0] is None:
            new["types"] = torch.zeros(batch, length, dtype=torch.long, device=read.device)
        return super().forward(**self.arguments.by_name(args, kwargs, **new))


class AddsSinusoids(_Stack):
    """What a stack of T5 or UMT5 adds to its inputs where its positions are sinusoidal.

    A token's position counts the tokens before it that are no padding, as the bias by distance, in whose place this
    stands, does not change with padding on the left; those in a decoder's cache among them.
    """

    input_arguments: Arguments

    upstream_attributes = ("embed_tokens", "is_decoder")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.input_arguments = Arguments(upstream_class(cls, AddsSinusoids), ("ids", "embedded", "mask", "cache"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stack as upstream's does."""
        ids, embedded, mask, cache = self.input_arguments.read(args, kwargs)
        if not has_sinusoids(self.config) or (ids is None) == (embedded is None):
            return super().forward(*args, **kwargs)
        states = self.embed_tokens(ids) if embedded is None else embedded
        past = 0 if cache is None or not self.is_decoder else cache.get_seq_length()
        added = sinusoids(_positions(states, mask, past), states.shape[-1]) * self.config.initializer_factor
        embedded = states + added.to(states.dtype)
        return super().forward(**self.input_arguments.by_name(args, kwargs, ids=None, embedded=embedded))


def _positions(states: torch.Tensor, mask: torch.Tensor | None, past: int | torch.Tensor) -> torch.Tensor:
    """Return the positions [b or 1, n] of inputs [b, n, D]; a mask of tokens [b, past + n] says what is padding."""
    length = states.shape[1]
    if mask is not None and mask.dim() == 2:
        return ((mask != 0).long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=states.device) + past)[None]
