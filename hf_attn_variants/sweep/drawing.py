"""A sweep's plot: each metric of each variant with its spread over seeds, as points, or along an axis as curves."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .plan import axis_name
from .results import Contestant, SweepResults, short_name

__all__ = ["draw_sweep"]

# Told apart by colour-blind readers as well (Okabe and Ito's), and by their marks.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black")
MARKS = ("o", "s", "D", "^", "v", "P", "X")
# From so many times the smallest value on, an axis is logarithmic.
LEAST_OF_LOGARITHM = 8


def draw_sweep(results: SweepResults) -> Figure:
    """Draw the finished runs of a sweep: a panel a metric, a dot a run, the range over seeds as a line."""
    if results.curve is None:
        size = (4.8 * len(results.metrics) + 1.6, 1.6 + 0.42 * len(results.contestants))
    else:
        size = (5.2 * len(results.metrics) + 0.8, 4.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results.metrics), squeeze=False, sharey=False)[0]
    for i, (axes, metric) in enumerate(zip(panels, results.metrics, strict=True)):
        if results.curve is None:
            _draw_points(axes, results.contestants, metric, names=i == 0)
        else:
            _draw_curves(axes, results, metric, results.curve, legend=i == 0)
        axes.grid(alpha=0.25)
    figure.suptitle(results.title, parse_math=False)  # a name with $ is no formula
    return figure


def _draw_points(axes: Axes, contestants: Sequence[Contestant], metric: str, names: bool) -> None:
    for place, each in enumerate(contestants):
        values = each.values(metric)
        if not values:
            continue
        colour = COLOURS[0]
        axes.plot([min(values), max(values)], [place, place], color=colour, linewidth=1.2)
        axes.plot(values, [place] * len(values), ".", color=colour, markersize=5)
        axes.plot([sum(values) / len(values)], [place], "D", color=colour, markersize=6)
    shown: Any = {"parse_math": False}
    axes.set_yticks(range(len(contestants)), [each.name for each in contestants] if names else [], **shown)
    axes.set_ylim(len(contestants) - 0.5, -0.5)
    axes.set_xlabel(short_name(metric))
    axes.margins(x=0.1)


def _draw_curves(axes: Axes, results: SweepResults, metric: str, curve: str, legend: bool) -> None:
    lines: dict[str, list[Contestant]] = {}
    for each in results.contestants:
        if curve in each.point:
            others = [f"{axis_name(axis)} {value}" for axis, value in each.point.items() if axis != curve]
            name = ", ".join([*([each.variant] if each.variant else []), *others])
            lines.setdefault(name, []).append(each)
    places: set[float] = set()
    for i, (name, contestants) in enumerate(lines.items()):
        points = sorted((each.point[curve], each.values(metric)) for each in contestants if each.values(metric))
        if points:
            places |= {x for x, _ in points}
            means = [sum(values) / len(values) for _, values in points]
            below = [mean - min(values) for mean, (_, values) in zip(means, points, strict=True)]
            above = [max(values) - mean for mean, (_, values) in zip(means, points, strict=True)]
            style: Any = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)], "markersize": 5}
            label = name or results.command
            axes.errorbar([x for x, _ in points], means, [below, above], capsize=3, elinewidth=1, label=label, **style)
    _draw_references(axes, [each for each in results.contestants if not each.point], metric)
    if places and min(places) > 0 and max(places) >= LEAST_OF_LOGARITHM * min(places):
        axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(places), [f"{x:g}" for x in sorted(places)])
    axes.minorticks_off()
    axes.set(xlabel=axis_name(curve), ylabel=short_name(metric))
    if legend and axes.get_legend_handles_labels()[1] not in ([], [results.command]):
        for text in axes.legend(fontsize=8).get_texts():
            text.set_parse_math(False)


def _draw_references(axes: Axes, references: Sequence[Contestant], metric: str) -> None:
    """Draw what the grid does not multiply as lines across, with the range as a band."""
    for i, each in enumerate(references):
        values = each.values(metric)
        if values:
            style: Any = {"color": f"{0.15 + 0.25 * (i % 3):.2f}"}
            axes.axhline(math.fsum(values) / len(values), linestyle="--", linewidth=1, label=each.name, **style)
            axes.axhspan(min(values), max(values), alpha=0.12, linewidth=0, **style)
