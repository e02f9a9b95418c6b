"""What each head of a model attends to in one text: the numbers, their pictures, a page of them."""

from .maps import AttentionMaps, Projection, Stage, TextMaps, attention_maps

__all__ = ["AttentionMaps", "Projection", "Stage", "TextMaps", "attention_maps"]
