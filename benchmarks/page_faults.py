"""Measure the time that the kernel takes to provide memory pages, and avoid it with another allocator setting.

glibc returns each block above 32 MB to the kernel and requests it again, zeroed, page by page. In a program that
allocates such blocks all the time this can take longer than the computation, most of all on a virtual machine.
Allocators that keep memory (jemalloc, tcmalloc, glibc with the variables of `FIXED_SETTINGS`) avoid this.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

resource: Any
try:
    import resource
except ImportError:  # Windows counts them otherwise
    resource = None

__all__ = [
    "FIXED_SETTINGS",
    "Usage",
    "UsageRecorder",
    "describe_memory",
    "format_usage",
    "get_fault_limits",
    "has_few_faults",
    "summarize_usages",
]
__all__ += ["get_allocator_setting", "record_rounds"]

# With which glibc keeps memory: no block is so large that it is mapped by itself, and none is given back.
FIXED_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
ALLOCATOR_LIBRARIES = ("jemalloc", "tcmalloc", "mimalloc")
# 2,500 faults per second (10 MB of new pages) take one percent of the time if each takes 4 microseconds, a high
# value. 16 faults in total never matter, because the objects of Python also need some pages.
FEW_A_SECOND, FEW = 2500, 16
# The cost of a fault of a huge page (2 MiB, zeroed) in faults of small pages, if the kernel uses huge pages.
HUGE_FAULT = 100
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Usage:
    """The resources that a part of a run used.

    Args:
        seconds: The elapsed time.
        minor_faults: The page faults of all threads, or None if they are not counted.
        system_seconds: The time of all threads in the kernel, or None if it is not counted.
    """

    seconds: float
    minor_faults: float | None
    system_seconds: float | None


class UsageRecorder:
    """`with UsageRecorder() as recorder: ...`; `recorder.usage` is then what was done in it."""

    usage: Usage

    def __enter__(self) -> "UsageRecorder":
        self._before = _read_usage()
        return self

    def __exit__(self, *exception: Any) -> None:
        after = _read_usage()
        faults, system = (
            None if end is None or start is None else end - start
            for start, end in zip(self._before[1:], after[1:], strict=True)
        )
        self.usage = Usage(after[0] - self._before[0], faults, system)


def _read_usage() -> tuple[float, float | None, float | None]:
    if resource is None:
        return time.perf_counter(), None, None
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_minflt, used.ru_stime


def summarize_usages(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the medians of one figure's repeats, as JSON values, and whether its faults are few."""

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None

    names = ("seconds", "minor_faults", "system_seconds")
    medians: dict[str, Any] = {name: median([getattr(usage, name) for usage in usages]) for name in names}
    return medians | {"few_faults": has_few_faults(medians["minor_faults"], medians["seconds"])}


def format_usage(usage: dict[str, Any]) -> str:
    """Return a figure's `summarize_usages` in words."""
    if usage["minor_faults"] is None:
        return "page faults not counted"
    return f"{usage['minor_faults']:,.0f} page faults, system {usage['system_seconds']:.3f} s"


def get_fault_limits() -> dict[str, int]:
    """Return how many faults are few, for the reports."""
    always = HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(encoding="utf-8")
    return {"faults_a_second": FEW_A_SECOND // HUGE_FAULT if always else FEW_A_SECOND, "or_in_all": FEW}


def has_few_faults(minor_faults: float | None, seconds: float, limits: Mapping[str, int] | None = None) -> bool | None:
    """Return whether so many faults (of `get_fault_limits`) say nothing in so many seconds; None if not counted."""
    if minor_faults is None:
        return None
    limits = limits or get_fault_limits()
    return minor_faults <= max(limits["or_in_all"], limits["faults_a_second"] * seconds)


def get_allocator_setting() -> str:
    """Return the allocator setting of this process: "glibc" for the default, or "kept" for a fixed setting."""
    return (
        "kept"
        if _find_preloaded_allocator() or all(os.environ.get(name) == value for name, value in FIXED_SETTINGS.items())
        else "glibc"
    )


def describe_memory() -> dict[str, dict[str, Any]]:
    """Return the allocator of this process and its settings under `get_allocator_setting`, for the reports."""
    name, version = platform.libc_ver()
    allocator = _find_preloaded_allocator() or f"{name} {version}".strip() or platform.system()
    variables = {name: os.environ[name] for name in (*FIXED_SETTINGS, "GLIBC_TUNABLES") if name in os.environ}
    return {
        get_allocator_setting(): {"allocator": allocator, "variables": variables, "few_faults": get_fault_limits()}
    }


def _find_preloaded_allocator() -> str | None:
    """Return the preloaded allocator that keeps memory, if there is one."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    return next((name for name in ALLOCATOR_LIBRARIES if name in preloaded), None)


@contextmanager
def record_rounds(module: ModuleType) -> Iterator[dict[str, list[Usage]]]:
    """Record what the contestants take that `module._time_engines` runs.

    Args:
        module: of the package; its `_time_engines` gets a dict of names and functions first.

    Yields:
        For each name the usage of each call of its function, those that warm up included.
    """
    timed = module._time_engines
    usages: dict[str, list[Usage]] = {}

    def recorded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with UsageRecorder() as recorder:
                result = run(*args)
            usages.setdefault(name, []).append(recorder.usage)
            return result

        return call

    module._time_engines = lambda runs, *more: timed({name: recorded(name, run) for name, run in runs.items()}, *more)
    try:
        yield usages
    finally:
        module._time_engines = timed
