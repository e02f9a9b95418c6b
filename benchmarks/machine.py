"""Describe the machine and measure its peak speed, for benchmarks that compare a time with the possible minimum."""

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

# The instructions of a processor that determine the speed of matrix products.
INSTRUCTIONS = ("avx2", "avx512", "avx_vnni", "amx")


def measure_read_bandwidth(device: str) -> float:
    """Return the bytes per second at which a sum reads 512 MiB, which is more than the cache of a processor."""
    numbers = torch.ones(2**27, device=device)
    numbers.sum()
    times = [measure_seconds(lambda: numbers.sum(), device) for _ in range(9)]
    return numbers.numel() * numbers.element_size() / statistics.median(times)


def measure_arithmetic_rate(device: str, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    size = 2048
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    matrix @ matrix
    return 2 * size**3 / statistics.median(measure_seconds(lambda: matrix @ matrix, device) for _ in range(9))


def measure_seconds(work: Callable[[], Any], device: str) -> float:
    """Return the seconds that `work` takes, including all operations that it starts on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait until all operations on a GPU have finished. On a CPU, do nothing."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def describe_machine(device: str) -> dict[str, Any]:
    """Return the hardware and the library versions, without the name of the machine or any path."""
    known = read_cpu_info()
    on_cuda = device.startswith("cuda")
    return {
        "cpu": known.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "instructions": [flag for flag in known.get("flags", "").split() if flag.startswith(INSTRUCTIONS)],
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_attn_variants": hf_attn_variants.__version__,
    }


def read_cpu_info() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo, or an empty dictionary if the file does not exist."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
