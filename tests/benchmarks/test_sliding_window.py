"""Check the benchmark of windows: every part at small sizes, and its targets."""

import json

import pytest
import torch
from fixtures.commands import run_command

from benchmarks.long import sliding_window


@pytest.mark.slow
def test_every_part_of_the_window_benchmark_runs(tmp_path, capsys):
    sizes = ["--lengths", "256", "1024", "--hidden_size", "64", "--rounds", "1", "--num_threads", "1"]
    run_command(sliding_window, *sizes, "--output_dir", tmp_path)
    report = json.loads((tmp_path / "sliding_window_cpu.json").read_text())
    assert [row["length"] for row in report["attention"]] == [256, 1024]
    for row in (*report["attention"], *report["layers"], *report["peak_memory"]):
        assert all(value >= 0 for mode in sliding_window.MODES for value in row[mode].values())
    assert report["layers"][0]["forward"].keys() >= {sliding_window.FULL, sliding_window.LONGFORMER}
    assert [item["least"] for item in report["targets"]] == [1.0, 1.0]
    assert "to the power of" in capsys.readouterr().out
    run_command(sliding_window, *sizes, "--rows", "32", "64", "--output_dir", tmp_path / "rows")
    report = json.loads((tmp_path / "rows/sliding_window_cpu.json").read_text())
    assert [(row["rows"], row["length"]) for row in report["rows"]] == [(32, 256), (32, 1024), (64, 256), (64, 1024)]


def test_growth_equals_the_exponent_of_the_length():
    rows = [{"length": n, "forward": {"a": 3.0 * n, "b": 2.0 * n**2}} for n in (512, 1024, 2048, 4096)]
    assert sliding_window.compute_growth_exponent(rows, "forward", "a") == pytest.approx(1)
    assert sliding_window.compute_growth_exponent(rows, "forward", "b") == pytest.approx(2)
    assert sliding_window.compute_growth_exponent(rows[:2], "forward", "a") is None


def test_compared_window_layers_give_equal_outputs():
    """Compare our layer with Longformer's, with equal projections for global and all tokens."""
    torch.manual_seed(0)
    layers = sliding_window.make_layers(64, 1024)
    layer, longformer_layer = layers[sliding_window.OURS], layers[sliding_window.LONGFORMER].layer
    for name in ("query", "key", "value"):
        for target in (getattr(longformer_layer, name), getattr(longformer_layer, f"{name}_global")):
            target.load_state_dict(getattr(layer, name).state_dict())
    states = torch.randn(1, 1024, 64)
    with torch.no_grad():
        torch.testing.assert_close(layer(states)[0], layers[sliding_window.LONGFORMER](states), atol=1e-5, rtol=0)
