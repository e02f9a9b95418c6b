"""What a sweep found: its runs' results by contestant, as a table with the spread over seeds, and as JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runner import RunFolder

__all__ = [
    "PARAMETERS",
    "TRAINING_SECONDS",
    "Contestant",
    "SweepResults",
    "collect",
    "default_metrics",
    "number",
    "short_name",
]

PARAMETERS, TRAINING_SECONDS = "num_parameters", "train_runtime"
# Where a file names no metrics: those of these that the runs report, the first one first.
DEFAULT_METRICS = {
    "classify": ("eval_f1_macro", "eval_accuracy", "eval_rmse", "eval_pearson"),
    "glue": ("eval_accuracy", "eval_f1", "eval_matthews_correlation", "eval_pearson", "eval_spearmanr"),
    "ner": ("eval_f1",),
    "pretrain": ("eval_loss",),
    "pretrain-t5": ("eval_loss",),
    "seq2seq": ("eval_loss", "eval_bleu"),
    "squad": ("eval_f1", "eval_exact_match"),
    "uptrain": ("eval_loss",),
}


@dataclass(frozen=True)
class Contestant:
    """The runs of one variant at one point of the grid.

    Attributes:
        name: what tables call it.
        variant, point: see `plan.Run`.
        seeds: those that the file asks for.
        results: what each finished run reports, by seed.
    """

    name: str
    variant: str
    point: dict[str, Any]
    seeds: tuple[int, ...]
    results: dict[int, dict[str, Any]]

    def values(self, metric: str) -> list[float]:
        """Return a metric of each finished run that reports it as a number."""
        found: list[Any] = [results.get(metric) for results in self.results.values()]
        return [value for value in found if _is_number(value)]

    def spread(self, metric: str) -> dict[str, float] | None:
        """Return the mean, the smallest and the largest value of a metric, and of several the sample deviation."""
        values = self.values(metric)
        if not values:
            return None
        found = {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
        return found | ({"deviation": statistics.stdev(values)} if len(values) > 1 else {})


@dataclass(frozen=True)
class SweepResults:
    """All contestants of a sweep.

    Attributes:
        title, command: the file's.
        metrics: those to show.
        curve: the axis that curves are drawn along; None without one.
        contestants: in the order of the file.
    """

    title: str
    command: str
    metrics: tuple[str, ...]
    curve: str | None
    contestants: list[Contestant]

    def missing_metrics(self) -> list[str]:
        """Return the metrics that are to be shown and that no finished run reports."""
        finished = [each for each in self.contestants if each.results]
        return [name for name in self.metrics if finished and not any(each.values(name) for each in finished)]

    def about_context(self) -> str:
        """Return what is to be said of pretrained models that do not read their context; "" where all do."""
        names = [each.name for each in self.contestants if _fails_gate(each)]
        if not names:
            return ""
        return (
            f"Not yet trained enough to compare attention: {', '.join(names)}. Their models do not read their context "
            "(`gate_passed` is false): train longer, or at a higher rate."
        )

    def reported(self) -> list[str]:
        """Return the names of the numbers that finished runs report."""
        return _reported(self.contestants)

    def header(self) -> list[str]:
        """Return the table's header."""
        return ["variant", *map(short_name, self.metrics), "parameters", "training, s", "runs"]

    def rows(self) -> list[list[str]]:
        """Return the table's cells, a row a contestant: means, with the range where there are two runs or more."""
        rows = []
        for each in self.contestants:
            cells = [each.name, *(_cell(each.spread(name)) for name in self.metrics)]
            cells += [_cell(each.spread(PARAMETERS)), _mean(each.spread(TRAINING_SECONDS))]
            rows.append([*cells, f"{len(each.results)} of {len(each.seeds)}"])
        return rows

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [f"| {' | '.join(self.header())} |", "| --- " * len(self.header()) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in self.rows()]
        note = "Means over seeds, with the range where there are several."
        context = f"\n{self.about_context()}\n" if self.about_context() else ""
        return f"# {self.title}\n\n`attn-variants {self.command}`. {note}\n\n" + "\n".join(lines) + f"\n{context}"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it: the spread of each number that runs report, and each run's results."""
        names = self.reported()
        contestants = [
            {
                "name": each.name,
                "variant": each.variant,
                "point": each.point,
                "seeds": list(each.seeds),
                "spread": {name: found for name in names if (found := each.spread(name)) is not None},
                "runs": {str(seed): results for seed, results in each.results.items()},
            }
            for each in self.contestants
        ]
        return {
            "title": self.title,
            "command": self.command,
            "metrics": list(self.metrics),
            "curve": self.curve,
            "contestants": contestants,
        }


def collect(
    folders: Sequence[RunFolder], title: str, command: str, metrics: Sequence[str], curve: str | None
) -> SweepResults:
    """Return the results of a sweep's runs, finished or not.

    Args:
        folders: of its runs.
        title, command: the file's.
        metrics: to show; none: the command's own.
        curve: see `SweepResults`.
    """
    grouped: dict[str, list[RunFolder]] = {}
    for folder in folders:
        grouped.setdefault(folder.run.contestant, []).append(folder)
    contestants = []
    for name, runs in grouped.items():
        first = runs[0].run
        results = {each.run.seed: each.results for each in runs if each.results is not None}
        seeds = tuple(each.run.seed for each in runs)
        contestants.append(Contestant(name or command, first.variant, first.point, seeds, results))
    shown = tuple(metrics) or default_metrics(command, _reported(contestants))
    return SweepResults(title, command, shown, curve, contestants)


def default_metrics(command: str, reported: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that are shown where a file names none, of those that runs report."""
    known = DEFAULT_METRICS[command]
    return tuple(name for name in known if name in reported) or known[:1]


def _fails_gate(contestant: Contestant) -> bool:
    return any(results.get("gate_passed") is False for results in contestant.results.values())


def short_name(metric: str) -> str:
    """Return what a column is called: the dev metrics without "eval_"."""
    return metric.removeprefix("eval_")


def number(value: float) -> str:
    """Return a number with as many digits as a table needs."""
    if value == int(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    digits = next((digits for digits, least in ((0, 1000), (1, 100), (2, 10)) if abs(value) >= least), 4)
    return f"{value:,.{digits}f}"


def _cell(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return ""
    if spread["min"] == spread["max"]:
        return number(spread["mean"])
    return f"{number(spread['mean'])} ({number(spread['min'])} to {number(spread['max'])})"


def _mean(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['mean']:,.{0 if spread['mean'] >= 10 else 1}f}"


def _reported(contestants: Sequence[Contestant]) -> list[str]:
    names = {
        name: None
        for each in contestants
        for results in each.results.values()
        for name, value in results.items()
        if _is_number(value)
    }
    return list(names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
