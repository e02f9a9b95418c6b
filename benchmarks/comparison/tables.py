"""The tables of the comparison, made from its reports; `benchmarks.result_tables` writes them into the page.

A difference between two rows is only shown as a difference if it is larger than the seed range of multi-head attention
and than the seed ranges of both rows. A row's rank counts the rows whose loss is lower by such a difference.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.speed_tables import Rows, Table

__all__ = ["BASELINE", "FOLDER", "TABLES", "Losses", "list_scratch_rows", "load_curve", "load_report", "load_timing"]

FOLDER = Path(__file__).resolve().parent / "results"
SCRATCH = ("heads", "head-counts", "mechanisms")
BASELINE = "MHA, 8 heads"
SEEDS = ("0", "1")
MISSING, SAME, UNSUPPORTED = "missing", "not distinguishable", "not supported"
KIB, MIB = 2**10, 2**20
# The curve of the checkpoint that the earlier sweep `sweeps/alpha.yaml` measured, by method.
EARLIER_CURVE = {"mean pooling": "1 head, averaged", "calibrated": "1 head, calibrated"}
TABLES: dict[str, Table] = {}


def table(*columns: str) -> Any:
    """Register a function that yields the rows of a table with these columns. Rows are only shown if one has run."""

    def register(rows: Any) -> Any:
        def iterate_rows() -> Rows:
            cells = [list(row) for row in rows()]
            if any(set(row[1:]) - {"", MISSING, UNSUPPORTED} for row in cells):
                return cells
            return [[f"{len(cells)} rows", *[MISSING] * (len(columns) - 1)]]

        TABLES[rows.__name__] = Table((), columns, iterate_rows)
        return iterate_rows

    return register


def load_report() -> dict[str, Any]:
    """Return the report of the largest size that has one."""
    return json.loads(next(p for size in ("full", "small") if (p := FOLDER / f"{size}.json").is_file()).read_text())


def load_timing() -> dict[str, Any]:
    """Return the report of the timing, or an empty one."""
    path = FOLDER / "timing.json"
    return json.loads(path.read_text()) if path.is_file() else {"rows": {}}


def list_scratch_rows(report: dict[str, Any], model: str) -> dict[str, dict[str, Any]]:
    """Return the runs from scratch of a model by row and seed. Rows without a finished run are empty."""
    return {name: runs for kind in SCRATCH for name, runs in report["stages"][f"{model}-{kind}"]["rows"].items()}


class Losses:
    """The dev losses of the rows of a table, and their comparison with a baseline.

    Args:
        rows: the runs of each row by seed.
        baseline: the runs of multi-head attention.
        spread: the seed range, or None for the range of the baseline.
    """

    def __init__(self, rows: dict[str, Any], baseline: dict[str, Any], spread: float | None = None) -> None:
        self.means = {name: self._mean(runs) for name, runs in rows.items() if runs}
        self.baseline = self._mean(baseline) if baseline else None
        self.spread = self._range(baseline) if spread is None and len(baseline) > 1 else spread
        self._ranges = {name: self._range(runs) for name, runs in rows.items() if runs}

    @staticmethod
    def _mean(runs: dict[str, Any]) -> float:
        return mean(run["eval_loss"] for run in runs.values())

    @staticmethod
    def _range(runs: dict[str, Any]) -> float:
        values = [run["eval_loss"] for run in runs.values()]
        return max(values) - min(values)

    def compare(self, name: str) -> str:
        """Return the difference from the baseline, or that it is not distinguishable."""
        if name not in self.means or self.baseline is None or self.spread is None:
            return MISSING
        difference = self.means[name] - self.baseline
        return f"{difference:+.3f}" if abs(difference) > max(self.spread, self._ranges[name]) else SAME

    def rank(self, name: str) -> str:
        """Return one more than the number of rows whose loss is distinguishably lower."""
        if name not in self.means or self.spread is None:
            return ""
        limits = {other: max(self.spread, self._ranges[name], self._ranges[other]) for other in self.means}
        return str(1 + sum(self.means[other] < self.means[name] - limit for other, limit in limits.items()))


def _values(runs: dict[str, Any], metric: str, form: str, scale: float = 1.0) -> str:
    """Return the mean of a metric over the seeds, followed by the range if there are several."""
    values = [scale * run[metric] for run in runs.values() if metric in run]
    if not values:
        return MISSING
    ends = f" ({min(values):{form}}–{max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def _cell(values: dict[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    return f"{scale * values[name]:{form}}" if name in values else MISSING


def _count_passed(runs: dict[str, Any]) -> str:
    """Return how many runs pass the context test."""
    return f"{sum(run['gate_passed'] for run in runs.values())} of {len(runs)}" if runs else MISSING


def _scratch(model: str, decodes: bool) -> Rows:
    report, timing = load_report(), load_timing()["rows"].get(model, {})
    rows = list_scratch_rows(report, model)
    losses = Losses(rows, rows[BASELINE])
    for name, runs in rows.items():
        idle = timing.get(name, {})
        cells = [_cell(idle, "training_ms", ".1f")]
        cells += [_cell(idle, "decoding_ms", ".2f"), _cell(idle, "cache_bytes", ".1f", 1 / KIB)] if decodes else []
        parameters = _values(dict([*runs.items()][:1]), "num_parameters", ",.0f")
        quality = [_values(runs, "eval_loss", ".3f"), losses.compare(name), losses.rank(name)]
        quality += [] if decodes else [_count_passed(runs)]
        yield [name, *quality, *cells, parameters, _cell(idle, "training_mib", ".1f")]
    for kind in SCRATCH:
        for name in report["stages"][f"{model}-{kind}"]["unsupported"]:
            yield [name, UNSUPPORTED, *[""] * (6 + decodes)]


QUALITY = ("mechanism", "loss", "against MHA", "rank")


@table(*QUALITY, "context test passed", "training step, ms", "parameters", "peak memory, MiB")
def comparison_bert() -> Rows:
    return _scratch("bert", decodes=False)


@table(*QUALITY, "training step, ms", "decoding step, ms", "cache, KiB", "parameters", "peak memory, MiB")
def comparison_t5() -> Rows:
    return _scratch("t5", decodes=True)


@table("attention", "STS-B, Spearman", "QNLI, accuracy")
def comparison_tasks() -> Rows:
    stages = load_report()["stages"]
    for name in stages["bert-heads"]["rows"]:
        cells = []
        for task, metric in (("stsb", "eval_spearmanr"), ("qnli", "eval_accuracy")):
            runs = {seed: run for seed in SEEDS for run in stages[f"bert-{task}-{seed}"]["rows"][name].values()}
            cells.append(_values(runs, metric, ".3f"))
        yield [name, *cells]


@table("mechanism", "BERT, loss", "BERT, against MHA", "T5, loss", "T5, against MHA")
def comparison_converted() -> Rows:
    report = load_report()
    stages = [report["stages"][f"{model}-converted"] for model in ("bert", "t5")]
    losses = []
    for model, stage in zip(("bert", "t5"), stages, strict=True):
        rows = list_scratch_rows(report, model)
        losses.append(Losses(stage["rows"], stage["rows"]["MHA"], Losses(rows, rows[BASELINE]).spread))
    for name in dict.fromkeys(name for stage in stages for key in ("rows", "unsupported") for name in stage[key]):
        cells: list[str] = []
        for stage, compared in zip(stages, losses, strict=True):
            if name in stage["rows"]:
                cells += [_values(stage["rows"][name], "eval_loss", ".3f"), compared.compare(name)]
            else:
                cells += [UNSUPPORTED, ""]
        yield [name, *cells]


def load_curve() -> dict[str, dict[float, tuple[float, float]]]:
    """Return the dev BLEU and the dev loss of each conversion method by the share of the original training steps."""
    stage = load_report()["stages"]["curve"]
    earlier = json.loads((FOLDER.parents[1] / "train/results/alpha.json").read_text())["rows"]
    curve: dict[str, dict[float, tuple[float, float]]] = {}
    for name, seeds in stage["rows"].items():
        method, _, share = name.partition(", alpha ")
        found = [(row["alpha"], row) for row in earlier if row["variant"] == EARLIER_CURVE.get(method)]
        points = curve.setdefault(method, {})
        for alpha, run in [*found, *((float(share), run) for run in seeds.values())]:
            points[0.0] = run["initial_eval_bleu"], run["initial_eval_loss"]
            points[alpha] = run["eval_bleu"], run["eval_loss"]
    return curve | {method: {} for method in stage["unsupported"]}


@table("method", "0 %", "1 %", "2.5 %", "5 %", "10 %")
def comparison_curve() -> Rows:
    for method, points in load_curve().items():
        yield [method, *_curve_cells(points)]


def _curve_cells(points: dict[float, tuple[float, float]]) -> Iterable[str]:
    for share in (0.0, 0.01, 0.025, 0.05, 0.1):
        yield "{:.1f} ({:.2f})".format(*points[share]) if share in points else MISSING


@table("attention", "dev loss", "against MHA", "test BLEU, greedy", "test BLEU, 4 beams")
def comparison_longer() -> Rows:
    runs = json.loads((FOLDER.parents[1] / "train/results/t5_multi30k_scratch.json").read_text())["runs"]
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        rows.setdefault(run["variant"], {})[run["seed"]] = run | {"eval_loss": run["dev_loss"]}
    losses = Losses(rows, rows["MHA 8x16"])
    for name, seeds in rows.items():
        bleu = [_values(seeds, metric, ".1f") for metric in ("test_bleu", "test_bleu_beam4")]
        yield [name, _values(seeds, "eval_loss", ".3f"), losses.compare(name), *bleu]
