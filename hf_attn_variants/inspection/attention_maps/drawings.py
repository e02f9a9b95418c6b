"""Pictures of attention maps and of the projections across heads: matplotlib figures, one for each attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .maps import AttentionMaps, Projection, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "KV_COLOURS",
    "colour_limit",
    "draw_attention",
    "draw_projections",
    "is_signed",
    "shown_label",
    "with_changes",
]

# matplotlib's own font has no letters of Chinese, Japanese and Korean: the first of these that is installed does.
CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "Hiragino Sans",
    "Arial Unicode MS",
)
# All lengths in inches.
CELL = 0.135  # of a token's row or column: room for its label
SMALLEST_PANEL = 1.35
GAP, TITLE, BLOCK_TITLE, COLOUR_BAR = 0.14, 0.2, 0.3, 0.9
LETTER = 0.062  # of a label's font
WIDTH = 17.0  # that the panels of a row may take
MATRIX_CELL, MATRIX_CELL_WITH_NUMBERS, NUMBERED_HEADS = 0.14, 0.3, 24
DOTS_PER_INCH = 110
LONGEST_LABEL = 14
NEGLIGIBLE = 0.02  # of the largest weight: as far below zero no colours are given to both signs
NEAR_IDENTITY = 0.3  # in no number farther from the identity than this, a projection's change from it is shown too
# One for each key/value head, told apart by colour-blind readers as well; beyond eight they begin anew.
KV_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#4D4D4D")


def is_signed(stage: Stage) -> bool:
    """Say whether a stage needs colours for both signs: logits, and mixed weights that fall well below zero."""
    return stage.is_logits or float(stage.maps.min()) < -NEGLIGIBLE * float(stage.maps.abs().max())


def colour_limit(stage: Stage) -> float:
    """Return the value of the strongest colour, shared by a stage's heads; the largest logits are cut off."""
    values = stage.maps[~stage.maps.isnan()].abs()
    limit = values.quantile(0.99) if stage.is_logits and values.numel() < 2**24 else values.max()
    return max(float(limit), 1e-6)


def with_changes(projections: Sequence[Projection]) -> tuple[Projection, ...]:
    """Return projections, each near the identity (where it usually began) followed by 100 times its distance from it.

    Beside the ones of the diagonal, what training changed could not be seen.
    """
    shown = []
    for projection in projections:
        shown.append(projection)
        rows, columns = projection.matrix.shape
        change = projection.matrix - torch.eye(rows, columns)
        if rows == columns and 0 < float(change.abs().max()) < NEAR_IDENTITY:
            shown.append(replace(projection, name=f"100 ({projection.name} - I)", matrix=100 * change))
    return tuple(shown)


def shown_label(token: str) -> str:
    """Return a token's label, shortened to what fits beside a map."""
    return token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class _Block:
    """Where the panels of one stage stand: a title, a grid of panels, column labels below it."""

    columns: int
    rows: int
    panel: tuple[float, float]
    labels: tuple[float, float]  # the width of the row labels, the height of the column labels

    @classmethod
    def of(cls, heads: int, query_tokens: Sequence[str], key_tokens: Sequence[str]) -> _Block:
        panel = (
            max(SMALLEST_PANEL, CELL * len(key_tokens)),
            max(SMALLEST_PANEL, CELL * len(query_tokens)),
        )
        rows = math.ceil(heads / max(1, min(heads, int(WIDTH / (panel[0] + GAP)))))
        widest = [max(len(shown_label(token)) for token in tokens) for tokens in (query_tokens, key_tokens)]
        return cls(math.ceil(heads / rows), rows, panel, (LETTER * widest[0] + 0.15, LETTER * widest[1] + 0.15))

    @property
    def width(self) -> float:
        return self.labels[0] + self.columns * (self.panel[0] + GAP) + COLOUR_BAR

    @property
    def height(self) -> float:
        return BLOCK_TITLE + self.rows * (self.panel[1] + TITLE + GAP) + self.labels[1]


def draw_attention(maps: AttentionMaps, model_name: str, path: str | Path) -> None:
    """Draw every stage and head of one attention as a PNG.

    Args:
        maps: of `attention_maps`.
        model_name: for the title.
        path: the PNG.
    """
    blocks = [_Block.of(len(stage.maps), maps.query_tokens, maps.key_tokens) for stage in maps.stages]
    size = (max(max(block.width for block in blocks), 6.0), 0.75 + sum(block.height for block in blocks))
    figure = _figure(size, f"{model_name}: {maps.name}", _subtitle(maps))
    top = size[1] - 0.7
    for stage, block in zip(maps.stages, blocks, strict=True):
        _draw_stage(figure, size, top, stage, block, maps)
        top -= block.height
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def draw_projections(attentions: Sequence[AttentionMaps], model_name: str, path: str | Path) -> None:
    """Draw P_l and P_w of every attention that has them as one PNG; attentions that share their weights stand once.

    Raises:
        ValueError: if there are none.
    """
    rows = list(_distinct_projections(attentions))
    if not rows:
        raise ValueError(f"{model_name} has no projections across heads.")
    shapes = [projection.matrix.shape for _, projections in rows for projection in projections]
    cell = MATRIX_CELL_WITH_NUMBERS if max(max(shape) for shape in shapes) <= NUMBERED_HEADS else MATRIX_CELL
    panel = [max(cell * max(shape[axis] for shape in shapes), 0.9) for axis in (1, 0)]
    step = (panel[0] + 0.85, panel[1] + 0.95)
    kinds = max(len(projections) for _, projections in rows)
    groups = min(len(rows), max(1, int(WIDTH / (kinds * step[0]))))
    lines = math.ceil(len(rows) / groups)
    groups = math.ceil(len(rows) / lines)
    size = (max(groups * kinds * step[0] + 0.3, 7.0), lines * step[1] + 0.85)
    figure = _figure(
        size,
        f"{model_name}: projections across heads",
        "Rows: heads in, columns: heads out. The colour grows with the square root, so that small numbers show.",
    )
    limits: dict[str, float] = {}
    for projection in (projection for _, projections in rows for projection in projections):
        limits[projection.name] = max(limits.get(projection.name, 1e-6), float(projection.matrix.abs().max()))
    for number, (name, projections) in enumerate(rows):
        for kind, projection in enumerate(projections):
            x = 0.7 + (number % groups * kinds + kind) * step[0]
            y = size[1] - 0.85 - (number // groups) * step[1]
            height, width = (cell * length for length in projection.matrix.shape)
            axes = figure.add_axes(_place(size, x, y - 0.2 - height, width, height))
            _draw_matrix(axes, projection, limits[projection.name], with_numbers=cell == MATRIX_CELL_WITH_NUMBERS)
            axes.set_title(f"{name}: {_formula(projection.name)}", fontsize=8.5, loc="left", x=-0.12, pad=6)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _distinct_projections(attentions: Sequence[AttentionMaps]) -> Iterator[tuple[str, tuple[Projection, ...]]]:
    by_path: dict[str, list[AttentionMaps]] = {}
    for maps in attentions:
        by_path.setdefault(maps.path, []).append(maps)
    for shared in by_path.values():
        if shared[0].projections:
            more = f" to {shared[-1].name.removeprefix('layer ')}" if len(shared) > 1 else ""
            yield shared[0].name + more, with_changes(shared[0].projections)


def _figure(size: tuple[float, float], title: str, subtitle: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.15 / size[0], 1 - 0.27 / size[1], title, fontsize=13, weight="bold", parse_math=False)
    figure.text(0.15 / size[0], 1 - 0.5 / size[1], subtitle, fontsize=8.5, color="#444444", parse_math=False)
    return figure


def _subtitle(maps: AttentionMaps) -> str:
    parts = ["rows attend to columns"]
    if any(stage.kv_heads for stage in maps.stages):
        parts.append(f"frames of one colour: heads that share one of the {maps.kv_heads} key/value heads (KV)")
    if maps.dynamic:
        parts.append(f"the mixes include the input-dependent terms {', '.join(maps.dynamic)}")
    return "; ".join(parts)


def _place(
    size: tuple[float, float], x: float, y: float, width: float, height: float
) -> tuple[float, float, float, float]:
    return x / size[0], y / size[1], width / size[0], height / size[1]


def _draw_stage(
    figure: Figure, size: tuple[float, float], top: float, stage: Stage, block: _Block, maps: AttentionMaps
) -> None:
    limit, signed = colour_limit(stage), is_signed(stage)
    colours = {"cmap": _colour_map(signed), "norm": _norm(limit, signed)}
    note = " (each row's mean taken off)" if stage.is_logits else ""
    title = figure.text(0.15 / size[0], (top - 0.17) / size[1], stage.title + note, fontsize=10.5, weight="bold")
    title.set_parse_math(False)
    left = block.labels[0]
    heads = len(stage.maps)
    for head in range(heads):
        row, column = divmod(head, block.columns)
        x = left + column * (block.panel[0] + GAP)
        y = top - BLOCK_TITLE - (row + 1) * (block.panel[1] + TITLE) - row * GAP
        axes = figure.add_axes(_place(size, x, y, *block.panel))
        image = axes.imshow(stage.maps[head].numpy(), aspect="auto", interpolation="nearest", **colours)
        kv_head = stage.kv_heads[head] if stage.kv_heads else None
        _name_head(axes, f"{stage.head} {head + 1}", kv_head)
        is_lowest = head + block.columns >= heads
        _label(axes, maps.query_tokens if column == 0 else None, maps.key_tokens if is_lowest else None)
    bar_height = min(1.5, block.rows * block.panel[1])
    x = left + block.columns * (block.panel[0] + GAP) + 0.05
    bar = figure.add_axes(_place(size, x, top - BLOCK_TITLE - TITLE - bar_height, 0.12, bar_height))
    ticks = [-limit, 0, limit] if signed else [0, limit / 4, limit]
    if signed and not stage.is_logits:
        ticks = [-limit, -limit / 4, 0, limit / 4, limit]
    colour_bar = figure.colorbar(image, cax=bar, ticks=ticks, format="%.2g")
    colour_bar.ax.tick_params(labelsize=7)


def _colour_map(signed: bool) -> Any:
    from matplotlib import colormaps

    return colormaps["RdBu_r" if signed else "viridis"].with_extremes(bad="#d0d0d0")


def _norm(limit: float, signed: bool) -> Any:
    from matplotlib.colors import FuncNorm

    lowest = -limit if signed else 0.0
    return FuncNorm((_signed_root, _signed_square), vmin=lowest, vmax=limit, clip=True)


def _signed_root(values: Any) -> Any:
    import numpy

    return numpy.sign(values) * numpy.sqrt(numpy.abs(values))


def _signed_square(values: Any) -> Any:
    import numpy

    return numpy.sign(values) * numpy.square(values)


def _name_head(axes: Axes, name: str, kv_head: int | None) -> None:
    if kv_head is None:
        axes.set_title(name, fontsize=8, pad=3)
        return
    colour = KV_COLOURS[kv_head % len(KV_COLOURS)]
    axes.set_title(f"{name} · KV {kv_head + 1}", fontsize=7.5, pad=3, color=colour)
    for spine in axes.spines.values():
        spine.set(edgecolor=colour, linewidth=2)


def _label(axes: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None) -> None:
    axes.tick_params(length=0, pad=2)
    axes.set_xticks([])
    axes.set_yticks([])
    look: dict[str, Any] = {"fontsize": 7, "parse_math": False, "fontfamily": _fonts()}
    if rows is not None:
        axes.set_yticks(range(len(rows)), [shown_label(token) for token in rows], **look)
    if columns is not None:
        axes.set_xticks(range(len(columns)), [shown_label(token) for token in columns], rotation=90, **look)


@cache
def _fonts() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in CJK_FONTS if name in installed)]


def _formula(name: str) -> str:
    return "$" + name.replace("(", r"\,(") + "$"


def _draw_matrix(axes: Axes, projection: Projection, limit: float, with_numbers: bool) -> None:
    matrix: torch.Tensor = projection.matrix
    axes.imshow(matrix.numpy(), aspect="auto", cmap=_colour_map(True), norm=_norm(limit, True))
    for axis, length in ((axes.yaxis, matrix.shape[0]), (axes.xaxis, matrix.shape[1])):
        every = range(0, length, 1 if with_numbers else 4)
        axis.set_ticks(every, [str(i + 1) for i in every], fontsize=6.5)
    axes.tick_params(length=0, pad=2)
    axes.set_ylabel(projection.rows, fontsize=7, labelpad=2)
    axes.set_xlabel(projection.columns, fontsize=7, labelpad=2)
    if not with_numbers:
        return
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            strong = abs(value) > 0.45 * limit
            text = _short_number(value)
            axes.text(j, i, text, ha="center", va="center", fontsize=5.5, color="white" if strong else "#222222")


def _short_number(value: float) -> str:
    if abs(value) >= 10:
        return f"{value:.0f}"
    text = f"{value:.2f}".removeprefix("0").replace("-0.", "-.")
    return "0" if text in (".00", "-.00") else text
