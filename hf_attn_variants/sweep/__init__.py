"""Runs one training command for several variants and seeds, and compares the results."""
