"""Tensors in, tensors out: no module's parameters and no configuration."""
