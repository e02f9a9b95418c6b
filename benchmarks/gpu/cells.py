"""Run the cells of one part of the GPU benchmark, and write their results to a JSON file.

Each cell is measured once, and the file is complete after each cell. The result of a cell is its return value or its
error. After an error, the next cell runs. A cell that started but did not finish, because it hung or because the
process crashed, is tried once more.

The file contains the allocator setting of the process and the page faults of each cell. The parts do not run with both
allocator settings, because torch manages the memory of the GPU itself, and the page faults are those of the CPU.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.machine import describe_machine
from benchmarks.page_faults import UsageRecorder, describe_memory
from hf_attn_variants.files import atomic_write, load_json

# The exit statuses of a part: all cells have a result, the time is up, or the device needs a new process.
COMPLETE, UNFINISHED, DEVICE_LOST = 0, 3, 4
MAX_TRIES = 2
# After such an error, all later calls in the process fail.
DEVICE_ERRORS = ("CUDA error", "device-side assert", "CUDNN_STATUS", "CUBLAS_STATUS_EXECUTION_FAILED")

Cells = dict[str, Callable[[], dict[str, Any]]]


def parse_part(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments that `run.py` passes to each part."""
    parser = argparse.ArgumentParser(description="Run one part of the GPU benchmark. benchmarks/gpu/run.py calls it.")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cells", nargs="*", default=[], help="run only cells whose names contain one of these words")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file of the part")
    parser.add_argument("--deadline", type=float, required=True, help="Unix time after which no cell starts")
    return parser.parse_args(arguments)


def run_cells(args: argparse.Namespace, cells: Cells) -> int:
    """Measure the cells that have no result yet, write the JSON after each, and return the exit status.

    Raises:
        SystemExit: if the existing file is from another device, size or version.
    """
    transformers.logging.set_verbosity_error()
    report = _load_report(args)
    results = report["cells"]
    cells = {name: cell for name, cell in cells.items() if not args.cells or any(word in name for word in args.cells)}
    report["cells_in_all"] = len(cells | results)
    for name, measure in cells.items():
        cell = results.get(name, {"status": "begun", "tries": 0})
        if cell["status"] != "begun":
            continue
        if cell["tries"] >= MAX_TRIES:
            results[name] = cell | {"status": "failed", "error": f"It was started {MAX_TRIES} times and never ended."}
            _write(args, report)
            continue
        if time.time() > args.deadline:
            _write(args, report)
            return UNFINISHED
        results[name] = {"status": "begun", "tries": cell["tries"] + 1}
        _write(args, report)
        torch.manual_seed(0)
        with UsageRecorder() as watch:
            result, lost = _measure_cell(measure)
        results[name] |= {"seconds": round(watch.usage.seconds, 2)} | result
        results[name] |= {"minor_faults": watch.usage.minor_faults, "system_seconds": watch.usage.system_seconds}
        _write(args, report)
        print(f"{name}: {_format_cell(results[name])}", flush=True)
        if lost:
            return DEVICE_LOST
    _write(args, report)
    return COMPLETE


def compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected| over all elements, computed in float64 on the CPU."""
    actual, expected = (tensor.detach().to("cpu", torch.float64) for tensor in (actual, expected))
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def _measure_cell(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the result or the error of a cell, and whether the device is lost."""
    try:
        return {"status": "done"} | measure(), False
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        place = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{Path(place.filename).name}:{place.lineno}"
    gc.collect()  # the traceback referred to tensors of the cell
    lost = any(mark in text for mark in DEVICE_ERRORS)
    if torch.cuda.is_available() and not lost:
        torch.cuda.empty_cache()
    return {"status": "failed", "error": text[:2000], "where": location}, lost


def _load_report(args: argparse.Namespace) -> dict[str, Any]:
    """Return the existing report or a new one. All cells of a file must be measured with the same settings."""
    machine_info = describe_machine(args.device)
    header = {"device": args.device, "tiny": args.tiny}
    header |= {"device_name": machine_info["device"]} | {
        name: machine_info[name] for name in ("torch", "hf_attn_variants")
    }
    if not args.output.exists():
        return {
            "part": args.output.stem,
            "made": header,
            "machine": machine_info,
            "memory": describe_memory(),
            "cells": {},
        }
    report = load_json(args.output)
    if report["made"] != header:
        sys.exit(
            f"error: {args.output} was measured with {report['made']}, not with {header}. Use another --output_dir."
        )
    return report


def _write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    atomic_write(args.output, json.dumps(report, indent=1) + "\n")


def _format_cell(cell: dict[str, Any]) -> str:
    if cell["status"] == "failed":
        return f"FAILED: {cell['error'].splitlines()[0]}"
    met = {True: "met", False: "NOT met"}.get(cell.get("met"), "done")
    return f"{met}, {cell['seconds']} s"


def main(make_cells: Callable[[argparse.Namespace], Cells]) -> None:
    """Run the cells of a part, and end the process with the exit status."""
    args = parse_part()
    status = run_cells(args, make_cells(args))
    sys.stdout.flush()
    # A hung or broken device must not prevent the process from ending.
    os._exit(status)
