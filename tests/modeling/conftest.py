"""Fixtures of the modeling tests."""

import pytest
import torch
from fixtures.logs import logged  # noqa: F401


@pytest.fixture
def small_blocks(monkeypatch):
    """Let talking-heads kernels process small inputs in several blocks, and forget the results of earlier trials."""
    from hf_attn_variants.modeling.ops import backend_choice, blocked_attention, triton_attention

    torch.manual_seed(0)
    # With these limits, the inputs of tests need several blocks of rows, and the last block has fewer sequences.
    monkeypatch.setitem(blocked_attention.BLOCK_ELEMENTS, "cpu", 200)
    monkeypatch.setattr(blocked_attention, "BLOCK_ROWS", (3, 2))
    monkeypatch.setattr(triton_attention, "WORKSPACE_BYTES", 700)
    monkeypatch.setattr(backend_choice, "_trial_results", {})


@pytest.fixture
def gathered_blocks(monkeypatch):
    """Let block patterns gather the keys of blocks of few queries, also for short texts."""
    from hf_attn_variants.modeling.mechanisms.patterns import block_patterns

    monkeypatch.setattr(block_patterns, "GATHERED_QUERIES", 8)
    monkeypatch.setattr(block_patterns, "MIN_GATHERED_KEYS", 2)


@pytest.fixture
def set_threads():
    """Set the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
