"""Run all GPU benchmarks with one command, the most important parts first.

Each part runs in a separate process and writes a JSON file that is complete after each cell. Finished cells are
therefore not lost if the time is up, a kernel hangs or the machine stops. The same command with the same --output_dir
continues. After a failed cell, the next cell runs. --retry runs failed cells again. If a part uses less than its share
of the minutes, the other parts get the rest.

The benchmarks need torch, triton and transformers, and no network. The models have random weights and real shapes.

Example:
    python -m benchmarks.gpu.run --output_dir build/gpu --minutes 25
    python -m benchmarks.gpu.run --output_dir build/gpu --minutes 25 --parts parity kernel_truth --retry
    python -m benchmarks.gpu.run --output_dir build/gpu-tiny --device cpu --tiny
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hf_attn_variants.files import atomic_write, load_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# The parts in order of importance, with their minutes of 25 and their descriptions.
PARTS: dict[str, tuple[float, str]] = {
    "parity": (3, "every architecture compared with Transformers, in float32, bfloat16 and float16"),
    "kernel_truth": (3, "the talking-heads kernels compared with the formula"),
    "latent_kernel": (1.5, "the kernel that reads a latent once, compared with the formula and the speed of torch"),
    "kernel_settings": (1.5, "launch settings of the talking-heads kernels, and the time of each kernel"),
    "kernel_speed": (4.5, "time and memory of these kernels, fused attention and the compiled formula"),
    "decoding": (6, "T5-base and T5-large: tokens per second, memory and largest batch"),
    "long_texts": (3, "windows and kernels of linear cost, up to 65,536 tokens"),
    "training_steps": (2.5, "training steps: tokens per second and share of the peak speed"),
    "training_loop": (1.5, "the training loop in mixed precision, killed and resumed"),
}
# The maximum number of starts of a part whose process ends before the part is complete.
MAX_STARTS = 60
# Seconds after the deadline in which a process can finish its cell.
GRACE_SECONDS = 20
# A part does not start with less time, because its imports take several seconds.
MIN_SECONDS = 30


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\nExample:")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--cells", nargs="+", default=[], help="run only cells whose names contain one of these words")
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of all parts, including startup")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, to check that all parts run")
    parser.add_argument("--retry", action="store_true", help="run failed cells again")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "build/gpu")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes must be more than 0, got {args.minutes}")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu requires --tiny, because real shapes would take days.")
    return args


def main(args: argparse.Namespace) -> int:
    """Run the parts, and print and write a summary. Return 0 if all cells succeeded and reached their targets."""
    deadline = time.time() + 60 * args.minutes
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.retry:
        for part in args.parts:
            remove_failures(args.output_dir / f"{part}.json")
    # In the second round, parts that did not finish get the time that the other parts left over.
    problems: dict[str, str] = {}
    for share_of_all in (False, True):
        for part in args.parts:
            share = args.minutes * PARTS[part][0] / sum(minutes for minutes, _ in PARTS.values())
            end = deadline if share_of_all else min(deadline, time.time() + 60 * share)
            left = end - time.time()
            if not summarize_part(args.output_dir, part)["complete"] and part not in problems and left > MIN_SECONDS:
                print(f"== {part}: {PARTS[part][1]}; {left:.0f} s", flush=True)
                problem = run_part(args, part, end)
                problems |= {part: problem} if problem else {}
    rows = [summarize_part(args.output_dir, part) | {"problem": problems.get(part)} for part in args.parts]
    atomic_write(args.output_dir / "summary.json", json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['part']}: {row['done']} of {row['cells'] or '?'} cells, {row['failed']} failed, "
            f"{row['not_met']} not met, {row['seconds']:.0f} s"
            f"{'' if row['complete'] else '; NOT complete'}{': ' + row['problem'] if row['problem'] else ''}"
        )
    print(f"wrote {args.output_dir}")
    return int(any(row["failed"] or row["not_met"] or not row["complete"] for row in rows))


def run_part(args: argparse.Namespace, part: str, deadline: float) -> str | None:
    """Start the process of a part until its cells are finished or the time is up.

    A lost device or a crash of the interpreter only loses the cell that was running.

    Returns:
        The reason if the part could not start or did not finish, otherwise None.
    """
    output = args.output_dir / f"{part}.json"
    command = [sys.executable, str(HERE / f"{part}.py"), "--device", args.device, "--output", str(output)]
    command += ["--deadline", str(deadline - GRACE_SECONDS / 2), *(["--tiny"] if args.tiny else [])]
    command += ["--cells", *args.cells] if args.cells else []
    folders = [str(path) for path in (ROOT, ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for _ in range(MAX_STARTS):
        started = time.time()
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout=max(1.0, deadline + GRACE_SECONDS / 2 - time.time()))
        except subprocess.TimeoutExpired:
            print(f"{part}: stopped at its time limit", flush=True)
            return None
        finally:
            stop_group(process)
        before_any_cell = not output.exists() or output.stat().st_mtime < started
        if before_any_cell and status:
            # The imports failed, or the existing file has other settings. The error is on stderr.
            return f"ended with status {status} before its first cell"
        if summarize_part(args.output_dir, part)["complete"] or time.time() > deadline - GRACE_SECONDS / 2:
            return None
    return f"not complete after {MAX_STARTS} starts"


def stop_group(process: subprocess.Popen) -> None:
    """Kill the process group of a part if it still exists."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def summarize_part(folder: Path, part: str) -> dict[str, Any]:
    """Return the numbers of cells of a part, and whether all cells have a result."""
    path = folder / f"{part}.json"
    report = load_json(path) if path.exists() else {"cells": {}, "cells_in_all": 0}
    cells, in_all = report["cells"].values(), report.get("cells_in_all", 0)
    row: dict[str, Any] = {"part": part, "cells": in_all}
    row |= {status: sum(cell["status"] == status for cell in cells) for status in ("done", "failed")}
    row["not_met"] = sum(cell.get("met") is False for cell in cells)
    row["seconds"] = sum(cell.get("seconds", 0.0) for cell in cells)
    return row | {"complete": in_all > 0 and row["done"] + row["failed"] == in_all}


def remove_failures(path: Path) -> None:
    """Remove all cells without a successful result from the file of a part."""
    if path.exists():
        report = load_json(path)
        report["cells"] = {name: cell for name, cell in report["cells"].items() if cell["status"] == "done"}
        atomic_write(path, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(parse_args()))
