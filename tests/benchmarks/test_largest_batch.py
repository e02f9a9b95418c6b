"""Check the search for the largest batch in a given memory: its precision, its trials, and a row per engine."""

import pytest

from benchmarks.speed import largest_batch


@pytest.mark.parametrize(("memory", "expected"), [(150, 0), (200, 1), (1000, 9), (1099, 9), (100_000, 999)])
def test_search_finds_the_largest_batch_that_fits(memory, expected):
    result, peaks = largest_batch.find_largest_batch(lambda batch: 100 + 100 * batch, memory)
    assert expected - max(0, expected // 30) <= result <= expected
    assert all((peak <= memory) == (batch <= result) for batch, peak in peaks.items())
    assert len(peaks) <= 2 * (expected + 1).bit_length() + 1


def test_largest_batch_has_a_row_per_engine():
    rows = largest_batch.list_contestants(largest_batch.make_config("t5-small"), largest_batch.LATENTS)
    names = ["transformers", "share_memory", "MHA + cross latent 128 + latent 32"]
    assert [engine.name for _, engine in rows[:3]] == names
    assert [config.get("kv_lora_rank") for config, _ in rows[:3]] == [None, None, 32]
