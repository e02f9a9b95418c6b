"""Tensor functions, which use neither module parameters nor a configuration."""
