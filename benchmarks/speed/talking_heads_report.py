"""Markdown tables and a plot of the results of `talking_heads.py`, with its targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.kept_memory import make_claim
from benchmarks.speed.talking_heads_layers import PEER

# (b, h, n, d): the largest allowed time of the blocked path relative to SDPA, in the forward pass and in training.
CPU_LIMITS = {(8, 12, 128, 64): (1.6, 2.0), (4, 12, 512, 64): (1.6, 2.0), (1, 12, 2048, 64): (2.2, 2.5)}
OURS = "blocked"
SPEED_UP = 4.0  # compared with the naive forward pass and the layer of x-transformers, at n = 512
MEMORY_SHARE = 0.05  # the largest allowed share of the naive peak memory at n = 4096
STEP_LIMIT = 1.15  # the largest allowed time of a training step with talking heads relative to MHA


def list_targets(report: dict) -> list[dict]:
    """Return each CPU target with its result: {"target", "limit", "measured", "met"}. GPU reports have no targets."""
    return list(_iterate_targets(report)) if report["device"] == "cpu" else []


def _iterate_targets(report: dict) -> Iterator[dict]:
    for row in report["times"]:
        shape, forward, training = tuple(row["shape"]), row["forward"], row["training"]
        if row["option"] != "plain" or shape not in CPU_LIMITS or not {"sdpa", "blocked"} <= forward.keys():
            continue
        for mode, times, limit in zip(("forward", "training"), (forward, training), CPU_LIMITS[shape], strict=True):
            yield _target(f"{shape} {mode}: blocked / SDPA", times["blocked"] / times["sdpa"], at_most=limit)
        if shape[2] == 512 and "naive" in forward:
            yield _target(
                f"{shape} forward: naive / blocked", forward["naive"] / forward["blocked"], at_least=SPEED_UP
            )
    for row in report["layers"]:
        forward = row["forward"]
        if PEER in forward and "blocked" in forward and row["shape"][2] == 512:
            name = f"{tuple(row['shape'])} forward, whole layer: x-transformers / blocked"
            yield _target(name, forward[PEER] / forward["blocked"], at_least=SPEED_UP)
    for row in report["peak_memory"]:
        if row["shape"][2] == 4096:
            for mode in ("forward", "training"):
                if not {"blocked", "naive"} <= row[mode].keys():
                    continue
                share = row[mode]["blocked"] / row[mode]["naive"]
                yield _target(f"n = 4096 {mode}, peak memory: blocked / naive", share, at_most=MEMORY_SHARE)
    steps = report["training_steps"]
    if steps and steps["length"] == 512:
        name = "BERT training step, n = 512: talking heads / MHA"
        yield _target(name, steps["milliseconds"]["talking heads"] / steps["milliseconds"]["MHA"], at_most=STEP_LIMIT)


def _target(name: str, measured: float, at_most: float | None = None, at_least: float | None = None) -> dict:
    met = measured <= at_most if at_most is not None else measured >= at_least
    limit = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
    return {"target": name, "limit": limit, "measured": round(measured, 3), "met": met}


def format_tables(report: dict) -> str:
    """Return the results as Markdown."""
    parts = []
    for option in dict.fromkeys(row["option"] for row in report["times"]):
        rows = [row for row in report["times"] if row["option"] == option]
        parts.append(_format_table(f"attention, {option} (ms; in parentheses: time relative to SDPA)", rows, "sdpa"))
    if report["layers"]:
        parts.append(
            _format_table(
                "whole attention layer (ms; in parentheses: time relative to the SDPA layer)", report["layers"], "sdpa"
            )
        )
    if report["peak_memory"]:
        parts.append(_format_table("peak memory added (MiB)", report["peak_memory"], None))
    if report["training_steps"]:
        steps = report["training_steps"]
        cells = [f"{name} {ms:.0f} ms" for name, ms in steps["milliseconds"].items()]
        sizes = f"{steps['layers']} layers, batch {steps['batch']}, n = {steps['length']}"
        parts.append(f"Training step, BERT-base-shaped, {sizes}: {', '.join(cells)}\n")
    if report["targets"]:
        lines = [
            f"| {t['target']} | {t['limit']} | {t['measured']} | {'yes' if t['met'] else 'NO'} |"
            for t in report["targets"]
        ]
        parts.append("\n".join(["| target | limit | measured | met |", "| --- | --- | --- | --- |", *lines]) + "\n")
    return "\n".join(parts)


def _format_table(title: str, rows: list[dict], base: str | None) -> str:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["forward"]))
    lines = [title, "", "| b, h, n, d | pass | " + " | ".join(peers) + " |", "| --- | --- |" + " --- |" * len(peers)]
    for row in rows:
        for mode in ("forward", "training"):
            cells = [_format_cell(row[mode], peer, base) for peer in peers]
            lines.append(f"| {', '.join(map(str, row['shape']))} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format_cell(values: dict, peer: str, base: str | None) -> str:
    value = values.get(peer)
    if value is None:
        return ""
    if base is None or peer == base or not values.get(base):
        return f"{value:.1f}"
    return f"{value:.1f} ({value / values[base]:.2f})"


def save_plot(report: dict, path: Path) -> None:
    """Plot times relative to SDPA for each shape, whole layers, memory by length, and training steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 10), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    every, layers = _with_kept(report, "times"), _with_kept(report, "layers")
    plain = [row for row in every if row["option"] == "plain"] or every
    colours = _choose_colours(report)
    for axis, mode in zip(axes, ("forward", "training"), strict=False):
        _draw_ratios(axis, plain, mode, f"attention, {mode}: time / SDPA multi-head attention", colours)
    others = [row for row in every if row["option"] not in ("plain", "causal")]
    _draw_ratios(axes[2], others, "training", "attention, training, with dropout or a trained bias", colours)
    _draw_ratios(axes[3], layers, "forward", "whole layer, forward: time / SDPA layer", colours)
    _draw_memory(axes[4], report["peak_memory"], colours)
    _draw_steps(axes[5], report["training_steps"])
    title = f"Talking-heads attention, {report['device_name']}, {report['dtype']}"
    if report.get("kept"):
        title += "; of both allocator settings, the slower time of blocked and the faster time of others"
    figure.suptitle(title, fontsize=14)
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)


def _with_kept(report: dict, part: str) -> list[dict]:
    """Return the rows of a part, each with the row of the fixed allocator setting, if it exists."""
    fixed_rows = (report.get("kept") or {}).get(part) or [None] * len(report[part])
    return [row | {"kept": other} for row, other in zip(report[part], fixed_rows, strict=True)]


def _get_plotted_ratio(row: dict, mode: str, peer: str) -> float:
    """Return a peer's time relative to SDPA.

    If the report has both allocator settings, this is the larger ratio for blocked attention and the smaller ratio for
    other peers.
    """
    if not row[mode].get(peer):
        return float("nan")
    ratios = [setting_row[mode][peer] / setting_row[mode]["sdpa"] for setting_row in (row, row["kept"]) if setting_row]
    claim = make_claim(ratios[0], ratios[1] if len(ratios) > 1 else None, is_cost=peer == OURS)
    return ratios[0] if claim.ratio is None else claim.ratio


def _choose_colours(report: dict) -> dict[str, str]:
    names = dict.fromkeys([*report["peers"], *(name for row in report["layers"] for name in row["forward"])])
    palette = ("#888888", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    return {name: palette[number % len(palette)] for number, name in enumerate(names)}


def _draw_ratios(axis, rows: list[dict], mode: str, title: str, colours: dict[str, str]) -> None:
    axis.set_title(title, fontsize=11)
    peers = [peer for peer in dict.fromkeys(peer for row in rows for peer in row[mode]) if peer != "sdpa"]
    if not rows or not peers or not all(row[mode].get("sdpa") for row in rows):
        axis.axis("off")
        return
    width = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        ratios = [_get_plotted_ratio(row, mode, peer) for row in rows]
        places = [place + width * (number + 0.5) for place in range(len(rows))]
        bars = axis.bar(places, ratios, 0.92 * width, label=peer, color=colours.get(peer))
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.axhline(1, color="black", linewidth=1)
    labels = [", ".join(map(str, row["shape"])) + _get_option(row) for row in rows]
    axis.set_xticks([place + 0.4 for place in range(len(rows))], labels, fontsize=7.5 if len(rows) > 5 else 9)
    if len(rows) > 5:
        axis.tick_params(axis="x", rotation=25)
    axis.set_xlabel("b, h, n, d")
    axis.set_ylabel("times SDPA")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])  # space for the legend
    axis.legend(fontsize=8, ncols=2, loc="upper center")


def _get_option(row: dict) -> str:
    option = row.get("option", "plain")
    return "" if option == "plain" else f"\n{option}"


def _draw_memory(axis, rows: list[dict], colours: dict[str, str]) -> None:
    axis.set_title("peak memory that one call adds", fontsize=11)
    if not rows:
        axis.axis("off")
        return
    for peer in rows[0]["training"]:
        for mode, style in (("forward", ":"), ("training", "-")):
            points = [(row["shape"][2], row[mode][peer]) for row in rows if row[mode].get(peer)]
            if points:
                label = f"{peer}, {mode}"
                axis.plot(*zip(*points, strict=True), style, marker="o", label=label, color=colours.get(peer))
    lengths = [row["shape"][2] for row in rows]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xlabel(f"n, one sequence of {rows[0]['shape'][1]} heads of {rows[0]['shape'][3]}")
    axis.set_ylabel("MiB")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_steps(axis, steps: dict) -> None:
    if not steps:
        axis.axis("off")
        return
    sizes = f"{steps['layers']} layers, batch {steps['batch']}, n = {steps['length']}"
    axis.set_title(f"training step, BERT-base-shaped\n({sizes}, dropout 0)", fontsize=11)
    names, times = zip(*((name, ms) for name, ms in steps["milliseconds"].items() if ms), strict=True)
    bars = axis.bar(names, times, 0.6, color=("#888888", "#0072B2", "#D55E00")[: len(names)])
    axis.bar_label(bars, [f"{ms:.0f} ms ({ms / times[0]:.2f}x)" for ms in times], fontsize=9)
    axis.margins(y=0.12)
    axis.set_ylabel("ms")
