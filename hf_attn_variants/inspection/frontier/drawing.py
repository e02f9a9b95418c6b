"""The frontier as a picture: what a variant takes against what it loses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .held_out import MEASURES
from .measure import Frontier, FrontierRow

__all__ = ["draw_frontier"]

# Told apart by colour-blind readers as well, and by their marks.
KINDS = {
    "the checkpoint": ("black", "*"),
    "latents": ("#0072B2", "o"),
    "fewer key/value heads": ("#D55E00", "s"),
    "both": ("#009E73", "D"),
}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
LABEL_SIZE = 8
# A label's place beside its point, in points, and the room that it takes there in shares of the picture.
PLACES = ((8, 5), (8, -11), (-8, 5), (-8, -11), (8, 16), (-8, 16), (8, -22), (-8, -22))
LETTER, LINE = 0.0088, 0.032


def draw_frontier(frontier: Frontier, loss: float | None = None) -> Figure:
    """Draw a frontier.

    Args:
        frontier: the variants.
        loss: a limit to draw, in the unit of the frontier's loss above the source's.
    """
    figure = Figure(figsize=(9.5, 6.0), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = frontier.rows
    for kind, (colour, mark) in KINDS.items():
        found = [row for row in rows if _kind(row) == kind]
        if found:
            axes.errorbar(
                [row.size for row in found],
                [row.loss_above for row in found],
                [row.loss_above_error for row in found],
                fmt=mark,
                color=colour,
                markersize=11 if mark == "*" else 6,
                elinewidth=0.8,
                label=kind,
                zorder=3,
            )
    best = sorted((row for row in rows if row.on_frontier), key=lambda row: row.size)
    axes.plot([row.size for row in best], [row.loss_above for row in best], color="0.6", linewidth=1, zorder=1)
    if loss is not None:
        axes.axhline(loss, color="0.3", linewidth=0.8, linestyle="--", label=f"--loss {loss:g}")
    has_cache = frontier.source.kv_cache_bytes is not None
    if has_cache:  # of parameters, the largest number is less than twice the smallest
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_yscale("symlog", linthresh=_linear_until(rows))
    axes.set_xlabel(_size_label(frontier))
    axes.set_ylabel(f"above the checkpoint's {frontier.source.loss:.3f}:\n{MEASURES[frontier.measure]}")
    title = f"{Path(frontier.checkpoint).name}: loss on {frontier.held_out_texts} held-out examples"
    axes.set_title(title, parse_math=False)  # a name with $ is no formula
    axes.grid(alpha=0.25, which="both")
    axes.margins(x=0.12, y=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: _bytes(value) if has_cache else f"{value / 1e6:,.4g} M")
    axes.legend(loc="upper right", fontsize=9)
    axes.yaxis.set_major_formatter("{x:g}")
    canvas.draw()
    _label(axes, rows, loss)
    return figure


def _kind(row: FrontierRow) -> str:
    if not row.fields:
        return "the checkpoint"
    names = {*row.fields, *(row.fields.get("per_layer_values") or {})}
    latents, heads = (any(word in name for name in names) for word in ("lora_rank", "key_value_heads"))
    return "both" if latents and heads else "latents" if latents else "fewer key/value heads"


def _size_label(frontier: Frontier) -> str:
    if frontier.source.kv_cache_bytes is None:
        return "parameters"
    source = (
        f" and {frontier.source_length:,} source"
        if "cross" in (frontier.source.kv_cache_bytes_per_token or ())
        else ""
    )
    return f"cache of {frontier.length:,} generated{source} tokens, float32"


def _linear_until(rows: Sequence[FrontierRow]) -> float:
    """Return the loss up to which the axis is linear: what is about nothing is not spread over decades."""
    known = sorted(abs(row.loss_above) for row in rows[1:] if row.loss_above)
    return max(known[len(known) // 4], known[-1] / 1000) if known else 1.0


def _label(axes: Axes, rows: Sequence[FrontierRow], loss: float | None) -> None:
    """Write the names beside the points, each where it covers the least of points, other names and the limit."""
    transform = axes.transData + axes.transAxes.inverted()
    points = [tuple(transform.transform((row.size, row.loss_above))) for row in rows]
    width, height = axes.get_window_extent().width * 72 / axes.figure.dpi, axes.get_window_extent().height * 72 / 100
    taken = [(x - 0.008, y - 0.012, x + 0.008, y + 0.012) for x, y in points]
    if loss is not None:
        limit = transform.transform((rows[0].size, loss))[1]
        taken.append((0.0, limit - 0.003, 1.0, limit + 0.003))
    for row, (x, y) in zip(rows, points, strict=True):
        places: list[Any] = []
        name = row.name.removeprefix("MHA + ")
        for dx, dy in PLACES:
            left = x + dx / width - (len(name) * LETTER if dx < 0 else 0)
            low = y + dy / height - LINE / 4
            box = (left, low, left + len(name) * LETTER, low + LINE)
            outside = max(0.0, -box[0]) + max(0.0, box[2] - 1) + max(0.0, -box[1]) + max(0.0, box[3] - 1)
            places.append((sum(_overlap(box, each) for each in taken) + 10 * outside, len(places), box, (dx, dy)))
        _, _, box, place = min(places)
        taken.append(box)
        axes.annotate(
            name,
            (row.size, row.loss_above),
            xytext=place,
            textcoords="offset points",
            ha="right" if place[0] < 0 else "left",
            fontsize=LABEL_SIZE,
            color="black" if row.on_frontier else "0.45",
        )


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return max(wide, 0.0) * max(high, 0.0) * 100


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.4g} {UNITS[unit]}"
