"""The report of the comparison: the results of all runs in one JSON file."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.comparison.stages import Stage
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from hf_attn_variants.files import atomic_write

__all__ = ["RESULTS", "collect", "write_report"]

RESULTS = Path(__file__).resolve().parent / "results"
# The results that the report keeps of each run.
KEPT = (
    "loss",
    "bleu",
    "spearmanr",
    "accuracy",
    "num_parameters",
    "train_runtime",
    "steps",
    "decode_tokens_per_second",
    "gate_passed",
)


def collect(
    report: dict[str, Any], stage: Stage, folder: Path, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the report with the results of a stage. Rows without a finished run have no results.

    Args:
        report: the results of other stages, {name: results}.
        stage: the stage.
        folder: the folder with the runs of the stage.
        earlier: the stages of an existing report, whose results and machine are kept if the folder does not exist.
    """
    if earlier is not None and not folder.exists():
        results = earlier.get(stage.name, {})
        done, machine = results.get("rows", {}), results.get("machine")
    else:
        file = folder / "sweep_results.json"
        contestants = json.loads(file.read_text(encoding="utf-8"))["contestants"] if file.is_file() else []
        done, machine = {row["name"]: row["runs"] for row in contestants}, describe_machine("cpu")
    points = [f", alpha {alpha}" for alpha in stage.content.get("grid", {}).get("alpha", [])] or [""]
    rows = {
        name + point: {seed: _select(run) for seed, run in done.get(name + point, {}).items()}
        for name in stage.content["variants"]
        for point in points
    }
    return report | {stage.name: {"rows": rows, "unsupported": stage.unsupported, "machine": machine}}


def write_report(path: Path, stages: dict[str, Any], size: str) -> None:
    """Write the report, with the date and the allocator setting. Each stage contains its machine."""
    head = {"size": size, "date": time.strftime("%Y-%m-%d"), "memory": describe_memory()}
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(head | {"stages": stages}, indent=1) + "\n")


def _select(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name.endswith(KEPT) and isinstance(value, int | float)}
