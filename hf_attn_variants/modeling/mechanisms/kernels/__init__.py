"""Attention without a softmax: a kernel a file."""
