"""Check that the Triton kernels compile for other GPUs, with the launches that the package makes."""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.backends.nvidia")
ROOT = Path(__file__).resolve().parents[2]


def test_triton_kernels_compile_for_hopper_within_its_limits(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    benchmark = importlib.import_module("benchmarks.speed.triton_resources")
    launches = dict(benchmark.iterate_launches(torch.bfloat16, 64, (12, 12, 12), mask="boolean"))
    assert list(launches) == ["forward", "backward"]
    for launch in launches.values():
        result = benchmark.measure_resources(launch, 90)
        assert 0 < result["registers"] <= 255 and result["shared_bytes"] <= 1024 * benchmark.SHARED_KIB[90]
