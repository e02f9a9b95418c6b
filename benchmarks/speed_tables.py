"""The speed tables, generated from the JSON reports. `result_tables.py` writes them into the Markdown files.

For a report with both allocator settings, a table shows the times with the fixed setting and the smaller of the two
gains (`kept_memory.make_claim`). For an older report, it shows the only ratio.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kept_memory import is_recorded, make_claim, split_by_setting
from benchmarks.speed_claims import FULL, LONGFORMER, MODES, OURS, PEER, WINDOWED

__all__ = ["TABLES", "Table", "format_markdown_table", "report_path", "report_paths"]

FOLDER = Path(__file__).resolve().parent
Rows = Iterable[Sequence[Any]]


def report_paths(folder: Path | None = None) -> dict[str, Path]:
    """Return {name: path} of the reports in a folder, or by default of all reports outside `gpu/`."""
    paths = FOLDER.glob("*/results/*.json") if folder is None else folder.glob("*.json")
    return {path.stem: path for path in sorted(paths) if folder is not None or path.parts[-3] != "gpu"}


def report_path(name: str, folder: Path | None = None) -> Path:
    """Return the path of a report in a folder, or by default in benchmarks/ (a new report in `speed/results`)."""
    return report_paths(folder).get(name, (folder or FOLDER / "speed/results") / f"{name}.json")


class Table(NamedTuple):
    """A table of a Markdown file.

    Args:
        names: the names of the reports from which the table is generated.
        columns: the texts of the header.
        rows: a function from these reports to the rows of cells.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    rows: Callable[..., Rows]

    def is_there(self, folder: Path | None = None) -> bool:
        """Return whether all reports of the table exist, in a folder or by default in benchmarks/."""
        return all(report_path(name, folder).is_file() for name in self.names)

    def made(self, folder: Path | None = None) -> list[list[str]]:
        """Return the cells of each row, from the reports in a folder or by default in benchmarks/."""
        reports = (json.loads(report_path(name, folder).read_text(encoding="utf-8")) for name in self.names)
        return [[str(cell) for cell in row] for row in self.rows(*reports)]


TABLES: dict[str, Table] = {}


def format_markdown_table(columns: Sequence[str], rows: Rows) -> str:
    """Return a table as Markdown, without a final newline."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def register_table(*names: str, columns: Sequence[str]) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Return a decorator that registers a function from reports to the rows of a table, under the function's name."""

    def register(rows: Callable[..., Rows]) -> Callable[..., Rows]:
        TABLES[rows.__name__] = Table(names, tuple(columns), rows)
        return rows

    return register


def format_three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def format_milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def pair_rows(report: dict[str, Any], part: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield each row of a part with the corresponding row of the fixed allocator setting.

    The second row is {} if a report with both settings does not have it, and None if the report has only one setting.
    """
    fixed_rows = (split_by_setting(report)[1] or {}).get(part)
    for number, row in enumerate(report[part]):
        yield row, fixed_rows[number] if fixed_rows else {} if is_recorded(report) else None


def format_ratio(
    row: dict, fixed_row: dict | None, compute_ratio: Callable[[dict], tuple[float, bool | None]], is_cost=False
) -> str:
    """Return the text of a ratio.

    Args:
        row, fixed_row: a pair of rows from `pair_rows`.
        compute_ratio: a function from a row to the ratio and to whether both of its figures have few page faults.
        is_cost: whether the ratio is a relative time (lower is better).
    """
    value = compute_ratio(row)[0]
    if fixed_row is None:
        return f"{value:.2f}×"
    other, has_few = compute_ratio(fixed_row) if fixed_row else (None, None)
    return make_claim(value, other if has_few else None, is_cost).text


def make_time_ratio(
    part: str, base: str, compared: str, is_cost: bool = False
) -> Callable[[dict], tuple[float, bool | None]]:
    """Return a function that computes the ratio of two times in a part of a row.

    The ratio is the time of `base` divided by that of `compared`, or the inverse for a cost.
    """

    def compute_ratio(row: dict) -> tuple[float, bool | None]:
        times, usage = row[part], row.get("usage", {}).get(part, {})
        has_few = all(usage.get(name, {}).get("few_faults") for name in (base, compared))
        return times[compared] / times[base] if is_cost else times[base] / times[compared], has_few

    return compute_ratio


DECODED = {
    "decode_t5-small_cpu": "T5-small, batch 32, source 1,024",
    "decode_t5-small_cpu_beams4": "T5-small, batch 8, source 1,024, 4 beams",
    "decode_t5-large-attention_cpu": "16 heads of 64, d_model 1,024, 4 + 4 layers, batch 32, source 2,048, 32 tokens",
    "decode_t5-small_cpu_batch1": "T5-small, batch 1, source 32 (9 repeats)",
    "decode_t5-small_cpu_batch1_static": "T5-small, batch 1, source 32, static cache",
    "decode_t5-small_cpu_batch1_static_compiled": (
        "T5-small, batch 1, source 32, static cache, `torch.compile` (5 repeats)"
    ),
    "decode_t5-small_cpu_sizes": "T5-small, batch 8, source 4,096, 32 tokens",
}
LATENTS = {
    "decode_t5-small_latents_cpu": "batch 32, source 1,024, 64 tokens",
    "decode_t5-small_latents_cpu_long": "batch 8, source 4,096, 32 tokens",
    "decode_t5-small_latents_cpu_beams4": "batch 8, source 1,024, 4 beams, 32 tokens",
    "decode_t5-small_latents_cpu_batch1": "batch 1, source 64, 64 tokens (15 repeats)",
}
MARIANS = {"decode_opus-mt_cpu_beams4": "batch 8, 4 beams", "decode_opus-mt_cpu": "batch 32, greedy"}
UPSTREAM = "upstream MHA"
# The column names of the models in a decoding benchmark.
NAMES = {UPSTREAM: "Transformers", "exact": "cached encoder outputs"}
NAMES |= {f"cross r={rank}": f"cross-attention latents of {rank}" for rank in (128, 64)}


def make_model_columns(models: Iterable[str], unit: str = "") -> list[str]:
    """Return the header cells for models."""
    return [NAMES.get(model, model) + unit for model in models]


class Decoded:
    """The rows of a decoding report for its last size, by model."""

    def __init__(self, report: dict[str, Any]) -> None:
        both = list(pair_rows(report, "rows"))
        last = [both[-1][0][name] for name in ("batch_size", "source_length")]
        self.by_model = {
            row["model"]: (row, fixed_row)
            for row, fixed_row in both
            if [row[name] for name in ("batch_size", "source_length")] == last
        }

    def speed(self, model: str, digits: int | None = None) -> str:
        """Return "tokens/s (ratio)", or only the tokens/s for Transformers, or "" if the model was not measured."""
        if model not in self.by_model:
            return ""
        row, fixed_row = self.by_model[model]
        tokens = format_three_digits((fixed_row or row)["tokens_per_second"])
        if model == UPSTREAM:
            return tokens
        text = self.times(model, "speedup")
        if digits is not None and fixed_row is None and row["speedup"] >= 10:
            text = f"{format_three_digits(row['speedup'])}×"
        return f"{tokens} ({text})"

    def times(self, model: str, field: str) -> str:
        """Return the text of the ratio to Transformers, or "" if the model was not measured."""
        if model not in self.by_model:
            return ""
        first = self.by_model[UPSTREAM]

        def compute_ratio(row: dict) -> tuple[float, bool | None]:
            base = first[0] if row is self.by_model[model][0] else first[1]
            return row[field], all((each_row.get("usage") or {}).get("few_faults") for each_row in (row, base))

        return format_ratio(*self.by_model[model], compute_ratio)

    def mib(self, model: str) -> str:
        size = self.by_model[model][0]["cache_bytes"] / 2**20
        return f"{size:.1f}" if size < 10 else f"{size:.0f}"


HEADS = (UPSTREAM, "MHA", "GQA-4", "GQA-2", "MQA")


@register_table(*DECODED, columns=["setting", *make_model_columns(HEADS), "step: GQA-2", "step: MQA"])
def decoding(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(DECODED.values(), reports, strict=True):
        decoded = Decoded(report)
        yield [
            label,
            *map(decoded.speed, HEADS),
            decoded.times("GQA-2", "step_speedup"),
            decoded.times("MQA", "step_speedup"),
        ]


WITH_LATENTS = (UPSTREAM, "MHA", "MQA", "exact", "cross r=128")


@register_table(*LATENTS, columns=["setting", *make_model_columns(WITH_LATENTS)])
def decoding_from_latents(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(LATENTS.values(), reports, strict=True):
        decoded = Decoded(report)
        repeats = int(report["arguments"]["repeats"])
        yield [label + " (1 repeat)" * (repeats == 1), *(decoded.speed(model, digits=3) for model in WITH_LATENTS)]


@register_table(*LATENTS, columns=["setting", *make_model_columns(WITH_LATENTS)])
def caches_of_latents(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(LATENTS.values(), reports, strict=True):
        yield [label, *map(Decoded(report).mib, WITH_LATENTS)]


OF_MARIANS = (UPSTREAM, "MHA", "GQA-2", "MQA", "exact", "cross r=128", "cross r=64")


@register_table(*MARIANS, columns=["setting", *make_model_columns(OF_MARIANS)])
def decoding_a_marian(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(MARIANS.values(), reports, strict=True):
        yield [label, *map(Decoded(report).speed, OF_MARIANS)]


@register_table(*MARIANS, columns=["setting", *make_model_columns(OF_MARIANS)])
def caches_of_a_marian(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(MARIANS.values(), reports, strict=True):
        yield [label, *map(Decoded(report).mib, OF_MARIANS)]


SMALL = (UPSTREAM, "MHA", "GQA-2", "MQA")


@register_table("decode_t5-multi30k_cpu", columns=["setting", *make_model_columns(SMALL)])
def decoding_at_equal_parameters(report: dict[str, Any]) -> Rows:
    decoded = Decoded(report)
    by_model = {model: fixed_row or row for model, (row, fixed_row) in decoded.by_model.items()}
    speeds = [f"{by_model[model]['tokens_per_second']:,.0f}" for model in SMALL]
    yield ["tokens/s", *speeds]
    yield ["speed", "1", *(decoded.times(model, "speedup") for model in SMALL[1:])]
    yield ["cache, MiB", *(f"{by_model[model]['cache_bytes'] / 2**20:.2f}" for model in SMALL)]


ENCODED = ("Transformers", "MHA", "GQA-4", "GQA-2", "MQA")


@register_table("encode_bert-base_cpu", "encode_minilm_cpu", columns=["model", *ENCODED, "latents", "talking heads"])
def encoding(*reports: dict[str, Any]) -> Rows:
    labels = ("BERT-base shape, batch 8 of 128 tokens", "MiniLM, batch 32 of 128 tokens")
    for label, report in zip(labels, reports, strict=True):
        (upstream, fixed_upstream), *row_pairs = pair_rows(report, "rows")
        cells = [f"{(fixed_upstream or upstream)['milliseconds']:.0f}"]
        for row, fixed_row in row_pairs:

            def compute_ratio(
                variant_row: dict, row: dict = row, bases: tuple = (upstream, fixed_upstream)
            ) -> tuple[float, bool | None]:
                base = bases[0] if variant_row is row else bases[1]
                has_few = all((first_row.get("usage") or {}).get("few_faults") for first_row in (base, variant_row))
                return base["milliseconds"] / variant_row["milliseconds"], has_few

            cells.append(f"{(fixed_row or row)['milliseconds']:.0f} ({format_ratio(row, fixed_row, compute_ratio)})")
        yield [label, *cells]


OF_WINDOWS = ["tokens", "full, ms", "window, ms", "attention", "BERT layer", "Longformer", "memory"]


def _iterate_window_rows(report: dict[str, Any], mode: str) -> Rows:
    memory = {row["shape"][2]: row for row in report["peak_memory"]}
    for (row, fixed_row), layer in zip(pair_rows(report, "attention"), pair_rows(report, "layers"), strict=True):
        length = row["length"]
        full, window = ((fixed_row or row)[mode][name] for name in ("sdpa", "window"))
        used = memory[length][mode]["window"] / memory[length][mode]["sdpa"]
        times = format_ratio(row, fixed_row, make_time_ratio(mode, "sdpa", "window"))
        two = [format_ratio(*layer, make_time_ratio(mode, *names)) for names in ((FULL, WINDOWED), (LONGFORMER, OURS))]
        yield [f"{length:,}", format_milliseconds(full), format_milliseconds(window), times, *two, f"{used:.2f}×"]


@register_table("sliding_window_cpu", columns=OF_WINDOWS)
def windows(report: dict[str, Any]) -> Rows:
    yield from _iterate_window_rows(report, "forward")


@register_table("sliding_window_cpu", columns=OF_WINDOWS)
def windows_in_training(report: dict[str, Any]) -> Rows:
    yield from _iterate_window_rows(report, "training")


PASSED = {"everything": "T5", "windows": "LongT5, local", "transient global": "LongT5, transient global"}


@register_table("long_t5_passes", columns=["tokens", "encoder", "this package, ms", "Transformers, ms", "speed"])
def encoder_passes(report: dict[str, Any]) -> Rows:
    labels = {"everything": "full attention", "windows": "windows of 254", "transient global": "transient-global"}
    for row, fixed_row in pair_rows(report, "runs"):
        row_times = (fixed_row or row)["milliseconds"]
        for encoder, upstream_encoder in PASSED.items():
            if encoder in row_times:
                times = format_ratio(row, fixed_row, make_time_ratio("milliseconds", upstream_encoder, encoder))
                yield [
                    f"{row['tokens']:,}",
                    labels[encoder],
                    f"{row_times[encoder]:,.0f}",
                    f"{row_times[upstream_encoder]:,.0f}",
                    times,
                ]


LENGTHS = ("512", "1,024", "2,048", "4,096", "8,192")


@register_table("decoder_state_cpu", columns=["self-attention", *LENGTHS])
def decoder_state(report: dict[str, Any]) -> Rows:
    rows = list(pair_rows(report, "steps"))
    for name in rows[0][0]["step_ms"]:
        cells = (
            f"{(fixed_row or row)['step_ms'][name]:.1f}, {row['bytes'][name] / 1e6:.1f}" for row, fixed_row in rows
        )
        yield ["Transformers" if name == "upstream" else name, *cells]


KERNELS = ["tokens", "softmax, ms", "elu", "hedgehog", "favor", "rfa"]


def _iterate_kernel_rows(report: dict[str, Any], mode: str) -> Rows:
    for row, fixed_row in pair_rows(report, "attention"):
        full, *kernels = row[mode]
        times = (format_ratio(row, fixed_row, make_time_ratio(mode, full, kernel)) for kernel in kernels)
        yield [f"{row['length']:,}", format_milliseconds((fixed_row or row)[mode][full]), *times]


@register_table("linear_attention_cpu", "linear_attention_16384_cpu", columns=KERNELS)
def linear_attention(*reports: dict[str, Any]) -> Rows:
    for report in reports:
        yield from _iterate_kernel_rows(report, "forward")


@register_table("linear_attention_cpu", "linear_attention_16384_cpu", columns=KERNELS)
def linear_attention_in_training(*reports: dict[str, Any]) -> Rows:
    for report in reports:
        yield from _iterate_kernel_rows(report, "training")


@register_table(
    "linear_attention_models_cpu", columns=["tokens", "Transformers, ms", "hedgehog", "hedgehog in 10 of 12 layers"]
)
def whole_berts_with_hedgehog(report: dict[str, Any]) -> Rows:
    for row, fixed_row in pair_rows(report, "models"):
        base, *others = row["pass"]
        times = (format_ratio(row, fixed_row, make_time_ratio("pass", base, name)) for name in others)
        yield [f"{row['length']:,}", f"{(fixed_row or row)['pass'][base]:,.0f}", *times]


@register_table(
    "hybrid_attention_cpu", columns=["pass", "tokens", "softmax, ms", "hedgehog, ms", "hybrid, ms", "linformer, ms"]
)
def hybrids(report: dict[str, Any]) -> Rows:
    names = ("sdpa", "hedgehog", "hybrid", "linformer")
    for mode in MODES:
        for row, fixed_row in pair_rows(report, "attention"):
            yield [
                mode,
                f"{row['length']:,}",
                *(format_milliseconds((fixed_row or row)[mode][name]) for name in names),
            ]


def _find_onnx_rows(report: dict[str, Any], part: str, size: list[int], opset: int, counts: Sequence[int]) -> list:
    key = {"part": part, "size": size, "opset": opset}
    every = [pair for pair in pair_rows(report, "rows") if all(pair[0][name] == value for name, value in key.items())]
    return [next(pair for pair in every if pair[0]["num_key_value_heads"] == count) for count in counts]


def _format_onnx_cells(rows: list, form: Callable[[float], str]) -> list[str]:
    (base, fixed_base), (last_row, fixed_row) = rows[0], rows[-1]

    def compute_ratio(row: dict) -> tuple[float, bool | None]:
        first = base if row is last_row else fixed_base
        has_few = all(compared_row.get("usage", {}).get("few_faults") for compared_row in (first, row))
        return first["milliseconds"] / row["milliseconds"], has_few

    times = [form((other or row)["milliseconds"]) for row, other in rows]
    return [*times, format_ratio(last_row, fixed_row, compute_ratio)]


ENGINES = {
    "quantize": "`quantize`",
    "quantize_dynamic": "`quantize_dynamic`",
    "ONNX Runtime": "ONNX Runtime",
    "ONNX Runtime int8": "ONNX Runtime, int8",
    "OpenVINO": "OpenVINO",
    "OpenVINO int8 (static)": "OpenVINO, int8",
}


def _iterate_engine_rows(report: dict[str, Any], engines: Iterable[str]) -> Iterator[list[str]]:
    for row, fixed_row in pair_rows(report, "sizes"):
        cells = [row["size"]]
        for engine in engines:

            def compute_ratio(engine_row: dict, engine: str = engine) -> tuple[float, bool | None]:
                times = engine_row["milliseconds"]
                return times["float32"] / times[engine], engine_row["usage"]["milliseconds"]["float32"]["few_faults"]

            cells.append(format_ratio(row, fixed_row, compute_ratio) if engine in row["milliseconds"] else "")
        yield cells


def _iterate_encoder_engine_rows(report: dict[str, Any]) -> Rows:
    yield from _iterate_engine_rows(report, ENGINES)
    if report["spearman"]:
        yield ["Spearman", *(f"{report['spearman'][engine]:.4f}" for engine in ENGINES)]


@register_table("int8_encoder", columns=["batch × tokens", *ENGINES.values()])
def minilm_in_engines(report: dict[str, Any]) -> Rows:
    yield from _iterate_encoder_engine_rows(report)


@register_table("avx2_int8_encoder", columns=["batch × tokens", *ENGINES.values()])
def minilm_with_avx2(report: dict[str, Any]) -> Rows:
    yield from _iterate_encoder_engine_rows(report)


@register_table("bert_base_int8_encoder", columns=["batch × tokens", *ENGINES.values()])
def bert_base_in_engines(report: dict[str, Any]) -> Rows:
    yield from _iterate_encoder_engine_rows(report)


@register_table(
    "grouped_int8_encoder", "windowed_int8_encoder", columns=["model", "batch × tokens", *ENGINES.values()]
)
def converted_minilm_in_engines(grouped: dict[str, Any], windowed: dict[str, Any]) -> Rows:
    for name, report in (("4 key/value heads", grouped), ("sliding window", windowed)):
        for row in _iterate_encoder_engine_rows(report):
            yield [name, *row]


DECODER_ENGINES = {
    "quantize": "`quantize`",
    "share_memory and quantize": "`share_memory` and `quantize`",
    "quantize_dynamic": "`quantize_dynamic`",
    "ONNX Runtime": "ONNX Runtime",
    "ONNX Runtime int8": "ONNX Runtime, int8",
}


@register_table(
    "epyc_int8_decoder", "int8_decoder", columns=["processor", "model, batch, beams", *DECODER_ENGINES.values()]
)
def generation_in_engines(epyc: dict[str, Any], xeon: dict[str, Any]) -> Rows:
    for processor, report in (("AMD EPYC", epyc), ("Intel Xeon", xeon)):
        for row in _iterate_engine_rows(report, DECODER_ENGINES):
            yield [processor, *row]


@register_table("onnx_translation", columns=["model", "unchanged translations", "BLEU, float32", "BLEU, int8"])
def translations_of_int8_graphs(report: dict[str, Any]) -> Rows:
    for row in report["rows"]:
        yield [row["model"], f"{row['equal']:.1%}", *(f"{row['bleu'][name]:.2f}" for name in ("float32", "int8"))]


@register_table(
    "onnx_latency", columns=["batch, length", "opset", "MHA (12), ms", "GQA-4, ms", "MQA, ms", "speed of MQA"]
)
def encoders_in_onnx_runtime(report: dict[str, Any]) -> Rows:
    for size in ([1, 32], [1, 128], [8, 128], [1, 512]):
        for opset, words in ((18, "18 (expanded)"), (23, "23 (one `Attention` per layer)")):
            rows = _find_onnx_rows(report, "encoder", size, opset, (12, 4, 1))
            yield [", ".join(map(str, size)), words, *_format_onnx_cells(rows, format_three_digits)]


@register_table(
    "onnx_latency", columns=["batch, source length", "MHA (8), ms", "GQA-2, ms", "MQA, ms", "speed of MQA"]
)
def decoding_steps_in_onnx_runtime(report: dict[str, Any]) -> Rows:
    for size in ([1, 128, 32], [8, 512, 32], [32, 1024, 32]):
        rows = _find_onnx_rows(report, "decoding step", size, 18, (8, 2, 1))
        yield [f"{size[0]}, {size[1]}", *_format_onnx_cells(rows, "{:.1f}".format)]


STEPS = ("products", "exact", "share_memory", "upstream")


@register_table(
    "exact_step_t5-small_cpu",
    columns=[
        "batch, source, beams",
        "matrix products, ms",
        "cached encoder outputs, ms",
        '`share_memory` with `cross_cache="encoder_outputs"`, ms',
        "Transformers, ms",
    ],
)
def later_steps(report: dict[str, Any]) -> Rows:
    for row, fixed_row in pair_rows(report, "runs"):
        size = f"{row['batch_size']}, {row['source_length']:,}, {row['num_beams']}"
        products, exact, shared, upstream = (f"{row['milliseconds'][name]:.1f}" for name in STEPS)
        times = [
            format_ratio(row, fixed_row, make_time_ratio("milliseconds", "upstream", name))
            for name in ("exact", "share_memory")
        ]
        yield [size, products, f"{exact} ({times[0]})", f"{shared} ({times[1]})", upstream]


@register_table("loop_overhead", columns=["task", "bare loop", "`TrainingLoop`", "overhead", "waiting for data"])
def loop_overhead(report: dict[str, Any]) -> Rows:
    for row, fixed_row in pair_rows(report, "rows"):
        # The larger overhead is reported.
        row = max(filter(None, (row, fixed_row)), key=lambda setting_row: setting_row["overhead_percent"])
        bare, loop = (1000 * row[f"{name}_cpu_seconds_per_step"] for name in ("bare", "loop"))
        overhead = f"{loop - bare:.1f} ms" if "tiny" in row["task"] else f"{row['overhead_percent']:+.1f} %"
        waiting = f"{row['waiting_for_data_percent']:.1f} %"
        yield [row["task"], f"{bare:.1f} ms", f"{loop:.1f} ms", overhead, waiting]


OF_TALKING = ["b, h, n, d"]
OF_TALKING += [f"{name}, {mode}" for mode in MODES for name in ("SDPA", "plain formula", "blocked")]


def _iterate_talking_heads_rows(report: dict[str, Any], option: str) -> Rows:
    for row, fixed_row in pair_rows(report, "times"):
        if row["option"] != option:
            continue
        cells = [", ".join(map(str, row["shape"]))]
        for mode in MODES:
            shown = (fixed_row or row)[mode]
            cells.append(format_milliseconds(shown["sdpa"]))
            for peer in ("naive", "blocked"):
                times = format_ratio(row, fixed_row, make_time_ratio(mode, "sdpa", peer, is_cost=True), is_cost=True)
                cells.append(f"{format_milliseconds(shown[peer])} ({times})")
        yield cells


@register_table("talking_heads_cpu_plain", columns=OF_TALKING)
def talking_heads_alone(report: dict[str, Any]) -> Rows:
    yield from _iterate_talking_heads_rows(report, "plain")


@register_table("talking_heads_cpu", columns=OF_TALKING)
def talking_heads_with_dropout(report: dict[str, Any]) -> Rows:
    yield from _iterate_talking_heads_rows(report, "dropout")


@register_table("talking_heads_cpu", columns=OF_TALKING)
def talking_heads_with_bias(report: dict[str, Any]) -> Rows:
    yield from _iterate_talking_heads_rows(report, "bias")


@register_table(
    "talking_heads_cpu_layers",
    columns=[
        "b, h, n, d",
        "pass",
        "SDPA",
        "plain formula",
        "blocked",
        PEER,
        "x-transformers flash",
        f"{PEER} / blocked",
    ],
)
def whole_layers(report: dict[str, Any]) -> Rows:
    names = ("sdpa", "naive", "blocked", PEER, "x-transformers flash")
    for row, fixed_row in pair_rows(report, "layers"):
        for mode in MODES:
            times = [(fixed_row or row)[mode][name] for name in names]
            text = (
                f"{times[3] / times[2]:.1f}×"
                if fixed_row is None
                else format_ratio(row, fixed_row, make_time_ratio(mode, PEER, "blocked"))
            )
            yield [", ".join(map(str, row["shape"])), mode, *map(format_milliseconds, times), text]


@register_table("talking_heads_cpu_layers", columns=["setting", "multi-head", "talking heads", "plain formula"])
def talking_heads_training_step(report: dict[str, Any]) -> Rows:
    for setting, part in zip(("default", "fixed"), split_by_setting(report), strict=True):
        base, *others = (
            part["training_steps"]["milliseconds"][name] for name in ("MHA", "talking heads", "talking heads, eager")
        )
        yield [setting, f"{base:,.0f}", *(f"{step_time:,.0f} ({step_time / base:.2f}×)" for step_time in others)]


@register_table(
    "talking_heads_cpu",
    columns=["n", *(f"{name}, {mode}" for name in ("plain formula", "blocked", "SDPA multi-head") for mode in MODES)],
)
def talking_heads_memory(report: dict[str, Any]) -> Rows:
    for row in report["peak_memory"]:
        peaks = (f"{row[mode][peer]:,.0f}" for peer in ("naive", "blocked", "sdpa") for mode in MODES)
        yield [f"{row['shape'][2]:,}", *peaks]


PEAK = "peak memory, last column"
OF_T5 = ["engine", "batch 1, source 64, greedy", "batch 1, source 64, 4 beams", "batch 4, source 512, 4 beams", PEAK]


def _iterate_serving_rows(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    sizes = [pair for report in reports for pair in pair_rows(report, "runs")]
    (last, _) = sizes[-1]
    base, *others = last["milliseconds"]
    for name in (base, *others):
        peak = f"{last['peak_bytes'][name] / 2**20:,.0f} MiB"
        compute_ratio = make_time_ratio("milliseconds", base, name)
        yield [
            name,
            *("1" if name == base else format_ratio(row, fixed_row, compute_ratio) for row, fixed_row in sizes),
            peak,
        ]


@register_table("serving_t5-small_cpu_batch1", "serving_t5-small_cpu_batch4", columns=OF_T5)
def serving(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from _iterate_serving_rows(*reports)


@register_table("serving_t5-small_amx_batch1", "serving_t5-small_amx_batch4", columns=OF_T5)
def serving_with_amx(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from _iterate_serving_rows(*reports)


@register_table("serving_t5-base_amx_batch4", columns=["engine", "batch 4, source 512, 4 beams", "peak memory"])
def serving_t5_base(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from _iterate_serving_rows(report)


@register_table(
    "serving_t5-small_amx_batch4",
    "serving_t5-base_amx_batch4",
    columns=["engine", "T5-small", "T5-base"],
)
def serving_in_short(small: dict[str, Any], base: dict[str, Any]) -> Iterator[Sequence[Any]]:
    of_base = {row[0]: row[1] for row in _iterate_serving_rows(base)}
    names = {"transformers": "Transformers", "share_memory": "`share_memory`", "int8": "`quantize`"}
    names |= {"share_memory, int8": "`share_memory` and `quantize`", "CTranslate2, int8": "CTranslate2 with int8"}
    yield from (
        [names[name], times, of_base[name]] for name, times, _ in _iterate_serving_rows(small) if name in names
    )


@register_table(
    "serving_opus-mt_cpu",
    columns=["engine", "batch 1, greedy", "batch 1, 4 beams", "batch 8, greedy", "batch 8, 4 beams", PEAK],
)
def serving_a_marian(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from _iterate_serving_rows(report)


@register_table("serving_whisper-base_variants", columns=["decoder", "greedy", "5 beams", "peak memory with 5 beams"])
def converted_whispers(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from (row for row in _iterate_serving_rows(report) if "int8" not in row[0] and "CTranslate2" not in row[0])


@register_table(
    "serving_whisper-base_cpu_batch1",
    "serving_whisper-base_cpu_batch4",
    columns=["engine", "batch 1, greedy", "batch 1, 5 beams", "batch 4, 5 beams", "peak memory, batch 1, 5 beams"],
)
def serving_a_whisper(one: dict[str, Any], four: dict[str, Any]) -> Iterator[Sequence[Any]]:
    # The report of batch 4 has only times, so the table shows the peaks of batch 1 with beams.
    peaks = one["runs"][-1]["peak_bytes"]
    for row in four["runs"]:
        row["peak_bytes"] = peaks
    yield from _iterate_serving_rows(one, four)


@register_table("serving_whisper-base_cpu_batch4", columns=["engine", "default", "fixed"])
def serving_four_recordings(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    ((row, fixed_row),) = pair_rows(report, "runs")
    for name in row["milliseconds"]:
        yield [name, *(f"{setting_row['milliseconds'][name] / 1000:.1f}" for setting_row in (row, fixed_row))]


RECORDINGS = ("batch8_greedy", "batch8", "batch16_greedy", "batch16")
BATCHES = [f"batch {size}, {search}" for size in (8, 16) for search in ("greedy", "5 beams")]


@register_table(
    *(f"serving_whisper-base_amx_{size}" for size in RECORDINGS),
    columns=["engine", *(f"{batch}, {setting}" for batch in BATCHES for setting in ("default", "fixed"))],
)
def serving_many_recordings(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield the seconds with both settings. There is no claim for engines that have their own allocator."""
    sizes = [setting_row for report in reports for pair in pair_rows(report, "runs") for setting_row in pair]
    for name in reports[0]["runs"][0]["milliseconds"]:
        seconds = [(setting_row or {}).get("milliseconds", {}).get(name) for setting_row in sizes]
        yield [name, *("" if milliseconds is None else f"{milliseconds / 1000:.1f}" for milliseconds in seconds)]


HEARD = ("greedy", "5beams", "5beams_batch16")
OF_SPEECH = [f"batch {size}, {search}" for size in (1, 8, 16) for search in ("greedy", "5 beams")]


@register_table(
    *(f"transcription_whisper-base_amx_{part}" for part in HEARD),
    columns=["engine", *OF_SPEECH, "equal texts, greedy, 5 beams"],
)
def transcribing_speech(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield the seconds with the default and the fixed setting, and how many texts of the largest batch are equal."""
    runs = [pair for report in reports for pair in pair_rows(report, "runs")]
    runs.sort(key=lambda pair: (pair[0]["batch_size"], pair[0]["num_beams"]))
    for name in reports[0]["runs"][0]["milliseconds"]:
        cells = []
        for setting_rows in runs:
            times = [(setting_row or {}).get("milliseconds", {}).get(name) for setting_row in setting_rows]
            cells.append(", ".join(f"{milliseconds / 1000:.1f}" for milliseconds in times if milliseconds is not None))
        same = [str(row["same_texts"].get(name, "-")) for row, _ in runs[-2:]]
        yield [name, *cells, ", ".join(same)]
