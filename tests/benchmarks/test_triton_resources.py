"""Check that the Triton kernels compile for other GPUs, with the launches that the package makes."""

import pytest
import torch

pytest.importorskip("triton.backends.nvidia")


def test_triton_kernels_compile_for_hopper_within_its_limits():
    from benchmarks.speed import triton_resources

    launches = dict(triton_resources.iterate_launches(torch.bfloat16, 64, (12, 12, 12), mask="boolean"))
    assert list(launches) == ["forward", "backward"]
    for launch in launches.values():
        result = triton_resources.measure_resources(launch, 90)
        assert 0 < result["registers"] <= 255 and result["shared_bytes"] <= 1024 * triton_resources.SHARED_KIB[90]
