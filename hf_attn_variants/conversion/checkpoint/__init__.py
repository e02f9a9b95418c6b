"""Reads tensors from checkpoints or models in memory, and writes checkpoints."""
