"""Sweeps, which run one training command for several variants and seeds and compare the results."""
