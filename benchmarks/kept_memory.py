"""Run speed benchmarks with both allocator settings: the default of glibc, and a fixed setting.

By default, glibc returns blocks above 32 MB to the kernel and requests them again page by page. On a virtual machine,
this can take longer than the computation, so that the ratio to a baseline that allocates more memory looks too good.
Therefore a benchmark runs in two processes, one after the other, and one JSON contains both reports:

    {..., "memory": {"glibc": {...}, "kept": {...}}, "kept": {...}}

The report of the default setting is at the top level, and that of the fixed setting is under "kept". Each figure
includes the page faults and the seconds of system time of the timed code. The ratio with the fixed setting is used
only if its figures have few page faults (`page_faults.get_fault_limits`). The claim is the smaller ratio
(`make_claim`).
"""

import argparse
import ctypes.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page_faults import ALLOCATOR_LIBRARIES, FIXED_SETTINGS, format_usage, get_allocator_setting
from hf_attn_variants.files import atomic_write

__all__ = [
    "NOT_RECORDED",
    "NOT_SHOWN",
    "SHORT_UNRECORDED_NOTE",
    "UNRECORDED_NOTE",
    "Claim",
    "add_memory_argument",
    "is_recorded",
    "make_claim",
    "merge_reports",
    "run",
    "split_by_setting",
]

NOT_RECORDED = "not recorded"
# Sections with older figures, which were measured without a record of page faults, contain one of these texts.
UNRECORDED_NOTE = "measured with the default allocator setting, without a record of page faults"
# The short form, for tables and summaries.
SHORT_UNRECORDED_NOTE = "page faults not recorded"
ALLOCATOR_SETTINGS = ("glibc", "kept")
# The names of the settings in texts: "default", and "fixed" for the setting in which glibc does not return memory.
SETTINGS = {"glibc": "default", "kept": "fixed"}
# Arguments that a report does not contain: its path and the allocator setting.
NOT_SHOWN = ("output_dir", "output", "memory")
# Both ratios are shown if they differ by more than this factor.
SAME = 1.1
# Variables that a process with the default allocator setting must not inherit.
ALLOCATORS = (*FIXED_SETTINGS, "GLIBC_TUNABLES", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX", "LD_PRELOAD")


class Claim(NamedTuple):
    """The claim for a ratio: the number (None if there is no claim), and the text."""

    ratio: float | None
    text: str


def make_claim(ratio_default: float, ratio_kept: float | None, is_cost: bool = False) -> Claim:
    """Return the claim for a ratio that was measured with both allocator settings.

    Args:
        ratio_default: The ratio with the default setting of glibc.
        ratio_kept: The ratio with the fixed setting, or None if it was not measured or had too many faults.
        is_cost: Whether lower is better, as for a ratio of times. The claim is then the larger ratio.
    """
    if ratio_kept is None:
        return Claim(None, f"{ratio_default:.2f}×, no claim")
    ratios = {"glibc": ratio_default, "kept": ratio_kept}
    setting = (max if is_cost else min)(ratios, key=ratios.__getitem__)
    (other,) = set(ALLOCATOR_SETTINGS) - {setting}
    differ = max(ratios.values()) > SAME * min(ratios.values())
    return Claim(
        ratios[setting], f"{ratios[setting]:.2f}×" + (f", {SETTINGS[other]} {ratios[other]:.2f}×" if differ else "")
    )


def add_memory_argument(parser: argparse.ArgumentParser) -> None:
    """Add --memory, which selects the allocator settings with which a benchmark runs."""
    parser.add_argument(
        "--memory",
        choices=("both", *ALLOCATOR_SETTINGS),
        default="both",
        help="allocator setting: the default (glibc), fixed (kept), or both in separate processes (default: both)",
    )


def run(
    main: Callable[[argparse.Namespace], Any],
    parse_args: Callable[[], argparse.Namespace],
    finish: Callable[[dict[str, Any], Path, argparse.Namespace], None] | None = None,
    output: str = "--output_dir",
    more: Sequence[str] = (),
) -> None:
    """Run a benchmark with the allocator setting of --memory. With "both", write one JSON with both reports.

    Args:
        main: a function that runs the benchmark in this process and writes its report as one JSON file.
        parse_args: a function that parses the command line.
        finish: a function that plots the merged report. Its arguments are the report, the path of its JSON and the
            command-line arguments.
        output: the flag of the output path, which is a folder for "--output_dir" and otherwise a file.
        more: arguments that are added to those of the command line.
    """
    args = parse_args()
    if args.memory == get_allocator_setting():
        main(args)
    elif args.memory != "both":
        env = _make_environment(args.memory)
        if env is None:
            sys.exit(f"error: --memory {args.memory}: {NO_KEEPER}")
        os.execve(sys.executable, sys.orig_argv, env)
    else:
        folder = getattr(args, output.removeprefix("--"))
        folder = folder if output == "--output_dir" else Path(folder).parent
        folder.mkdir(parents=True, exist_ok=True)
        reports: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(dir=folder, prefix=".both_ways-") as temporary:
            for setting in ALLOCATOR_SETTINGS:
                name, reports[setting] = _make_report(setting, Path(temporary) / setting, args, output, more)
        report = merge_reports(reports["glibc"], reports["kept"])
        atomic_write(folder / name, json.dumps(report, indent=1) + "\n")
        if finish is not None:
            finish(report, folder / name, args)
        print_claims(name, report)
        print(f"wrote {folder / name}")


NO_KEEPER = "the fixed setting requires glibc, or one of jemalloc, tcmalloc and mimalloc to preload"


def _make_environment(setting: str) -> dict[str, str] | None:
    """Return the environment of a process with an allocator setting, or None if the setting is not available."""
    env = {name: value for name, value in os.environ.items() if name not in ALLOCATORS}
    if setting == "glibc":
        return env
    if platform.libc_ver()[0] == "glibc":
        return env | FIXED_SETTINGS
    library = next(filter(None, map(ctypes.util.find_library, ALLOCATOR_LIBRARIES)), None)
    return None if library is None else env | {"LD_PRELOAD": library}


def _make_report(
    setting: str, folder: Path, args: argparse.Namespace, output: str, more: Sequence[str]
) -> tuple[str, dict[str, Any] | None]:
    """Run this script with one allocator setting, and return the name of its JSON and the report.

    The report is None if the setting is not available.
    """
    env = _make_environment(setting)
    if env is None:
        return "", None
    folder.mkdir()
    output_path = folder if output == "--output_dir" else folder / Path(getattr(args, output.removeprefix("--"))).name
    print(f"== {'default allocator setting' if setting == 'glibc' else 'fixed allocator setting'}", flush=True)
    command = [*sys.orig_argv, *more, "--memory", setting, output, str(output_path)]
    ended = subprocess.run([sys.executable, *command[1:]], env=env)
    if ended.returncode:
        sys.exit(ended.returncode if ended.returncode > 0 else 1)
    (path,) = folder.glob("*.json")
    return path.name, json.loads(path.read_text(encoding="utf-8"))


def merge_reports(glibc: dict[str, Any], fixed: dict[str, Any] | None) -> dict[str, Any]:
    """Return one report from the reports of both settings. Its "memory" describes both settings.

    Args:
        glibc: the report with the default setting.
        fixed: the report with the fixed setting, or None if that setting is not available.
    """
    if fixed is None:
        return glibc | {"memory": _describe_memory(glibc) | {"kept": {"not_run": NO_KEEPER}}}
    report = glibc | {"memory": _describe_memory(glibc) | _describe_memory(fixed)}
    if "targets" in report:
        others = {_get_target_key(target): target for target in fixed["targets"]}
        report["targets"] = [
            _select_worse(target, others.get(_get_target_key(target), target)) for target in glibc["targets"]
        ]
    return report | {"kept": {name: value for name, value in fixed.items() if name != "memory"}}


def _describe_memory(report: dict[str, Any]) -> dict[str, Any]:
    """Return the allocator setting of a report, with the number of figures and of those with many page faults."""
    ((setting, description),) = report["memory"].items()
    all_usages = [usage for _, usage in iterate_usages(report)]
    num_many = sum(not usage["few_faults"] for usage in all_usages)
    return {
        setting: description
        | {"figures": len(all_usages), "with_many_faults": num_many}
        | ({"is_kept": not num_many} if setting == "kept" else {})
    }


def _get_target_key(target: dict[str, Any]) -> str:
    """Return the name of a target."""
    return target.get("what") or target["target"]


def _select_worse(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the worse of two measurements of a target."""
    is_least = "least" in first or str(first.get("limit")).startswith("at least")
    return (min if is_least else max)(first, second, key=lambda target: target["measured"])


def iterate_usages(report: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys that lead to each figure of a report, and its usage (`page_faults.summarize_usages`)."""
    if isinstance(report, dict) and "few_faults" in report and "minor_faults" in report:
        yield " ".join(path), report
        return
    named = report.items() if isinstance(report, dict) else enumerate(report) if isinstance(report, list) else ()
    for name, part in named:
        if path or name != "kept":  # "kept" is the report with the fixed setting
            yield from iterate_usages(part, (*path, str(name)))


def is_recorded(report: dict[str, Any]) -> bool:
    """Return whether a report was made with both allocator settings."""
    return isinstance(report.get("memory"), dict) and report["memory"].keys() == set(ALLOCATOR_SETTINGS)


def split_by_setting(report: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the reports with the default and the fixed setting. The latter is None if it was not run."""
    return report, report.get("kept")


def print_claims(name: str, report: dict[str, Any]) -> None:
    """Print the page faults and system time of each figure with both settings, and the claim for each ratio."""
    from benchmarks.speed_claims import is_of_speed, iterate_claims  # not at the top, because it imports this module

    fixed_usages = dict(iterate_usages(report.get("kept", {})))
    for path, usage in iterate_usages(report):
        print(
            f"{path}: default {format_usage(usage)}; fixed "
            f"{format_usage(fixed_usages[path]) if path in fixed_usages else 'not run'}"
        )
    for setting, description in report["memory"].items():
        state = (
            description.get("not_run")
            or f"{description['with_many_faults']} of {description['figures']} figures with many page faults"
        )
        print(f"{setting}: {state}")
    # The prefix of a report's name determines its ratios, but users can choose a name without such a prefix.
    for line in iterate_claims(Path(name).stem, report) if is_of_speed(name) else ():
        print(line.text())
