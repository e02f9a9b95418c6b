"""The attention of each head in one text: as tensors, and as a page of pictures."""

from .maps import AttentionMaps, Projection, Stage, TextMaps, attention_maps

__all__ = ["AttentionMaps", "Projection", "Stage", "TextMaps", "attention_maps"]
