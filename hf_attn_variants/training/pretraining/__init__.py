"""Pretraining on streams of text."""
