"""Sweeps: variants and seeds of one training command, run one after another and compared in a table and a plot."""
