"""How fast the machine is, and what it is: for the benchmarks that compare a time with what it could be."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_attn_variants


def read_bandwidth(device: str) -> float:
    """Return the bytes a second that a sum over 512 MiB reads, far more than a processor's cache holds."""
    numbers = torch.ones(2**27, device=device)
    numbers.sum()
    times = [seconds(lambda: numbers.sum(), device) for _ in range(9)]
    return numbers.numel() * numbers.element_size() / statistics.median(times)


def arithmetic_rate(device: str, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of one large matrix product."""
    size = 2048
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    matrix @ matrix
    return 2 * size**3 / statistics.median(seconds(lambda: matrix @ matrix, device) for _ in range(9))


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return the time that `work` takes, with everything it started on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait for what was started on a GPU; a CPU is never behind."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    """Return what ran this and in which versions."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    on_cuda = device.startswith("cuda")
    return {
        "cpu": cpu,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_attn_variants": hf_attn_variants.__version__,
    }
