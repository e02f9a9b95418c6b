"""Tensors by name, from files or a model, and into files."""
