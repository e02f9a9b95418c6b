"""Functions that measure the speed and peak memory of serving engines, and recommend one of them."""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..inspection.costs import check_sizes, get_varied_heads_field, list_kv_head_counts, make_variant_config
from ..inspection.speed import describe_machine, get_round_order, resolve_timed_length
from ..progress import progress_bar
from .engines import (
    CTRANSLATE2,
    Engine,
    Workload,
    build_model,
    get_ctranslate2_unsupported_reason,
    get_served_auto_class,
    get_served_model_class,
    is_generative,
    list_engines,
    make_torch_call,
    make_workload_inputs,
)
from .peak_memory import ExportedModel, make_ctranslate2_call, measure_peak_bytes, write_ctranslate2_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The times or peak memory of two engines count as equal if they differ by less than this factor.
MAX_EQUAL_TIME_RATIO = 1.05
TimedCall = Callable[[Any], None]


@dataclass(frozen=True)
class ServingRow:
    """The results for one engine.

    Args:
        engine: the engine.
        milliseconds: the median time per batch, including the encoder.
        all_milliseconds: the time in each round.
        tokens_per_second: the number of generated tokens per second. For an encoder, the number of input tokens.
        speedup: the speed relative to the first row.
        first_milliseconds: the median time until each text has its first token. None for an encoder.
        peak_bytes: the peak memory of a process that runs only this engine. None if it was not measured.
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
    """The results for all engines and the conditions of the measurement.

    Args:
        checkpoint: the name of the checkpoint.
        load: the batch.
        rows: the results, starting with the baseline.
        left_out: the engines that are not installed or do not support this model, as {name: reason}.
        machine: the processor, the number of threads, the system load and the versions.
        without_peak: the engines whose peak memory could not be measured, as {name: reason}.
    """

    checkpoint: str
    load: Workload
    rows: list[ServingRow]
    left_out: dict[str, str]
    machine: dict[str, Any]
    without_peak: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values, including the recommendation as "advice"."""
        return asdict(self) | {"advice": recommend_engine(self)}


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
    """Time the engines that can serve a model on this CPU.

    The weights are random. Encoder-decoder models generate text, and the time includes the encoder. Encoders run one
    forward pass. The engines take turns, so that other load on the machine affects all of them equally.

    Args:
        config: the config.json of the checkpoint. No weights are read.
        checkpoint: the name of the checkpoint for the table.
        kv_heads: the numbers of key/value heads of the conversions to time. By default, a conversion to a quarter of
            the heads is timed for Transformers models, unless there are `variants`.
        batch_size: the number of texts or audio windows.
        length: the number of tokens per text. If None, it is 128, or the window of a Whisper model.
        max_new_tokens: the number of tokens to generate per text, for encoder-decoder models.
        num_beams: the number of beams, for encoder-decoder models. None means 1 (greedy).
        rounds: the number of timings per engine, of which the median is reported.
        peak_memory: whether to measure the peak memory of each engine in a separate process.
        compiles: whether to also time compiled torch engines, which requires a C++ compiler.
        variants: the configuration fields of additional conversions to time.
        engines: the names of the engines to time in addition to the baseline. By default, all are timed.

    Raises:
        ValueError: if the configuration, a number, a field or an engine is not valid.
    """
    sizes = {"batch_size": batch_size, "length": length, "max_new_tokens": max_new_tokens}
    check_sizes(**sizes, num_beams=num_beams, rounds=rounds)
    decodes = is_generative(config)
    if num_beams is not None and not decodes:
        raise ValueError("`num_beams` is not supported for a model that does not generate text. Remove it.")
    length = resolve_timed_length(length, make_variant_config(config), get_served_auto_class(config))
    workload = Workload(batch_size, length, max_new_tokens if decodes else None, num_beams or 1)
    threads, inputs = torch.get_num_threads(), make_workload_inputs(config, workload)
    left_out = _explain_left_out_engines(get_ctranslate2_unsupported_reason(config), engines)
    conversions = [*_list_head_conversions(config, () if variants and kv_heads is None else kv_heads), *variants]
    timed = list_engines(
        config, conversions, lambda row: get_ctranslate2_unsupported_reason(config, row) is None, compiles, engines
    )
    with tempfile.TemporaryDirectory() as stage:
        runs, exported = _build_engines(config, timed, workload, inputs, Path(stage), left_out)
        timed = [engine for engine in timed if engine.name in runs]
        times, firsts = _time_engines(runs, workload, rounds)
        runs.clear()  # frees the memory for the processes that run single engines
        gc.collect()
        peaks, without_peak = _measure_peak_memory(config, timed if peak_memory else [], workload, threads, exported)
    rows = [_build_row(workload, item, times[item.name], firsts[item.name], peaks.get(item.name)) for item in timed]
    rows = [replace(row, speedup=rows[0].milliseconds / row.milliseconds) for row in rows]
    return ServingTable(checkpoint, workload, rows, left_out, describe_machine("cpu"), without_peak)


def _explain_left_out_engines(unsupported_reason: str | None, names: Sequence[str] | None) -> dict[str, str]:
    """Return {"CTranslate2": reason} if CTranslate2 cannot be timed, unless the user selected engines."""
    if unsupported_reason is not None and any(CTRANSLATE2 in name for name in names or ()):
        raise ValueError(f"CTranslate2 cannot be timed: {unsupported_reason}")
    return {CTRANSLATE2: unsupported_reason} if unsupported_reason is not None and names is None else {}


def _measure_peak_memory(
    config: Mapping[str, Any],
    engines: Sequence[Engine],
    workload: Workload,
    threads: int,
    exported: Mapping[str, ExportedModel],
) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return {engine: peak memory in bytes} and, for failed measurements, {engine: reason}."""
    peaks: dict[str, int | None] = {}
    failed: dict[str, str] = {}
    for engine in progress_bar(engines, desc="peak memory", unit="engine", leave=False):
        try:
            peaks[engine.name] = measure_peak_bytes(config, engine, workload, threads, exported.get(engine.name))
        except ValueError as error:
            failed[engine.name] = str(error)
    return peaks, failed


def _build_engines(
    config: Mapping[str, Any],
    engines: Sequence[Engine],
    workload: Workload,
    inputs: dict[str, torch.Tensor],
    stage: Path,
    left_out: dict[str, str],
) -> tuple[dict[str, TimedCall], dict[str, ExportedModel]]:
    """Return {engine: function that serves a batch} and {engine: exported CTranslate2 model}.

    int8 engines are left out if the model does not have a linear layer that is large enough for int8.
    """
    runs: dict[str, TimedCall] = {}
    exported: dict[str, ExportedModel] = {}
    for number, engine in enumerate(progress_bar(engines, desc="building", unit="engine", leave=False)):
        try:
            model = build_model(config, engine)
        except ValueError as error:
            if not engine.int8:
                raise
            left_out[engine.name] = str(error)  # no linear layer is large enough for int8
            continue
        if engine.ctranslate2:
            (folder := stage / str(number)).mkdir()
            exported[engine.name] = model = write_ctranslate2_folder(config, model, inputs, folder, engine.int8)
            runs[engine.name] = make_ctranslate2_call(model, workload.num_beams, torch.get_num_threads())
        else:
            runs[engine.name] = make_torch_call(model, inputs, workload, engine.compiled)
    return runs, exported


def _build_row(
    workload: Workload, engine: Engine, seconds: list[float], first_seconds: list[float], peak_bytes: int | None
) -> ServingRow:
    times = [1e3 * value for value in seconds]
    median = statistics.median(times)
    first = 1e3 * statistics.median(first_seconds) if first_seconds else None
    speed = workload.batch_size * (workload.max_new_tokens or workload.length) / median * 1e3
    return ServingRow(engine, median, times, speed, 1.0, first, peak_bytes)


def _list_head_conversions(config: Mapping[str, Any], counts: Sequence[int] | None) -> list[dict[str, Any]]:
    """Return the fields for conversions to the given numbers of key/value heads, or to a quarter of the heads."""
    current = make_variant_config(config)
    field = get_varied_heads_field(get_served_model_class(config), current)
    if counts is None:
        heads, possible_counts = current.get_query_heads(field), list_kv_head_counts(current, field)
        is_upstream = config["model_type"] != type(current).model_type
        counts = [count for count in possible_counts if is_upstream and count < heads and 4 * count <= heads][:1]
    return [{field: count} for count in counts]


def _time_engines(
    runs: Mapping[str, TimedCall], workload: Workload, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the times of all rounds for each engine and, for generative models, the times until the first tokens."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    firsts: dict[str, list[float]] = {name: [] for name in runs}
    # The first round is a warm-up.
    for number in progress_bar(range(-1, rounds), desc="timing", unit="round", leave=False):
        for name in get_round_order(list(runs), number):
            start = time.perf_counter()
            runs[name](workload.max_new_tokens)
            end = time.perf_counter()
            if workload.max_new_tokens is not None:
                runs[name](1)
            if number >= 0:
                times[name].append(end - start)
                firsts[name] += [time.perf_counter() - end] * (workload.max_new_tokens is not None)
    return times, firsts


def recommend_engine(table: ServingTable) -> str:
    """Return a sentence that recommends an engine for this model, batch and machine.

    The sentence names the fastest engine for the unchanged checkpoint, the fastest float32 engine, and a conversion if
    it is faster than both. Among equally fast engines (see `_select_fastest`), the engine with the lowest peak memory
    is recommended. If the peak memory is equal or unknown, the first engine is recommended, because it requires the
    fewest changes. The other equally fast engines are also mentioned.

    Example:
        "Recommended for batch 4, length 512, ..., this machine: int8 (1.80 times transformers, 620 MiB)."
    """
    workload = table.load
    conditions = f"batch {workload.batch_size}, length {workload.length:,}"
    if workload.max_new_tokens is not None:
        beams = f"{workload.num_beams} beams" if workload.num_beams > 1 else "greedy"
        conditions += f", {workload.max_new_tokens} new tokens ({beams})"
    unconverted = [row for row in table.rows if row.engine.fields is None]
    best = _select_fastest_with_least_memory(unconverted)
    parts = [f"{best.engine.name} ({best.speedup:.2f} times {table.rows[0].engine.name}{_format_memory(best)})"]
    if other_rows := [row for row in _select_fastest(unconverted) if row is not best]:
        names = ", ".join(f"{row.engine.name} ({row.speedup:.2f}{_format_memory(row)})" for row in other_rows)
        parts[0] += f", which is as fast as {names} within the variation between rounds"
    float32 = _select_fastest_with_least_memory([row for row in unconverted if not row.engine.int8])
    if best.engine.int8 and float32.engine != unconverted[0].engine:
        parts.append(f"{float32.engine.name} ({float32.speedup:.2f}) if float32 is required")
    if best.engine.ctranslate2:
        in_torch = _select_fastest_with_least_memory([row for row in unconverted if not row.engine.ctranslate2])
        parts.append(f"{in_torch.engine.name} ({in_torch.speedup:.2f}) within Transformers")
    fastest = _select_fastest(table.rows)
    if not any(row in fastest for row in unconverted):
        converted = _select_fastest_with_least_memory(fastest)
        parts.append(
            f"{converted.engine.name} ({converted.speedup:.2f}) after conversion, whose quality must be checked"
        )
    return f"Recommended for {conditions}, this machine: {'; '.join(dict.fromkeys(parts))}."


def _select_fastest_with_least_memory(rows: Sequence[ServingRow]) -> ServingRow:
    """Return the row with the lowest peak memory among the fastest rows, or the first of them if a peak is unknown."""
    fastest = _select_fastest(rows)
    peaks = [row.peak_bytes for row in fastest if row.peak_bytes is not None]
    if len(peaks) < len(fastest):
        return fastest[0]
    return next(row for row in fastest if (row.peak_bytes or 0) <= MAX_EQUAL_TIME_RATIO * min(peaks))


def _select_fastest(rows: Sequence[ServingRow]) -> list[ServingRow]:
    """Return the rows that are about as fast as the fastest row.

    Their median times are close, or their interquartile ranges overlap.
    """
    fastest = min(rows, key=lambda row: row.milliseconds)
    limit, third_quartile = MAX_EQUAL_TIME_RATIO * fastest.milliseconds, _compute_quartiles(fastest)[1]
    return [row for row in rows if row.milliseconds <= limit or _compute_quartiles(row)[0] <= third_quartile]


def _compute_quartiles(row: ServingRow) -> tuple[float, float]:
    """Return the first and third quartiles of the times in a row."""
    if len(row.all_milliseconds) == 1:
        return row.milliseconds, row.milliseconds
    first_quartile, _, third_quartile = statistics.quantiles(row.all_milliseconds, n=4, method="inclusive")
    return first_quartile, third_quartile


def _format_memory(row: ServingRow) -> str:
    return "" if row.peak_bytes is None else f", {row.peak_bytes / 2**20:,.0f} MiB"


# Color-blind readers can distinguish these colors.
TORCH_COLOR, CONVERTED_COLOR, CTRANSLATE2_COLOR = "#0072B2", "#009E73", "#D55E00"


def plot_serving(table: ServingTable) -> "Figure":
    """Plot one bar for each row, with the first row at the top. The bars of int8 engines are hatched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = table.rows
    colors = [
        CTRANSLATE2_COLOR if row.engine.ctranslate2 else TORCH_COLOR if row.engine.fields is None else CONVERTED_COLOR
        for row in rows
    ]
    hatches = ["//" if row.engine.int8 else "" for row in rows]
    has_memory = all(row.peak_bytes is not None for row in rows)
    figure = Figure(figsize=(10.0 if has_memory else 6.5, 1.6 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if has_memory else 1, sharey=True, squeeze=False)[0]
    values = [[row.tokens_per_second for row in rows]]
    if has_memory:
        values.append([(row.peak_bytes or 0) / 2**20 for row in rows])
    labels = ("tokens per second", "peak memory of a separate process (MiB)")
    for axes, numbers, label in zip(panels, values, labels, strict=False):
        bars = axes.barh([row.engine.name for row in rows], numbers, color=colors, hatch=hatches, edgecolor="white")
        axes.bar_label(bars, [f"{number:,.0f}" for number in numbers], padding=3, fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    workload = table.load
    title = f"{Path(table.checkpoint).name}: batch {workload.batch_size}, length {workload.length:,}"
    if workload.max_new_tokens is not None:
        title += f", {workload.max_new_tokens} new tokens, beams {workload.num_beams}"
    figure.suptitle(title, parse_math=False)  # a $ in a name must not start a formula
    return figure
