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

# The instructions of a processor that determine the speed of matrix products.
INSTRUCTIONS = ("avx2", "avx512", "avx_vnni", "amx")


def measure_read_bandwidth(device: str) -> float:
    """Return the bytes per second at which a sum reads 512 MiB, far more than a processor's cache."""
    numbers = torch.ones(2**27, device=device)
    numbers.sum()
    times = [measure_seconds(lambda: numbers.sum(), device) for _ in range(9)]
    return numbers.numel() * numbers.element_size() / statistics.median(times)


def measure_arithmetic_rate(device: str, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of one large matrix product."""
    size = 2048
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    matrix @ matrix
    return 2 * size**3 / statistics.median(measure_seconds(lambda: matrix @ matrix, device) for _ in range(9))


def measure_seconds(work: Callable[[], Any], device: str) -> float:
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


def describe_machine(device: str) -> dict[str, Any]:
    """Return what ran this and in which versions; nothing that names the machine or a folder of it."""
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
    """Return what Linux says of the first processor; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
