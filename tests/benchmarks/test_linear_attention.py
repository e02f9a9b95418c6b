"""Check the benchmark of linear attention: every part at small sizes, and its estimates."""

import json

import pytest
import torch
from fixtures.commands import run_command

from benchmarks.long import linear_attention


@pytest.mark.slow
def test_every_part_of_the_linear_attention_benchmark_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(linear_attention, "VECTORS", (32,))
    sizes = ["--lengths", "128", "512", "--heads", "1", "--rounds", "1", "--num_threads", "1"]
    sizes += ["--peers", "sdpa", "hedgehog", "favor", "--num_layers", "3"]
    run_command(linear_attention, *sizes, "--output_dir", tmp_path)
    report = json.loads((tmp_path / "linear_attention_cpu.json").read_text())
    for part in ("attention", "causal", "peak_memory"):
        for row in report[part]:
            assert all(set(row[mode]) == {"sdpa", "hedgehog", "favor"} for mode in linear_attention.MODES)
    models = ["upstream", "hedgehog", "hedgehog in 1 layers", "favor", "favor in 1 layers"]
    assert all(sorted(row["pass"]) == sorted(models) for row in report["models"])
    cache_sizes = [row["bytes"] for row in report["steps"]]
    assert cache_sizes[0]["sdpa"] * 4 == cache_sizes[1]["sdpa"]
    assert cache_sizes[0]["hedgehog"] == cache_sizes[1]["hedgehog"] == 4 * 128 * 65
    assert [item["least"] for item in report["targets"]] == [1.0]
    assert "to the power of" in capsys.readouterr().out
    others = ["--peers", "sdpa", "hybrid", "linformer", "--parts", "attention", "causal", "steps"]
    report = run_command(linear_attention, *sizes[:-6], *others, "--output_dir", tmp_path / "others")
    names = [set(report[part][0][kind]) for part, kind in (("attention", "forward"), ("causal", "forward"))]
    assert names == [{"sdpa", "hybrid", "linformer"}, {"sdpa", "hybrid"}]
    assert report["steps"][1]["bytes"].keys() == {"sdpa", "hybrid"}


def test_estimation_error_falls_with_the_square_root_of_the_vectors(monkeypatch):
    """Check that four times as many vectors halve the error."""
    torch.manual_seed(0)
    monkeypatch.setattr(linear_attention, "VECTORS", (64, 256))
    few, many = linear_attention.measure_estimates(head_dim=16, count=32)
    for name in ("favor", "rfa"):
        assert few[name] / many[name] == pytest.approx(2, rel=0.3)
