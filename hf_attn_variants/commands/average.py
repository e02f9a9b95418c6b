"""The `attn-variants average` command."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser

EXAMPLE = """\
example:
  attn-variants average runs/glue-* --output_file glue.json

The command reads all_results.json in each folder. The score for a task is the mean of its official metrics (for MNLI,
over both dev sets). The average for a model is the mean over all tasks. Scores range from 0 to 100 and are averaged
over seeds, with the standard deviation if there are several seeds. Runs belong to the same model if they started from
the same --model_name_or_path. Runs of the same model on the same task may only differ in the seed."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = CommandParser(
        prog="attn-variants average",
        description="Print a table of GLUE scores, averaged over seeds for each task and over all tasks.",
        epilog=EXAMPLE,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="output folders of training runs")
    parser.add_argument("--output_file", metavar="JSON", help="output file for the scores of all models and seeds")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table, write the scores to --output_file if it is set, and return them.

    Raises:
        ValueError: if there are no results, or several results for the same task, model and seed.
        OSError: if a file cannot be read or written.
    """
    from ..files import atomic_write
    from ..inspection.scores import GLUE_METRICS, compute_model_scores, read_runs
    from ..inspection.text_tables import print_table, print_text

    runs, left_out = read_runs(args.folders)
    models = compute_model_scores(runs)
    results = {"glue": [model.to_dict() for model in models], "left_out": left_out}
    if args.output_file is not None:
        atomic_write(Path(args.output_file), json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    tasks = [task for task in GLUE_METRICS if any(task in model.tasks for model in models)]
    rows = []
    for model in models:
        part = f" ({len(model.tasks)} of {len(GLUE_METRICS)})" if model.missing else ""
        spreads = [_format_mean_std(spread) for spread in (*map(model.tasks.get, tasks), model.average)]
        rows.append([model.model, *spreads[:-1], spreads[-1] + part])
    print_table("GLUE, dev sets", ["model", *tasks, "average"], rows)
    print()
    if any(model.missing for model in models):
        print_text(
            "(k of n): average over only k of n tasks. Compare such averages only if they cover the same tasks."
        )
    for folder, reason in left_out.items():
        print_text(f"Skipped {folder}: {reason}")
    return results


def _format_mean_std(spread: Any) -> str:
    if spread is None:
        return "-"
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation}"
