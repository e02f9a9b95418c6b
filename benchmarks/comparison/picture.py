"""The pictures of the comparison: the loss and the cost of each mechanism, and the conversion methods.

Example:
    python -m benchmarks.comparison.picture
"""

from pathlib import Path

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

MODELS = {"bert": "BERT", "t5": "T5"}
HEADS_COLOR, OTHER_COLOR = "#0072B2", "#D55E00"
INCHES_PER_ROW = 0.19


def draw(folder: Path = FOLDER) -> None:
    """Write both pictures into a folder."""
    figure = draw_losses()
    save_plot(folder / "comparison.png", lambda: figure, dpi=110)
    curve = draw_curve()
    save_plot(folder / "curve.png", lambda: curve, dpi=110)


def draw_losses() -> Figure:
    """Draw each row's loss and its time per training step, sorted by loss. The band is the seed range of MHA."""
    report, timing = load_report(), load_timing()["rows"]
    losses = {}
    for model in MODELS:
        rows = list_scratch_rows(report, model)
        losses[model] = Losses(rows, rows[BASELINE])
    num_rows = max(len(item.means) for item in losses.values())
    figure = Figure(figsize=(15, 1.2 + INCHES_PER_ROW * num_rows), layout="constrained")
    panels = figure.subplots(1, 2 * len(MODELS), width_ratios=[3, 1] * len(MODELS))
    for (model, title), loss_axes, time_axes in zip(MODELS.items(), panels[::2], panels[1::2], strict=True):
        item = losses[model]
        names = sorted(item.means, key=lambda name: item.means[name], reverse=True)
        colors = [HEADS_COLOR if name.endswith("heads") else OTHER_COLOR for name in names]
        positions = range(len(names))
        if item.baseline is not None and item.spread is not None:
            loss_axes.axvspan(item.baseline - item.spread, item.baseline + item.spread, alpha=0.15, color="gray")
        loss_axes.scatter([item.means[name] for name in names], positions, color=colors, s=16)
        times = [timing.get(model, {}).get(name, {}).get("training_ms", 0) for name in names]
        time_axes.barh(positions, times, color=colors, height=0.7)
        loss_axes.set_yticks(positions, names, fontsize=7)
        loss_axes.set(xlabel="dev loss (gray: seed range of MHA)", title=f"{title} from scratch")
        time_axes.set(xlabel="step, ms", yticks=[])
        for axes in (loss_axes, time_axes):
            axes.set_ylim(-0.7, len(names) - 0.3)
            axes.grid(alpha=0.25)
    return figure


def draw_curve() -> Figure:
    """Draw the BLEU of each conversion method against the share of the original training steps."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method, points in load_curve().items():
        if points:
            shares = sorted(points)
            axes.plot([100 * share for share in shares], [points[share][0] for share in shares], "o-", label=method)
    axes.set(xlabel="uptraining steps, % of the original steps", ylabel="dev BLEU", title="T5 with one key/value head")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)
    return figure


if __name__ == "__main__":
    draw()
