"""Loaded models with int8 linear layers, or in bfloat16, on a CPU."""
