"""The picture of a confusion matrix: for each true class, which classes its rows were predicted as."""

import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pictures import write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_confusion"]

# Classes up to which cells have numbers, and up to which there is a picture.
MOST_NUMBERED, MOST_DRAWN = 40, 200
LONGEST_NAME = 24


def draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], path: Path, title: str) -> None:
    """Draw the numbers of rows by true and predicted class, each row's share of its class as its shade.

    What cannot be drawn is a warning; an OSError says that the file cannot be written.

    Args:
        matrix: [true classes, predicted classes].
        names: of the classes.
        path: of the PNG.
        title: above it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box stands for it
        write_picture(path, lambda: _figure(np.asarray(matrix), names, title), dpi=120)


def _figure(matrix: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(names)
    cell = 0.42 if count <= MOST_NUMBERED else 12 / count  # inches
    shown = [shown_name(name) for name in names]
    margin = 1.6 + 0.075 * max(map(len, shown))
    size = max(3.2, cell * count)
    figure = Figure(figsize=(size + margin + 1.2, size + margin), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.12)  # inches: labels stand free of the edge
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    totals = np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(matrix / totals, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    small = 8 if count <= MOST_NUMBERED else max(2.0, 500 / count)
    ticks: Any = {"fontsize": small, "parse_math": False}  # a name with $ is no formula
    axes.set_xticks(range(count), shown, rotation=90, **ticks)
    axes.set_yticks(range(count), shown, **ticks)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= MOST_NUMBERED:
        digits = len(str(matrix.max()))
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                colour = "white" if number > 0.5 * totals[row, 0] else "black"
                fit = min(8.0, 8.0 * 4 / digits)  # four digits fit into a cell
                inside: Any = {
                    "ha": "center",
                    "va": "center",
                    "in_layout": False,
                }  # the layout would ask each for its size
                axes.text(column, row, str(number), color=colour, fontsize=fit, **inside)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="share of the true class")
    axes.set_title(title, fontsize=10, parse_math=False)
    return figure


def shown_name(name: str) -> str:
    """Return a class's name as it stands beside the picture: one line of characters that can be seen, not too long."""
    line = "".join(" " if unicodedata.category(each)[0] in "CZ" else each for each in name)
    line = " ".join(line.split())
    return f"{line[: LONGEST_NAME - 1]}…" if len(line) > LONGEST_NAME else line
