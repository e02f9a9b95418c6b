"""Measure the time that the kernel takes to provide memory pages, and avoid it with another allocator setting.

By default, glibc returns each block above 32 MB to the kernel. When it requests the block again, the kernel provides
zeroed memory page by page. In a program that allocates such blocks repeatedly, this can take longer than the
computation, especially on a virtual machine. Allocators that do not return memory (jemalloc, tcmalloc, and glibc with
the variables of `FIXED_SETTINGS`) avoid this.
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
except ImportError:  # Windows does not have this module
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

# With these variables, glibc does not map large blocks separately and does not return memory to the kernel.
FIXED_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
ALLOCATOR_LIBRARIES = ("jemalloc", "tcmalloc", "mimalloc")
# If each fault takes 4 microseconds (a high estimate), 2,500 faults per second (10 MB of new pages) take one percent
# of the time. Up to 16 faults in total are always allowed, because the objects of Python also need some pages.
FEW_A_SECOND, FEW = 2500, 16
# If the kernel uses huge pages (2 MiB, zeroed), a fault of a huge page costs as much as this number of small faults.
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
    """A context manager that records the resources used in its block.

    Example:
        >>> with UsageRecorder() as recorder:
        ...     run()
        >>> recorder.usage
    """

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
    """Return the medians over the repeats of one figure, as JSON values, and whether it has few page faults."""

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None

    names = ("seconds", "minor_faults", "system_seconds")
    medians: dict[str, Any] = {name: median([getattr(usage, name) for usage in usages]) for name in names}
    return medians | {"few_faults": has_few_faults(medians["minor_faults"], medians["seconds"])}


def format_usage(usage: dict[str, Any]) -> str:
    """Return a text for the page faults and system time in a result of `summarize_usages`."""
    if usage["minor_faults"] is None:
        return "page faults not counted"
    return f"{usage['minor_faults']:,.0f} page faults, system {usage['system_seconds']:.3f} s"


def get_fault_limits() -> dict[str, int]:
    """Return the numbers of page faults, per second and in total, up to which a figure has few faults."""
    always = HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(encoding="utf-8")
    return {"faults_a_second": FEW_A_SECOND // HUGE_FAULT if always else FEW_A_SECOND, "or_in_all": FEW}


def has_few_faults(minor_faults: float | None, seconds: float, limits: Mapping[str, int] | None = None) -> bool | None:
    """Return whether a measurement has so few page faults that they do not affect its time.

    Args:
        minor_faults: the number of page faults, or None if they were not counted.
        seconds: the elapsed time.
        limits: the limits in the format of `get_fault_limits`, or None for its result.

    Returns:
        None if the page faults were not counted.
    """
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
    """Return {allocator setting: description of the allocator} of this process, for the reports."""
    name, version = platform.libc_ver()
    allocator = _find_preloaded_allocator() or f"{name} {version}".strip() or platform.system()
    variables = {name: os.environ[name] for name in (*FIXED_SETTINGS, "GLIBC_TUNABLES") if name in os.environ}
    return {
        get_allocator_setting(): {"allocator": allocator, "variables": variables, "few_faults": get_fault_limits()}
    }


def _find_preloaded_allocator() -> str | None:
    """Return the name of the preloaded allocator, or None without one."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    return next((name for name in ALLOCATOR_LIBRARIES if name in preloaded), None)


@contextmanager
def record_rounds(module: ModuleType) -> Iterator[dict[str, list[Usage]]]:
    """Record the resources used by the functions that `module._time_engines` calls.

    Args:
        module: a module of the package whose `_time_engines` takes a dictionary of functions as its first argument.

    Yields:
        {name: usages of all calls of the function, including warm-up calls}.
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
