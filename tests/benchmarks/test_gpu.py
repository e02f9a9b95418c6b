"""Check the GPU benchmarks on the CPU at tiny shapes: cells, processes and reports."""

import argparse
import json
import time

import pytest
import torch
from fixtures.commands import run_command

from benchmarks.gpu import cells, kernel_truth, long_texts, parity
from benchmarks.gpu import run as gpu_run


@pytest.fixture
def part(tmp_path):
    """The arguments of a part with a time limit of one minute."""
    return argparse.Namespace(
        device="cpu", tiny=True, cells=[], output=tmp_path / "part.json", deadline=time.time() + 60
    )


def read_cells(args):
    return json.loads(args.output.read_text())["cells"]


def test_failed_cell_is_recorded_and_the_next_cell_runs(part):
    calls = []

    def fails():
        calls.append("fails")
        raise ValueError("no such kernel")

    functions = {"fails": fails, "works": lambda: calls.append("works") or {"met": True}}
    assert cells.run_cells(part, functions) == cells.COMPLETE
    assert read_cells(part)["fails"]["status"] == "failed"
    assert read_cells(part)["fails"]["error"] == "ValueError: no such kernel"
    assert read_cells(part)["works"]["met"]
    assert cells.run_cells(part, functions) == cells.COMPLETE and calls == ["fails", "works"]  # no cell runs again


def test_lost_device_restarts_the_process(part):

    def breaks():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    functions = {"breaks": breaks, "works": dict}
    assert cells.run_cells(part, functions) == cells.DEVICE_LOST and list(read_cells(part)) == ["breaks"]
    assert cells.run_cells(part, functions) == cells.COMPLETE
    assert [cell["status"] for cell in read_cells(part).values()] == ["failed", "done"]


def test_cell_that_times_out_is_tried_twice(part):

    def stopped():
        raise KeyboardInterrupt  # like SIGKILL, no result is written

    for tries in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            cells.run_cells(part, {"hangs": stopped, "works": dict})
        assert read_cells(part) == {"hangs": {"status": "begun", "tries": tries}}
    assert cells.run_cells(part, {"hangs": stopped, "works": dict}) == cells.COMPLETE
    assert read_cells(part)["hangs"]["error"] == "It was started 2 times and never ended."
    assert read_cells(part)["works"]["status"] == "done"


# A part in a separate process without torch; the tests append its cells.
FAKE = """
import json, os, sys, time
from pathlib import Path
path = Path(sys.argv[sys.argv.index("--output") + 1])
report = json.loads(path.read_text()) if path.exists() else {"cells": {}}
report["cells_in_all"] = 2
def write(**cells):
    report["cells"] |= cells
    path.write_text(json.dumps(report))
done = {"status": "done", "seconds": 1.0}
"""
FAKES = {
    "works": "write(a=done, b=done | {'met': False})",
    "imports": "import no_such_module",
    "crashes": "write(a=done) if 'a' not in report['cells'] else write(b=done)\nos.kill(os.getpid(), 11)",
    "hangs": "write(a=done)\ntime.sleep(600)",
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run.py` with fake parts and short time limits."""
    for name, text in FAKES.items():
        (tmp_path / f"{name}.py").write_text(FAKE + text)
    monkeypatch.setattr(gpu_run, "HERE", tmp_path)
    monkeypatch.setattr(gpu_run, "PARTS", {name: (1.0, name) for name in FAKES})
    monkeypatch.setattr(gpu_run, "GRACE_SECONDS", 0)
    monkeypatch.setattr(gpu_run, "MIN_SECONDS", 0.1)

    def call(*flags):
        argv = ["--device", "cpu", "--tiny", "--output_dir", str(tmp_path / "out"), "--minutes", "0.1", *flags]
        return run_command(gpu_run, *argv), json.loads((tmp_path / "out/summary.json").read_text())

    return call


@pytest.mark.thorough
def test_failed_part_does_not_stop_the_next_part(run, tmp_path, capfd):
    status, rows = run()
    rows = {row["part"]: row for row in rows}
    assert status == 1 and list(rows) == list(FAKES)
    assert rows["works"] | {"complete": True, "done": 2, "not_met": 1, "problem": None} == rows["works"]
    assert rows["imports"]["problem"] == "ended with status 1 before its first cell"
    assert rows["crashes"]["complete"] and rows["crashes"]["done"] == 2  # restarted after each crash
    assert rows["hangs"]["done"] == 1 and not rows["hangs"]["complete"]
    assert "no_such_module" in capfd.readouterr().err
    begun = {name: (tmp_path / f"out/{name}.json").stat().st_mtime_ns for name in ("works", "crashes")}
    assert run("--parts", *begun)[0] == 1  # one target is still not met
    assert begun == {name: (tmp_path / f"out/{name}.json").stat().st_mtime_ns for name in begun}


def test_kernel_parity_is_reported(part):
    """Check the fastest part in this process."""
    functions = kernel_truth.make_cells(part)
    few = {name: functions[name] for name in ("causal, padding, float32", "added mask, float16", "dropout, float32")}
    assert cells.run_cells(part, few) == cells.COMPLETE
    assert [cell["met"] for cell in read_cells(part).values()] == [True] * 3
    assert {cell["backend"] for cell in read_cells(part).values()} == {kernel_truth.get_backend()}


def test_wrong_kernel_fails_the_parity_check(monkeypatch):
    attend = kernel_truth.talking_heads_attention
    monkeypatch.setattr(kernel_truth, "talking_heads_attention", lambda *args, **call: 1.001 * attend(*args, **call))
    result = kernel_truth.measure_errors(kernel_truth.CASES["padding"]._replace(n=4, m=6), "cpu", "float32", True)
    assert not result["met"] and result["errors"]["output"] == pytest.approx(1e-3, rel=0.05)


def test_architecture_that_differs_from_transformers_is_reported(monkeypatch):
    architecture = next(architecture for architecture in parity.ALL_ARCHITECTURES if architecture.name == "distilbert")
    assert parity.measure_architecture_parity(architecture, "cpu", "bfloat16")["met"]
    make_pair = parity.make_pair

    def moved(*args):
        upstream, variant_model = make_pair(*args)
        with torch.no_grad():
            next(variant_model.parameters()).add_(0.01)
        return upstream, variant_model

    monkeypatch.setattr(parity, "make_pair", moved)
    assert not parity.measure_architecture_parity(architecture, "cpu", "float32")["met"]


def test_layer_is_timed_with_each_kernel():
    rows = long_texts.measure_layers(512, argparse.Namespace(tiny=True, device="cpu"))
    assert {f"BERT layer, {name}" for name in long_texts.KERNELS} <= rows["forward"].keys() and not rows["failures"]


@pytest.mark.slow
def test_gpu_benchmark_runs_at_tiny_shapes(tmp_path):
    argv = ["--device", "cpu", "--tiny", "--output_dir", str(tmp_path), "--minutes", "30"]
    assert run_command(gpu_run, *argv) == 0
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["part"] for row in rows] == list(gpu_run.PARTS)
    assert all(row["complete"] and row["done"] == row["cells"] > 0 for row in rows)
