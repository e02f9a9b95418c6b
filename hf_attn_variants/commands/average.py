"""The command `attn-variants average`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import CommandParser

__all__ = ["main", "parse_args"]

EXAMPLE = """\
example:
  attn-variants average runs/glue-* --output_file glue.json

Reads all_results.json of each folder. A task's score is the mean of its official metrics (of MNLI, that of both dev
sets); a model's average is the mean over the tasks. Scores are shown from 0 to 100, each as the mean over seeds and,
of several, their standard deviation. Runs belong to one model if they began with the same --model_name_or_path. Two
runs of one model on one task must have the same settings, except the seed."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog="attn-variants average",
        description="Make one table of runs on GLUE: each task over seeds, and the average of the tasks.",
        epilog=EXAMPLE,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="the output folders of runs")
    parser.add_argument("--output_file", metavar="JSON", help="write the scores, those of each seed as well")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Print a table and return the scores, as --output_file has them.

    Raises:
        ValueError, OSError: if results cannot be read, there is no run, or two of one task, model and seed.
    """
    from ..files import atomic_write
    from ..inspection.benchmark_scores import GLUE_METRICS, model_scores, read_runs
    from ..inspection.tables import print_table, print_text

    runs, left_out = read_runs(args.folders)
    models = model_scores(runs)
    results = {"glue": [model.to_dict() for model in models], "left_out": left_out}
    if args.output_file is not None:
        atomic_write(Path(args.output_file), json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    tasks = [task for task in GLUE_METRICS if any(task in model.tasks for model in models)]
    rows = [
        [model.model, *(_shown(model.tasks.get(task)) for task in tasks), _average(model, len(GLUE_METRICS))]
        for model in models
    ]
    print_table("GLUE, dev sets", ["model", *tasks, "average"], rows)
    print()
    if any(model.missing for model in models):
        print_text("(k of n): only k of the n tasks have runs. Compare such an average with one of the same tasks.")
    for folder, reason in left_out.items():
        print_text(f"left out: {folder}: {reason}")
    return results


def _average(model: Any, tasks: int) -> str:
    return _shown(model.average) + (f" ({len(model.tasks)} of {tasks})" if model.missing else "")


def _shown(spread: Any) -> str:
    if spread is None:
        return "-"
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation}"
