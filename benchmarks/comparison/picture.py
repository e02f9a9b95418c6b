"""The picture of the comparison: quality against cost. Panels without results are omitted.

Example:
    python -m benchmarks.comparison.picture
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.comparison.tables import (
    BASELINE,
    FOLDER,
    Losses,
    list_scratch_rows,
    load_curve,
    load_report,
    load_timing,
)
from hf_attn_variants.files import save_plot

__all__ = ["draw"]

COSTS = (("bert", "training_ms", "training step, ms"), ("t5", "training_ms", "training step, ms"))
COSTS += (("t5", "cache_bytes", "cache, bytes"),)
HEADS_COLOR, OTHER_COLOR = "#0072B2", "#D55E00"


def draw(path: Path = FOLDER / "comparison.png") -> None:
    """Draw the loss against each cost, and the BLEU of converted models against the share of the training steps."""
    report, timing = load_report(), load_timing()["rows"]
    panels = [(model, cost, label) for model, cost, label in COSTS if _find_points(report, timing, model, cost)]
    figure = Figure(figsize=(5.2 * len(panels) + 5.6, 5), layout="constrained")
    *scatters, curve = figure.subplots(1, len(panels) + 1, squeeze=False)[0]
    for axes, (model, cost, label) in zip(scatters, panels, strict=True):
        points = _find_points(report, timing, model, cost)
        middle = (min(x for x, _ in points.values()) + max(x for x, _ in points.values())) / 2
        for name, (x, loss) in points.items():
            axes.plot(x, loss, "o", color=HEADS_COLOR if name.endswith("heads") else OTHER_COLOR, markersize=4)
            side, shift = ("right", -4) if x > middle else ("left", 4)  # names stay inside the axes
            axes.annotate(name, (x, loss), fontsize=6, xytext=(shift, 2), textcoords="offset points", ha=side)
        rows = list_scratch_rows(report, model)
        losses = Losses(rows, rows[BASELINE])
        if losses.baseline is not None and losses.spread is not None:
            axes.axhspan(losses.baseline - losses.spread, losses.baseline + losses.spread, alpha=0.15, color="gray")
        axes.set(xlabel=label, ylabel="dev loss", title=f"{model.upper()} from scratch")
        axes.grid(alpha=0.25)
    for method, points in load_curve().items():
        if points:
            shares = sorted(points)
            curve.plot([100 * share for share in shares], [points[share][0] for share in shares], "o-", label=method)
    curve.set(xlabel="uptraining steps, % of the original steps", ylabel="dev BLEU", title="One key/value head, T5")
    curve.legend(fontsize=8)
    curve.grid(alpha=0.25)
    save_plot(path, lambda: figure, dpi=110)


def _find_points(report: dict[str, Any], timing: dict[str, Any], model: str, cost: str) -> dict[str, Any]:
    """Return the cost and the loss of each row that has both."""
    rows = list_scratch_rows(report, model)
    means, times = Losses(rows, rows[BASELINE]).means, timing.get(model, {})
    return {name: (times[name][cost], loss) for name, loss in means.items() if cost in times.get(name, {})}


if __name__ == "__main__":
    draw()
