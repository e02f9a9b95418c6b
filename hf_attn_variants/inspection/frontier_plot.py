"""Plots the loss of variants against their size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .frontier import Frontier, FrontierRow
from .held_out import MEASURES

# {type of variant: (color, marker)}. The colors are distinguishable for color-blind readers.
VARIANT_STYLES = {
    "base model": ("black", "*"),
    "latents": ("#0072B2", "o"),
    "fewer key/value heads": ("#D55E00", "s"),
    "both": ("#009E73", "D"),
}
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
LABEL_SIZE = 8
# Possible offsets of a label from its point (in points), and the size of a letter as a fraction of the axes.
LABEL_OFFSETS = ((8, 5), (8, -11), (-8, 5), (-8, -11), (8, 16), (-8, 16), (8, -22), (-8, -22))
LETTER_WIDTH, LINE_HEIGHT = 0.0088, 0.032


def plot_frontier(frontier: Frontier, loss_limit: float | None = None) -> Figure:
    """Plot a frontier and return the figure.

    Args:
        frontier: The result of `measure_frontier`.
        loss_limit: A limit for the additional loss, which is shown as a line. If None, no line is shown.

    Example:
        >>> plot_frontier(frontier, loss_limit=0.05).savefig("frontier.png")
    """
    figure = Figure(figsize=(9.5, 6.0), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = frontier.rows
    for kind, (color, marker) in VARIANT_STYLES.items():
        members = [row for row in rows if _get_variant_type(row) == kind]
        if members:
            axes.errorbar(
                [row.size for row in members],
                [row.loss_above for row in members],
                [row.loss_above_error for row in members],
                fmt=marker,
                color=color,
                markersize=11 if marker == "*" else 6,
                elinewidth=0.8,
                label=kind,
                zorder=3,
            )
    best = sorted((row for row in rows if row.on_frontier), key=lambda row: row.size)
    axes.plot([row.size for row in best], [row.loss_above for row in best], color="0.6", linewidth=1, zorder=1)
    if loss_limit is not None:
        axes.axhline(loss_limit, color="0.3", linewidth=0.8, linestyle="--", label=f"--loss {loss_limit:g}")
    has_cache = frontier.source.kv_cache_bytes is not None
    if has_cache:  # parameter counts differ too little for a logarithmic axis
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_yscale("symlog", linthresh=_compute_linear_threshold(rows))
    axes.set_xlabel(_format_size_label(frontier))
    axes.set_ylabel(
        f"increase of the loss over the base model ({frontier.source.loss:.3f})\n{MEASURES[frontier.measure]}"
    )
    title = f"{Path(frontier.checkpoint).name}: loss on {frontier.held_out_texts} held-out examples"
    axes.set_title(title, parse_math=False)  # a name may contain $
    axes.grid(alpha=0.25, which="both")
    axes.margins(x=0.12, y=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: _format_bytes(value) if has_cache else f"{value / 1e6:,.4g} M")
    axes.legend(loc="upper right", fontsize=9)
    axes.yaxis.set_major_formatter("{x:g}")
    canvas.draw()
    _add_labels(axes, rows, loss_limit)
    return figure


def _get_variant_type(row: FrontierRow) -> str:
    """Return the type (a key of `VARIANT_STYLES`) of the variant in a row."""
    if not row.fields:
        return "base model"
    names = {*row.fields, *(row.fields.get("per_layer_values") or {})}
    latents, heads = (any(word in name for name in names) for word in ("lora_rank", "key_value_heads"))
    return "both" if latents and heads else "latents" if latents else "fewer key/value heads"


def _format_size_label(frontier: Frontier) -> str:
    """Return the label of the size axis."""
    if frontier.source.kv_cache_bytes is None:
        return "parameters"
    caches = frontier.source.kv_cache_bytes_per_token or ()
    source = f" and {frontier.source_length:,} source" if "cross" in caches else ""
    return f"cache of {frontier.length:,} generated{source} tokens, float32"


def _compute_linear_threshold(rows: Sequence[FrontierRow]) -> float:
    """Return the loss below which the axis is linear, so that losses near zero are not spread over several decades."""
    known = sorted(abs(row.loss_above) for row in rows[1:] if row.loss_above)
    return max(known[len(known) // 4], known[-1] / 1000) if known else 1.0


def _add_labels(axes: Axes, rows: Sequence[FrontierRow], loss_limit: float | None) -> None:
    """Place the name of each variant where it overlaps least with points, other names and the limit."""
    transform = axes.transData + axes.transAxes.inverted()
    points = [tuple(transform.transform((row.size, row.loss_above))) for row in rows]
    extent, scale = axes.get_window_extent(), 72 / axes.figure.dpi
    width, height = extent.width * scale, extent.height * scale
    occupied_boxes = [(x - 0.008, y - 0.012, x + 0.008, y + 0.012) for x, y in points]
    if loss_limit is not None:
        limit = transform.transform((rows[0].size, loss_limit))[1]
        occupied_boxes.append((0.0, limit - 0.003, 1.0, limit + 0.003))
    for row, (x, y) in zip(rows, points, strict=True):
        candidates: list[Any] = []
        name = row.name.removeprefix("MHA + ")
        for dx, dy in LABEL_OFFSETS:
            left = x + dx / width - (len(name) * LETTER_WIDTH if dx < 0 else 0)
            low = y + dy / height - LINE_HEIGHT / 4
            box = (left, low, left + len(name) * LETTER_WIDTH, low + LINE_HEIGHT)
            outside = max(0.0, -box[0]) + max(0.0, box[2] - 1) + max(0.0, -box[1]) + max(0.0, box[3] - 1)
            covered = sum(_compute_overlap_area(box, other_box) for other_box in occupied_boxes)
            candidates.append((covered + 10 * outside, len(candidates), box, (dx, dy)))
        _, _, box, offset = min(candidates)
        occupied_boxes.append(box)
        axes.annotate(
            name,
            (row.size, row.loss_above),
            xytext=offset,
            textcoords="offset points",
            ha="right" if offset[0] < 0 else "left",
            fontsize=LABEL_SIZE,
            color="black" if row.on_frontier else "0.45",
        )


def _compute_overlap_area(first: Sequence[float], second: Sequence[float]) -> float:
    """Return 100 times the area in which two boxes (left, bottom, right, top) overlap."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0) * 100


def _format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, for example "1.5 KiB"."""
    unit = 0
    while count >= 1024 and unit < len(BYTE_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.4g} {BYTE_UNITS[unit]}"
