"""Check the benchmark of decoder caches and states: bytes by length, compared with the formulas."""

import pytest
from fixtures.commands import run_command

from benchmarks.speed import decoder_state


def test_state_size_is_constant_and_cache_size_grows(monkeypatch, tmp_path):
    layers, heads, head_dim, width = 6, 4, 16, 4
    shape = decoder_state.SHAPES["tiny"] | {"num_layers": layers}
    monkeypatch.setattr(decoder_state, "SHAPES", {"t5-small": shape})
    monkeypatch.setattr(decoder_state, "CHUNK_LENGTH", 48)
    options = ["--lengths", "64", "128", "--rounds", "1", "--num_threads", "1", "--output_dir", str(tmp_path)]
    short, long = run_command(decoder_state, *options)["steps"]
    a_layer = heads * head_dim * 2 * width  # bytes of the keys and values of one token
    for name in ("upstream", "softmax"):
        assert [row["bytes"][name] for row in (short, long)] == [layers * a_layer * n for n in (64, 128)]
    for name, features in (("elu", head_dim), ("hedgehog", 2 * head_dim)):
        state = heads * features * (head_dim + 1) * width
        assert [row["bytes"][name] for row in (short, long)] == [layers * state] * 2
    some = [row["bytes"]["hedgehog, softmax in 2 of 6 layers"] for row in (short, long)]
    assert some == [4 * state + 2 * a_layer * n for n in (64, 128)]
    assert all(row["step_ms"].keys() == decoder_state.PEERS.keys() for row in (short, long))
    assert short["bytes"]["hybrid, window 64"] == pytest.approx(long["bytes"]["hybrid, window 64"], rel=0.05)
