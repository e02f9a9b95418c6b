"""Attention kernels that replace the softmax, with one file per kernel."""
