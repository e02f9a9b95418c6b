"""Numbers too small for full precision, which cost a CPU far more time than they are worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["flushed_denormals"]


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Compute with denormal numbers (below 1.2e-38 in float32) as zero on the CPU inside.

    Sharp attention weights and Adam's second moments are full of them, and Intel's CPUs take them far more slowly than
    other numbers (docs/results.md, "Denormals", has what that costs). The setting is that of the thread and of those
    that begin inside: torch's pool of threads has it if the process computed nothing in parallel before. It changes
    Python's own numbers below 2.2e-308 as well. Where the CPU lacks it, nothing changes.
    """
    smallest = torch.full((), torch.finfo(torch.float32).tiny)
    had = bool(smallest / 2 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(had)
