"""Sweeps: variants times seeds of one training command, run one after another, in one table and one plot."""
