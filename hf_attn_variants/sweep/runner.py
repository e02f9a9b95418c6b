"""Executes the runs of a sweep, and reports the results as JSON, as a Markdown table and as a plot."""

import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import TerminatedError
from ..files import CONFIG_NAME, RESULTS_NAME, atomic_write, load_json, make_folders
from ..training.engine.checkpoints import FolderInUseError, list_checkpoints, lock_folder
from .plan import CONVERTED, TRAINED, Sweep, SweepRun, get_axis_name

# The files in a run's folder that contain the commands with their results, and the output of the commands.
RECORD_NAME, LOG_NAME = "run.json", "output.log"


class RunFolder:
    """A sweep run and its folder, which may contain results from an earlier execution of the sweep."""

    def __init__(self, run: SweepRun, sweep_dir: Path):
        self.run, self.path = run, sweep_dir / run.folder
        self.record: dict[str, Any] = {"launch": run.launch, "train": run.train, "convert": run.convert}
        self.results: dict[str, Any] | None = None
        self.failure: str | None = None  # the reason why the run failed in this process
        self.load_record()

    def load_record(self) -> None:
        """Read the stored results, which another process may have written.

        Raises:
            ValueError: if the folder contains a run with different commands.
            OSError: if the file with the results cannot be read.
        """
        stored = load_json(self.path / RECORD_NAME) if (self.path / RECORD_NAME).is_file() else self.record
        if changed := [name for name, words in self.record.items() if stored[name] != words]:
            differences = f"{stored[changed[0]]} instead of {self.record[changed[0]]}"
            raise ValueError(f"{self.path} contains a run with other flags ({differences}). Set another --output_dir.")
        self.results = stored.get("results")

    @property
    def is_converted(self) -> bool:
        """True if the conversion is finished."""
        return self.run.convert is not None and (self.path / CONVERTED / CONFIG_NAME).is_file()

    def execute(self) -> None:
        """Run the unfinished commands, unless another process is running them.

        If the process is interrupted during training, the training command saves a checkpoint before it exits.

        Raises:
            KeyboardInterrupt: if the process is interrupted with Ctrl-C.
            TerminatedError: if the process receives SIGTERM.
            OSError: if a program is not installed, or if the results cannot be written.
        """
        make_folders(self.path)
        old_handler = signal.signal(signal.SIGTERM, _raise_terminated_error)
        try:
            with suppress(FolderInUseError), lock_folder(str(self.path), 0):
                self.load_record()
                if self.results is None:
                    self._run_unfinished_commands()
        finally:
            signal.signal(signal.SIGTERM, old_handler)

    def _run_unfinished_commands(self) -> None:
        self._write_record()
        for words in self._list_unfinished_commands():
            if status := _run_command(words, self.path / LOG_NAME):
                self.failure = f"status {status}: {_read_last_error(self.path / LOG_NAME)}"
                return
        self.results = load_json(self.path / TRAINED / RESULTS_NAME)
        self._write_record()

    def _write_record(self) -> None:
        atomic_write(self.path / RECORD_NAME, json.dumps({**self.record, "results": self.results}, indent=2) + "\n")

    def _list_unfinished_commands(self) -> list[list[str]]:
        """Return the commands that are not finished. Training resumes from its last checkpoint, if there is one."""
        *conversion, training = self.run.build_commands(self.path)
        for leftover_folder in self.path.glob(f".{CONVERTED}.partial-*"):  # left behind by a killed conversion
            shutil.rmtree(leftover_folder)
        trained, program = self.path / TRAINED, ["-m", "attn_variants"]
        if list_checkpoints(trained):
            training += ["--resume_from_checkpoint", "latest"]
        elif trained.is_dir() and any(trained.iterdir()):
            training += ["--overwrite_output_dir"]
        commands = [] if self.is_converted else [[sys.executable, *program, *words] for words in conversion]
        return [*commands, [*(self.run.launch or [sys.executable]), *program, *training]]


def _run_command(words: list[str], log: Path) -> int:
    """Run a command, append its output to the log and return its exit status."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    with open(log, "ab") as output:
        output.write(f"\n$ {shlex.join(words)}\n".encode())
        output.flush()
        # A separate process group lets the signal reach a launcher and all of its processes.
        options: Any = {"stdin": subprocess.DEVNULL, "env": os.environ | {"PATH": path}, "process_group": 0}
        process = subprocess.Popen(words, stdout=output, stderr=output, **options)
        try:
            return process.wait()
        except BaseException:  # after SIGTERM, the training command saves a checkpoint before it exits
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


def _raise_terminated_error(signum: int, frame: Any) -> None:
    raise TerminatedError("Stopped by SIGTERM. Run the same command again to continue.")


def _read_last_error(log: Path) -> str:
    """Return the last error message of the last command in the log, or else the last line of the log."""
    lines = log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2].split("\n")
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-2]).removeprefix("error: ")


# The metrics to show for each training command if the sweep file does not list any. Metrics that no run reports are
# omitted.
DEFAULT_METRICS = {
    "classify": ["eval_f1_macro", "eval_accuracy", "eval_rmse", "eval_pearson"],
    "glue": ["eval_accuracy", "eval_f1", "eval_matthews_correlation", "eval_pearson", "eval_spearmanr"],
    "ner": ["eval_f1"],
    "pretrain": ["eval_loss"],
    "pretrain-t5": ["eval_loss"],
    "seq2seq": ["eval_loss", "eval_bleu"],
    "squad": ["eval_f1", "eval_exact_match"],
    "uptrain": ["eval_loss"],
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black")  # Okabe-Ito palette


def collect_results(sweep: Sweep, folders: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the results of a sweep as a dictionary of JSON values. The contestants are in the order of the runs."""
    folders_by_contestant: dict[str, list[RunFolder]] = {}
    for folder in folders:
        folders_by_contestant.setdefault(folder.run.contestant, []).append(folder)
    contestants = [
        {
            "name": name or sweep.command,
            "variant": runs[0].run.variant,
            "point": runs[0].run.point,
            "seeds": [folder.run.seed for folder in runs],
            "spread": _compute_spreads([folder.results for folder in runs if folder.results]),
            "runs": {str(folder.run.seed): folder.results for folder in runs if folder.results},
        }
        for name, runs in folders_by_contestant.items()
    ]
    defaults, reported = DEFAULT_METRICS[sweep.command], _list_reported_metrics(contestants)
    # Curves are plotted over the first grid axis that has several numeric values.
    numeric_axes = (axis for axis, points in sweep.grid.items() if len(points) > 1 and all(map(_is_number, points)))
    return {
        "title": sweep.title,
        "command": sweep.command,
        "metrics": sweep.metrics or [name for name in defaults if name in reported] or defaults[:1],
        "curve": next(numeric_axes, None),
        "contestants": contestants,
    }


def format_markdown(results: dict[str, Any]) -> str:
    """Format the results as a Markdown table of means, with ranges if the seeds differ, followed by warnings."""
    metrics, contestants = results["metrics"], results["contestants"]
    rows = [["variant", *(name.removeprefix("eval_") for name in metrics), "parameters", "training, s", "runs"]]
    rows.append(["---"] * len(rows[0]))
    columns = (*metrics, "num_parameters", "train_runtime")
    for contestant in contestants:
        cells = [_format_cell(contestant["spread"].get(name)) for name in columns]
        rows.append([contestant["name"], *cells, f"{len(contestant['runs'])} of {len(contestant['seeds'])}"])
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    note = f"`attn-variants {results['command']}`. Means over seeds, with ranges if there is more than one seed."
    return "\n\n".join([f"# {results['title']}", note, table, *_iterate_warnings(results)]) + "\n"


def _iterate_warnings(results: dict[str, Any]) -> Iterator[str]:
    """Yield warnings about metrics that no run reports and about models that need more training."""
    contestants, reported = results["contestants"], _list_reported_metrics(results["contestants"])
    if reported and (missing := [name for name in results["metrics"] if name not in reported]):
        yield f"No run reports {', '.join(missing)}. The available metrics are {', '.join(reported)}."
    gates = {entry["name"]: [run.get("gate_passed") for run in entry["runs"].values()] for entry in contestants}
    if untrained := [name for name, passed in gates.items() if False in passed]:
        yield (
            f"Not trained long enough to compare their attention: {', '.join(untrained)}. These models do not use "
            "context (`gate_passed` is false). Train them for longer or with a higher learning rate."
        )


def plot_sweep(results: dict[str, Any]) -> Any:
    """Plot the finished runs of a sweep (see `collect_results`) in a figure with one panel per metric."""
    from matplotlib.figure import Figure  # imported here because the import takes half a second

    count, curve = len(results["metrics"]), results["curve"]
    # Matplotlib would interpret a dollar sign as the start of a formula.
    names = [contestant["name"].replace("$", r"\$") for contestant in results["contestants"]]
    figure = Figure(figsize=((5.2 if curve else max(4.0, 0.5 * len(names))) * count + 0.8, 4.4), layout="constrained")
    figure.suptitle(results["title"].replace("$", r"\$"))
    for axes, metric in zip(figure.subplots(1, count, squeeze=False)[0], results["metrics"], strict=True):
        lines: dict[str, list[tuple[float, float, float, float]]] = {}
        for row, contestant in enumerate(results["contestants"]):
            spread, point = contestant["spread"].get(metric), contestant["point"]
            if spread and curve and curve not in point:  # plot references as horizontal lines with ranges
                axes.axhline(spread["mean"], linestyle="--", linewidth=1, color="gray", label=names[row])
                axes.axhspan(spread["min"], spread["max"], alpha=0.12, linewidth=0, color="gray")
            elif spread:
                other_values = [f"{get_axis_name(axis)} {value}" for axis, value in point.items() if axis != curve]
                variant = contestant["variant"]
                name = ", ".join([variant] * bool(variant) + other_values).replace("$", r"\$") if curve else ""
                ends = spread["mean"] - spread["min"], spread["max"] - spread["mean"]
                lines.setdefault(name, []).append((point[curve] if curve else row, spread["mean"], *ends))
        for i, (name, points) in enumerate(lines.items()):
            x, mean, *both_ends = zip(*sorted(points), strict=True)
            style: Any = {"fmt": "o-" if curve else "o", "color": COLORS[i % len(COLORS)], "capsize": 3}
            axes.errorbar(x, mean, both_ends, label=name or None, **style)
        if not curve:
            axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
        elif axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        axes.set(xlabel=get_axis_name(curve or ""), ylabel=metric.removeprefix("eval_"))
        axes.grid(alpha=0.25)
    return figure


def _compute_spreads(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute the mean and range of each numeric result, and the standard deviation if there are several values."""
    spreads = {}
    for name in dict.fromkeys(name for results in runs for name in results):
        values = [results[name] for results in runs if _is_number(results.get(name))]
        if values:
            spreads[name] = {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
        if len(values) > 1:
            spreads[name]["deviation"] = statistics.stdev(values)
    return spreads


def _list_reported_metrics(contestants: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for contestant in contestants for name in contestant["spread"]))


def _format_cell(spread: dict[str, float] | None) -> str:
    if spread is None:
        return ""
    values = [spread[name] for name in ("mean", "min", "max")]
    mean, minimum, maximum = (
        f"{value:,.{0 if value == int(value) else 4 if abs(value) < 10 else 1}f}" for value in values
    )
    return mean if spread["min"] == spread["max"] else f"{mean} ({minimum} to {maximum})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
