"""Attention patterns, which determine the keys that each query attends to."""
