"""Check the talking-heads benchmark: every part at tiny sizes, its targets, tables and plot."""

import json

import pytest
import torch
from fixtures.commands import run_command

from benchmarks.speed import talking_heads, talking_heads_layers, talking_heads_peers
from benchmarks.speed.talking_heads_report import list_targets


@pytest.mark.slow
def test_every_part_of_the_talking_heads_benchmark_runs(tmp_path, capsys):
    arguments = ["--tiny", "--rounds", "1", "--num_threads", "1", "--output_dir", str(tmp_path)]
    run_command(talking_heads, *arguments)
    report = json.loads((tmp_path / "talking_heads_cpu.json").read_text())
    assert {row["option"] for row in report["times"]} == {"plain", "causal", "dropout", "bias"}
    for row in [*report["times"], *report["layers"]]:
        for mode in ("forward", "training"):
            assert {"sdpa", "naive", "blocked"} <= row[mode].keys()
            assert all(value > 0 for value in row[mode].values())
    assert report["training_steps"]["milliseconds"].keys() == {"MHA", "talking heads", "talking heads, eager"}
    # The attention weights of 512 tokens have 4 MiB. The later measurement of 64 tokens must not include them.
    large, small = (row["forward"]["naive"] for row in report["peak_memory"])
    assert large >= 4 > small >= 0
    assert all(error < 1e-5 for rows in report["errors"].values() for row in rows.values() for error in row.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talking_heads_cpu.json", "talking_heads_cpu.png"]
    assert "| 2, 4, 32, 8 | training |" in capsys.readouterr().out


def report_with(forward, training, naive=500.0, memory=40.0):
    times = {"sdpa": 10.0, "naive": naive}
    return {
        "device": "cpu",
        "times": [
            {
                "shape": [4, 12, 512, 64],
                "option": option,
                "forward": times | {"blocked": forward * scale},
                "training": times | {"blocked": training * scale},
            }
            for option, scale in (("plain", 1), ("dropout", 100))
        ],
        "layers": [],
        "peak_memory": [
            {"shape": [1, 12, 4096, 64], **{m: {"naive": 1000.0, "blocked": memory} for m in ("forward", "training")}}
        ],
        "training_steps": {"length": 512, "milliseconds": {"MHA": 100.0, "talking heads": 114.0}},
    }


def test_targets_compare_the_blocked_kernels_with_their_limits():
    assert [target["met"] for target in list_targets(report_with(16.0, 20.0))] == [True] * 6
    slow = list_targets(report_with(16.1, 20.1, naive=64.0, memory=51.0))
    assert [target["met"] for target in slow] == [False, False, False, False, False, True]
    assert [target["measured"] for target in slow] == [1.61, 2.01, 3.975, 0.051, 0.051, 1.14]


def test_layers_with_identity_projections_equal_multi_head_attention():
    layers_by_name = {
        name: talking_heads_layers.Layer(attend, 4, 8)
        for name, attend in talking_heads_peers.make_peers("cpu", ["sdpa", "blocked"]).items()
    }
    layers_by_name["blocked"].load_state_dict(layers_by_name["sdpa"].state_dict())
    states = torch.randn(2, 6, 32)
    torch.testing.assert_close(layers_by_name["blocked"](states), layers_by_name["sdpa"](states))
