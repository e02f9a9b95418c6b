"""The engines of a serving table as a picture: tokens a second and peak memory."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .measure import ServingRow, ServingTable

__all__ = ["draw_serving"]

# Told apart by colour-blind readers as well: the checkpoint in torch, converted in torch, CTranslate2.
COLOURS = {"transformers": "#0072B2", "a converted checkpoint": "#009E73", "CTranslate2": "#D55E00"}


def draw_serving(table: ServingTable) -> Figure:
    """Draw a table as bars, its first row on top; int8 is hatched."""
    rows = table.rows
    has_memory = all(row.peak_bytes is not None for row in rows)
    figure = Figure(figsize=(10.0 if has_memory else 6.5, 1.6 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if has_memory else 1, sharey=True, squeeze=False)[0]
    values = [[row.tokens_per_second for row in rows]]
    if has_memory:
        values.append([(row.peak_bytes or 0) / 2**20 for row in rows])
    for axes, numbers, label in zip(
        panels, values, ("tokens a second", "peak memory of its process, MiB"), strict=False
    ):
        colours = [COLOURS[_kind(row)] for row in rows]
        hatches = ["//" if row.engine.int8 else "" for row in rows]
        bars = axes.barh([row.engine.name for row in rows], numbers, color=colours, hatch=hatches, edgecolor="white")
        axes.bar_label(bars, [f"{number:,.0f}" for number in numbers], padding=3, fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    load = table.load
    search = "" if load.max_new_tokens is None else f", {load.max_new_tokens} new tokens, beams {load.num_beams}"
    title = f"{Path(table.checkpoint).name}: batch {load.batch_size}, length {load.length:,}{search}"
    figure.suptitle(title, parse_math=False)  # a name with $ is no formula
    return figure


def _kind(row: ServingRow) -> str:
    if row.engine.ctranslate2:
        return "CTranslate2"
    return "transformers" if row.engine.fields is None else "a converted checkpoint"
