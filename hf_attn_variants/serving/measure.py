"""Timing of the engines that can serve a model on this machine, with the peak memory of each and a plot."""

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..inspection.costs import kv_head_counts, kv_heads_field, variant_config
from ..inspection.counting import check_sizes
from ..inspection.speed import machine_now, order_of_round, timed_length
from ..progress import progress_bar
from .engines import (
    CTRANSLATE2,
    Engine,
    Exported,
    Load,
    auto_class,
    build_model,
    ctranslate2_run,
    engines_of,
    generates,
    model_class_of,
    random_inputs,
    torch_run,
    why_not,
    write_folder,
)

if TYPE_CHECKING:
    from .engines import Engine, Load

__all__ = ["ServingRow", "ServingTable", "advice", "draw_serving", "measure_serving", "peak_bytes"]

# Engines whose times, or whose peaks of memory, differ by less are alike.
ALIKE = 1.05
Run = Callable[[Any], None]


@dataclass(frozen=True)
class ServingRow:
    """One engine.

    Args:
        engine: what it is.
        milliseconds: median over the rounds of one batch, the encoder included.
        all_milliseconds: each round's.
        tokens_per_second: tokens generated in it; of an encoder, read.
        speedup: over the first row.
        first_milliseconds: median until the first token of all sentences is there; None for an encoder.
        peak_bytes: the most memory of a process with this engine alone; None where it was not measured.
    """

    engine: Engine
    milliseconds: float
    all_milliseconds: list[float]
    tokens_per_second: float
    speedup: float
    first_milliseconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class ServingTable:
    """Every row with what the figures hold for.

    Args:
        checkpoint: its name, as given.
        load: what each engine was given.
        rows: the engines, the baseline first.
        left_out: engines that cannot serve this model, or are not here: why.
        machine: processor, threads, load and versions.
        without_peak: engines whose process of its own failed: why.
    """

    checkpoint: str
    load: Load
    rows: list[ServingRow]
    left_out: dict[str, str]
    machine: dict[str, Any]
    without_peak: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the advice."""
        return asdict(self) | {"advice": advice(self)}


def measure_serving(
    config: Mapping[str, Any],
    checkpoint: str = "",
    kv_heads: Sequence[int] | None = None,
    batch_size: int = 8,
    length: int | None = None,
    max_new_tokens: int = 32,
    num_beams: int | None = None,
    rounds: int = 5,
    peak_memory: bool = True,
    compiles: bool = False,
    variants: Sequence[Mapping[str, Any]] = (),
    engines: Sequence[str] | None = None,
) -> ServingTable:
    """Time what a model could be served with on this CPU: random weights, for speed does not depend on them.

    An encoder-decoder generates, its encoder included; an encoder reads. The engines run in turn, each round from
    another one on, so that what else the machine does hits all alike.

    Args:
        config: the checkpoint's config.json; of it, no weight is read.
        checkpoint: its name, for the table.
        kv_heads: numbers of key/value heads to which it could be converted, in an encoder-decoder the decoder's; None:
            a quarter of its heads, of a checkpoint of this package and with `variants` none.
        batch_size: texts, or windows of audio, at once.
        length: tokens of each; None = 128, of a Whisper its window.
        max_new_tokens: encoder-decoders: tokens to generate for each.
        num_beams: encoder-decoders: beams of the search; None = 1, greedy.
        rounds: timings of each engine; the median counts.
        peak_memory: whether each engine also serves one batch in a process of its own, whose peak memory is read.
        compiles: whether torch's engines of the checkpoint as it is are timed compiled, too, which takes a C++
            compiler and a minute for each.
        variants: further models to which it could be converted: the fields of each one's configuration.
        engines: the names of those that are timed, beside the checkpoint as it is; None: all.

    Raises:
        ValueError: for a configuration that makes no model here, or a number, a field or an engine that does not fit.
    """
    check_sizes(
        batch_size=batch_size, length=length, max_new_tokens=max_new_tokens, num_beams=num_beams, rounds=rounds
    )
    decodes = generates(config)
    if num_beams is not None and not decodes:
        raise ValueError("`num_beams` is for encoder-decoders; this model generates nothing: leave it out.")
    length = timed_length(length, variant_config(config), auto_class(config))
    load = Load(batch_size, length, max_new_tokens if decodes else None, num_beams or 1)
    missing, threads, inputs = why_not(config), torch.get_num_threads(), random_inputs(config, load)
    left_out = _not_here(missing, engines)
    conversions = [*_fewer_heads(config, () if variants and kv_heads is None else kv_heads), *variants]
    timed = engines_of(config, conversions, lambda fields: why_not(config, fields) is None, compiles, engines)
    with tempfile.TemporaryDirectory() as stage:
        runs, exported = _built(config, timed, load, inputs, Path(stage), left_out)
        timed = [engine for engine in timed if engine.name in runs]
        times, firsts = _timed(runs, load, rounds)
        runs.clear()  # a process of an engine alone has the memory for itself
        gc.collect()
        peaks, without_peak = _peaks(config, timed if peak_memory else [], load, threads, exported)
    rows = _rows(timed, load, times, firsts, peaks)
    return ServingTable(checkpoint, load, rows, left_out, machine_now("cpu"), without_peak)


def _not_here(missing: str | None, names: Sequence[str] | None) -> dict[str, str]:
    """Return why CTranslate2 is left out, where nobody has named the engines.

    Raises:
        ValueError: with the reason, where it is named.
    """
    if missing is not None and any(CTRANSLATE2 in name for name in names or ()):
        raise ValueError(f"CTranslate2 cannot be timed: {missing}")
    return {CTRANSLATE2: missing} if missing is not None and names is None else {}


def _peaks(
    config: Mapping[str, Any], engines: Sequence[Engine], load: Load, threads: int, exported: Mapping[str, Exported]
) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return the peaks, and of engines that failed in their process why: their times stay."""
    found: dict[str, int | None] = {}
    failed: dict[str, str] = {}
    for engine in progress_bar(engines, desc="peak memory", unit="engine", leave=False):
        try:
            found[engine.name] = peak_bytes(config, engine, load, threads, exported.get(engine.name))
        except ValueError as error:
            failed[engine.name] = str(error)
    return found, failed


def _built(
    config: Mapping[str, Any],
    engines: Sequence[Engine],
    load: Load,
    inputs: dict[str, torch.Tensor],
    stage: Path,
    left_out: dict[str, str],
) -> tuple[dict[str, Run], dict[str, Exported]]:
    """Return what runs each engine, and what was written for CTranslate2; what cannot be int8 is left out."""
    runs: dict[str, Run] = {}
    exported: dict[str, Exported] = {}
    for number, engine in enumerate(progress_bar(engines, desc="building", unit="engine", leave=False)):
        try:
            model = build_model(config, engine)
        except ValueError as error:
            if not engine.int8:
                raise
            left_out[engine.name] = str(error)  # it has no map that is large enough
            continue
        if engine.ctranslate2:
            (folder := stage / str(number)).mkdir()
            exported[engine.name] = write_folder(config, model, inputs, folder, engine.int8)
            runs[engine.name] = ctranslate2_run(exported[engine.name], load.num_beams, torch.get_num_threads())
        else:
            runs[engine.name] = torch_run(model, inputs, load, engine.compiled)
    return runs, exported


def _rows(
    engines: Sequence[Engine],
    load: Load,
    times: Mapping[str, list[float]],
    firsts: Mapping[str, list[float]],
    peaks: Mapping[str, int | None],
) -> list[ServingRow]:
    rows: list[ServingRow] = []
    for engine in engines:
        baseline = rows[0].milliseconds if rows else None
        rows.append(_row(engine, load, times[engine.name], firsts[engine.name], baseline, peaks.get(engine.name)))
    return rows


def _row(
    engine: Engine, load: Load, seconds: list[float], firsts: list[float], baseline: float | None, peak: int | None
) -> ServingRow:
    times = [1e3 * each for each in seconds]
    median = statistics.median(times)
    first = 1e3 * statistics.median(firsts) if firsts else None
    speed = load.batch_size * (load.max_new_tokens or load.length) / median * 1e3
    return ServingRow(engine, median, times, speed, (baseline or median) / median, first, peak)


def _fewer_heads(config: Mapping[str, Any], given: Sequence[int] | None) -> list[dict[str, Any]]:
    """Return the fields of conversions to numbers of key/value heads; None: to a quarter, where there is one."""
    current = variant_config(config)
    field = kv_heads_field(model_class_of(config), current)
    if given is None:
        heads, counts = current.query_heads(field), kv_head_counts(current, field)
        is_upstreams = config["model_type"] != type(current).model_type
        given = [count for count in counts if is_upstreams and count < heads and 4 * count <= heads][:1]
    return [{field: count} for count in given]


def _timed(runs: Mapping[str, Run], load: Load, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each round of each engine and, of what generates, those to its first tokens."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    firsts: dict[str, list[float]] = {name: [] for name in runs}
    for number in progress_bar(range(-1, rounds), desc="timing", unit="round", leave=False):  # the first warms up
        for name in order_of_round(list(runs), number):
            start = time.perf_counter()
            runs[name](load.max_new_tokens)
            end = time.perf_counter()
            if load.max_new_tokens is not None:
                runs[name](1)
            if number >= 0:
                times[name].append(end - start)
                firsts[name] += [time.perf_counter() - end] * (load.max_new_tokens is not None)
    return times, firsts


def advice(table: ServingTable) -> str:
    """Return one sentence: what to take for this model, these lengths and this machine.

    The fastest engine of the checkpoint as it is, what is fastest with float32's numbers, and a conversion where that
    is faster still. Where times are alike (`_alike`), the one with less peak memory is taken, and where that is alike,
    too, or unknown, the first one, which changes least; the others are named.
    """
    load = table.load
    generated = "" if load.max_new_tokens is None else f", {load.max_new_tokens} new tokens"
    beams = "" if load.max_new_tokens is None else f" ({load.num_beams} beams)" if load.num_beams > 1 else " (greedy)"
    where = f"batch {load.batch_size}, length {load.length:,}{generated}{beams}, this machine"
    as_it_is = [row for row in table.rows if row.engine.fields is None]
    best = _preferred(as_it_is)
    parts = [f"{best.engine.name} ({best.speedup:.2f} times {table.rows[0].engine.name}{_memory(best)})"]
    if others := [row for row in _alike(as_it_is) if row is not best]:
        named = ", ".join(f"{row.engine.name} ({row.speedup:.2f}{_memory(row)})" for row in others)
        parts[0] += f", which differs by no more than the rounds do from {named}"
    exact = _preferred([row for row in as_it_is if not row.engine.int8])
    if best.engine.int8 and exact.engine != as_it_is[0].engine:
        parts.append(f"{exact.engine.name} ({exact.speedup:.2f}) where numbers must stay float32's")
    if best.engine.ctranslate2:
        torchs = _preferred([row for row in as_it_is if not row.engine.ctranslate2])
        parts.append(f"{torchs.engine.name} ({torchs.speedup:.2f}) within transformers")
    fastest = _alike(table.rows)
    if not any(row in fastest for row in as_it_is):
        converted = _preferred(fastest)
        parts.append(f"{converted.engine.name} ({converted.speedup:.2f}) after a conversion whose quality is checked")
    return f"Take for {where}: {'; '.join(dict.fromkeys(parts))}."


def _preferred(rows: Sequence[ServingRow]) -> ServingRow:
    """Return the row to take: of those as fast as the fastest the one with the least memory, else the first."""
    alike = _alike(rows)
    peaks = [row.peak_bytes for row in alike if row.peak_bytes is not None]
    if len(peaks) < len(alike):
        return alike[0]
    return next(row for row in alike if (row.peak_bytes or 0) <= ALIKE * min(peaks))


def _alike(rows: Sequence[ServingRow]) -> list[ServingRow]:
    """Return the rows that are as fast as the fastest: by their medians, or where the middle halves of rounds meet."""
    fastest = min(rows, key=lambda row: row.milliseconds)
    most, latest = ALIKE * fastest.milliseconds, _middle_half(fastest)[1]
    return [row for row in rows if row.milliseconds <= most or _middle_half(row)[0] <= latest]


def _middle_half(row: ServingRow) -> tuple[float, float]:
    """Return the first and third quartile of a row's rounds."""
    if len(row.all_milliseconds) == 1:
        return row.milliseconds, row.milliseconds
    first, _, third = statistics.quantiles(row.all_milliseconds, n=4, method="inclusive")
    return first, third


def _memory(row: ServingRow) -> str:
    return "" if row.peak_bytes is None else f", {row.peak_bytes / 2**20:,.0f} MiB"


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# What makes the kernel begin a process's peak anew (proc(5)).
RESET_PEAK = "5"
# The process is one of this package's commands: it imports what it uses.
PROGRAM = (
    "import attn_variants; attn_variants.is_command = True; from hf_attn_variants.serving import peak_memory; "
    "peak_memory.main()"
)
FEATURES = "features.npy"


def peak_bytes(
    config: Mapping[str, Any], engine: "Engine", load: "Load", threads: int, exported: Exported | None
) -> int | None:
    """Return the most memory that a process has which serves one batch by an engine, its libraries included.

    The peak counts from when the model is loaded: making random weights is no part of serving. The process holds
    memory as this one does: it gives large blocks back, or keeps them.

    Args:
        config: the checkpoint's config.json.
        engine, load: what serves, and what.
        threads: of the process.
        exported: what CTranslate2 runs; None: torch runs the engine.

    Returns:
        Bytes; None where the system does not say it.

    Raises:
        ValueError: if the process failed, with the end of what it said.
    """
    if not CLEAR.exists():
        return None
    told: dict[str, Any] = {"config": dict(config), "engine": asdict(engine), "load": asdict(load), "threads": threads}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as stage:
        if exported is not None:
            told["exported"] = _stored(exported, Path(stage))
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, input=json.dumps(told), env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        if done.returncode == -signal.SIGKILL:
            said = "it was killed, most likely for want of memory"
        raise ValueError(f"{engine.name} failed in a process of its own (status {done.returncode}): {said}")
    return int(done.stdout.splitlines()[-1])


def _stored(exported: Exported, folder: Path) -> dict[str, Any]:
    """Return the JSON values of what CTranslate2 runs; features of audio go into a file, named in their place."""
    values = dict(vars(exported))
    if exported.prompt:
        import numpy as np

        values["inputs"] = os.fspath(folder / FEATURES)
        np.save(values["inputs"], exported.inputs)
    return values


def main() -> None:
    """Serve one batch of what stdin says, and print the peak in bytes."""
    told = json.load(sys.stdin)
    load, threads, run = told["load"], told["threads"], None
    if "exported" in told:
        exported = Exported(**told["exported"])
        if exported.prompt:
            import numpy as np

            exported = Exported(exported.folder, exported.int8, np.load(exported.inputs), exported.prompt)
        run = ctranslate2_run(exported, load["num_beams"], threads)
    else:
        import torch

        from .engines import Engine, Load, build_model, random_inputs, torch_run

        torch.set_num_threads(threads)
        config, given, engine = told["config"], Load(**load), Engine(**told["engine"])
        run = torch_run(build_model(config, engine), random_inputs(config, given), given, engine.compiled)
    CLEAR.write_text(RESET_PEAK)
    run(load["max_new_tokens"])
    [peak] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    print(1024 * int(peak.split()[1]))


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
