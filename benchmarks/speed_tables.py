"""The rows of docs/' tables of speed, made from the reports: a test compares them, `measure_again.py` writes them.

A report that was made both ways shows the times of the run that kept memory, and of each ratio what may be claimed
(`kept_memory.claimed`); one from before shows what it has.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kept_memory import claimed, is_recorded, views
from benchmarks.speed_claims import FULL, LONGFORMER, MODES, OURS, PEER, WINDOWED

__all__ = ["TABLES", "Table", "report_path", "report_paths"]

FOLDER = Path(__file__).resolve().parent
Rows = Iterable[Sequence[Any]]


def report_paths(folder: Path | None = None) -> dict[str, Path]:
    """Return the reports in a folder by name; without one, those of all groups here but a GPU's."""
    found = FOLDER.glob("*/results/*.json") if folder is None else folder.glob("*.json")
    return {path.stem: path for path in sorted(found) if folder is not None or path.parts[-3] != "gpu"}


def report_path(name: str, folder: Path | None = None) -> Path:
    """Return where a report lies, or would: in a folder; without one, in that of its group."""
    return report_paths(folder).get(name, (folder or FOLDER / "speed/results") / f"{name}.json")


class Table(NamedTuple):
    """A table of a document.

    Args:
        document: its file in docs/.
        names: of the reports that it is made from.
        rows: makes them from the reports by name: the cells' texts.
    """

    document: str
    names: tuple[str, ...]
    rows: Callable[..., Rows]

    def is_there(self, folder: Path | None = None) -> bool:
        """Return whether all its reports are in a folder, or here."""
        return all(report_path(name, folder).is_file() for name in self.names)

    def made(self, folder: Path | None = None) -> list[list[str]]:
        """Return the cells of each row, from the reports in a folder, or those here."""
        reports = (json.loads(report_path(name, folder).read_text(encoding="utf-8")) for name in self.names)
        return [[str(cell) for cell in row] for row in self.rows(*reports)]


TABLES: dict[str, Table] = {}


def table(document: str, *names: str) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Register a function from reports to a table's rows."""

    def register(rows: Callable[..., Rows]) -> Callable[..., Rows]:
        TABLES[rows.__name__] = Table(document, names, rows)
        return rows

    return register


def three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def pairs(report: dict[str, Any], part: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield the rows of a part, each with that of the run that kept memory.

    The latter is {} where that run is missing from a report of both ways, None where the report is from before.
    """
    kept = (views(report)[1] or {}).get(part)
    for number, row in enumerate(report[part]):
        yield row, kept[number] if kept else {} if is_recorded(report) else None


def ratio(row: dict, kept: dict | None, found: Callable[[dict], tuple[float, bool | None]], is_cost=False) -> str:
    """Return a ratio's text.

    Args:
        row, kept: as `pairs` yields them.
        found: the ratio in such a row, and whether the faults of both its figures were few.
    """
    value = found(row)[0]
    if kept is None:
        return f"{value:.2f}x"
    other, few = found(kept) if kept else (None, None)
    return claimed(value, other if few else None, is_cost).text


def in_times(part: str, base: str, ours: str, is_cost: bool = False) -> Callable[[dict], tuple[float, bool | None]]:
    """Return what finds the ratio of two times of a row's part: the base's by ours, of a cost ours by the base's."""

    def found(row: dict) -> tuple[float, bool | None]:
        times, usage = row[part], row.get("usage", {}).get(part, {})
        few = all(usage.get(name, {}).get("few_faults") for name in (base, ours))
        return times[ours] / times[base] if is_cost else times[base] / times[ours], few

    return found


DECODED = {
    "decode_t5-small_cpu": "T5-small, batch 32, source 1024",
    "decode_t5-small_cpu_beams4": "the same, batch 8, 4 beams",
    "decode_t5-large-attention_cpu": "16 heads of 64, d_model 1024, 4 + 4 layers, batch 32, source 2048, 32 tokens",
    "decode_t5-small_cpu_batch1": "T5-small, batch 1, source 32 (9 repeats)",
    "decode_t5-small_cpu_batch1_static": "the same, static cache",
    "decode_t5-small_cpu_batch1_static_compiled": "the same, static cache and `torch.compile` (5 repeats)",
    "decode_t5-small_cpu_sizes": "T5-small, batch 8, source 4096, 32 tokens",
}
LATENTS = {
    "decode_t5-small_latents_cpu": "batch 32, source 1024, 64 tokens",
    "decode_t5-small_latents_cpu_long": "batch 8, source 4096, 32 tokens",
    "decode_t5-small_latents_cpu_beams4": "batch 8, source 1024, 4 beams, 32 tokens",
    "decode_t5-small_latents_cpu_batch1": "batch 1, source 64, 64 tokens (15 repeats)",
}
MARIANS = {"decode_opus-mt_cpu_beams4": "batch 8, 4 beams", "decode_opus-mt_cpu": "batch 32, greedy"}
UPSTREAM = "upstream MHA"


class Decoded:
    """The rows of one decoding report at its last size, by model."""

    def __init__(self, report: dict[str, Any]) -> None:
        both = list(pairs(report, "rows"))
        last = [both[-1][0][name] for name in ("batch_size", "source_length")]
        self.by_model = {
            row["model"]: (row, kept)
            for row, kept in both
            if [row[name] for name in ("batch_size", "source_length")] == last
        }

    def speed(self, model: str, digits: int | None = None) -> str:
        """Return "tokens/s (ratio)"; upstream's without one, and nothing for a model that was not run."""
        if model not in self.by_model:
            return ""
        row, kept = self.by_model[model]
        tokens = three_digits((kept or row)["tokens_per_second"])
        if model == UPSTREAM:
            return tokens
        text = self.times(model, "speedup")
        if digits is not None and kept is None and row["speedup"] >= 10:
            text = f"{three_digits(row['speedup'])}x"
        return f"{tokens} ({text})"

    def times(self, model: str, field: str) -> str:
        """Return a ratio to upstream."""
        if model not in self.by_model:
            return ""
        first = self.by_model[UPSTREAM]

        def found(row: dict) -> tuple[float, bool | None]:
            base = first[0] if row is self.by_model[model][0] else first[1]
            return row[field], all((each.get("usage") or {}).get("few_faults") for each in (row, base))

        return ratio(*self.by_model[model], found)

    def mib(self, model: str) -> str:
        size = self.by_model[model][0]["cache_bytes"] / 2**20
        return f"{size:.1f}" if size < 10 else f"{size:.0f}"


@table("results_speed.md", *DECODED)
def decoding(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(DECODED.values(), reports, strict=True):
        of = Decoded(report)
        speeds = [of.speed(model) for model in (UPSTREAM, "MHA", "GQA-4", "GQA-2", "MQA")]
        yield [label, *speeds, of.times("GQA-2", "step_speedup"), of.times("MQA", "step_speedup")]


@table("results_speed.md", *LATENTS)
def decoding_from_latents(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(LATENTS.values(), reports, strict=True):
        of, models = Decoded(report), (UPSTREAM, "MHA", "MQA", "exact", "cross r=128")
        repeats = int(report["arguments"]["repeats"])
        yield [label + " (1 repeat)" * (repeats == 1), *(of.speed(model, digits=3) for model in models)]


@table("results_speed.md", *LATENTS)
def caches_of_latents(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(LATENTS.values(), reports, strict=True):
        of = Decoded(report)
        yield [label, *(of.mib(model) for model in (UPSTREAM, "MHA", "MQA", "exact", "cross r=128"))]


@table("results_speed.md", *MARIANS)
def decoding_a_marian(*reports: dict[str, Any]) -> Rows:
    for label, report in zip(MARIANS.values(), reports, strict=True):
        of, models = Decoded(report), ("MHA", "GQA-2", "MQA", "exact", "cross r=128", "cross r=64")
        first = f"{of.speed(UPSTREAM)}, {of.mib(UPSTREAM)} MiB"
        yield [label, first, *(f"{of.speed(model)}, {of.mib(model)}" for model in models)]


@table("results_speed.md", "encode_minilm_cpu")
def encoding(report: dict[str, Any]) -> Rows:
    return _passes("MiniLM, ms a batch (lower is better)", report)


@table("results_speed.md", "encode_bert-base_cpu")
def encoding_by_bert_base(report: dict[str, Any]) -> Rows:
    return _passes("BERT-base, ms a batch (lower is better)", report)


def _passes(label: str, report: dict[str, Any]) -> Rows:
    (upstream, held), *ours = pairs(report, "rows")
    cells = [f"{(held or upstream)['milliseconds']:.0f}"]
    for row, kept in ours:

        def found(each: dict, row: dict = row) -> tuple[float, bool | None]:
            base = upstream if each is row else held
            few = all((one.get("usage") or {}).get("few_faults") for one in (base, each))
            return base["milliseconds"] / each["milliseconds"], few

        cells.append(f"{(kept or row)['milliseconds']:.0f} ({ratio(row, kept, found)})")
    yield [label, *cells]


@table("results_long.md", "sliding_window_cpu")
def windows(report: dict[str, Any]) -> Rows:
    memory = {row["shape"][2]: row for row in report["peak_memory"]}
    for (row, kept), layer in zip(pairs(report, "attention"), pairs(report, "layers"), strict=True):
        cells, length = [f"{row['length']:,}"], row["length"]
        for mode in MODES:
            full, window = ((kept or row)[mode][name] for name in ("sdpa", "window"))
            used = memory[length][mode]["window"] / memory[length][mode]["sdpa"]
            times = ratio(row, kept, in_times(mode, "sdpa", "window"))
            cells += [f"{milliseconds(full)}, {milliseconds(window)} ({times})"]
            two = [ratio(*layer, in_times(mode, *names)) for names in ((FULL, WINDOWED), (LONGFORMER, OURS))]
            cells += [f"{two[0]}, {two[1]}, {used:.2f}"]
        yield cells


@table("results_long.md", "long_t5_passes")
def encoder_passes(report: dict[str, Any]) -> Rows:
    peers = {"everything": "T5", "windows": "LongT5, local", "transient global": "LongT5, transient global"}
    for row, kept in pairs(report, "runs"):
        by, cells = (kept or row)["milliseconds"], []
        for ours, theirs in peers.items():
            if ours not in by:
                cells.append("")
                continue
            times = ratio(row, kept, in_times("milliseconds", theirs, ours))
            cells.append(f"{by[ours]:,.0f}, {by[theirs]:,.0f} ({times})")
        yield [f"{row['tokens']:,}", *cells]


@table("results_long.md", "decoder_state_cpu")
def decoder_state(report: dict[str, Any]) -> Rows:
    rows = list(pairs(report, "steps"))
    for name in rows[0][0]["step_ms"]:
        yield [
            name,
            *(f"{(kept or row)['step_ms'][name]:.1f}, {row['bytes'][name] / 1e6:.1f}" for row, kept in rows),
        ]


@table("results_long.md", "linear_attention_cpu")
def linear_attention(report: dict[str, Any]) -> Rows:
    for row, kept in pairs(report, "attention"):
        cells = [f"{row['length']:,}"]
        for mode in MODES:
            full, *kernels = row[mode]
            cells += [milliseconds((kept or row)[mode][full])]
            cells += [ratio(row, kept, in_times(mode, full, kernel)) for kernel in kernels]
        yield cells


def _onnx_rows(report: dict[str, Any], part: str, size: list[int], opset: int, counts: Sequence[int]) -> list:
    of = {"part": part, "size": size, "opset": opset}
    every = [pair for pair in pairs(report, "rows") if all(pair[0][name] == value for name, value in of.items())]
    return [next(pair for pair in every if pair[0]["num_key_value_heads"] == count) for count in counts]


def _onnx_cells(rows: list, form: Callable[[float], str]) -> list[str]:
    (base, held), (ours, kept) = rows[0], rows[-1]

    def found(row: dict) -> tuple[float, bool | None]:
        first = base if row is ours else held
        few = all(each.get("usage", {}).get("few_faults") for each in (first, row))
        return first["milliseconds"] / row["milliseconds"], few

    times = [form((other or row)["milliseconds"]) for row, other in rows]
    return [*times, ratio(ours, kept, found)]


@table("results_speed.md", "onnx_latency")
def encoders_in_onnx_runtime(report: dict[str, Any]) -> Rows:
    for size in ([1, 32], [1, 128], [8, 128], [1, 512]):
        for opset, words in ((18, "18 (expanded)"), (23, "23 (one `Attention` a layer)")):
            rows = _onnx_rows(report, "encoder", size, opset, (12, 4, 1))
            yield [", ".join(map(str, size)), words, *_onnx_cells(rows, three_digits)]


@table("results_speed.md", "onnx_latency")
def decoding_steps_in_onnx_runtime(report: dict[str, Any]) -> Rows:
    for size in ([1, 128, 32], [8, 512, 32], [32, 1024, 32]):
        rows = _onnx_rows(report, "decoding step", size, 18, (8, 2, 1))
        yield [f"{size[0]}, {size[1]}", *_onnx_cells(rows, "{:.1f}".format)]


@table("results_appendix.md", "loop_overhead")
def loop_overhead(report: dict[str, Any]) -> Rows:
    for row, kept in pairs(report, "rows"):
        # The larger overhead is what may be said.
        row = max(filter(None, (row, kept)), key=lambda each: each["overhead_percent"])
        bare, loop = (1000 * row[f"{name}_cpu_seconds_per_step"] for name in ("bare", "loop"))
        overhead = f"{loop - bare:.1f} ms" if "tiny" in row["task"] else f"{row['overhead_percent']:+.1f} %"
        waiting = f"{row['waiting_for_data_percent']:.1f} %"
        yield [row["task"], f"{bare:.1f} ms", f"{loop:.1f} ms", overhead, waiting]


@table("results_talking_heads.md", "talking_heads_cpu_plain", "talking_heads_cpu")
def attention_alone(plain: dict[str, Any], whole: dict[str, Any]) -> Rows:
    every = [(row, kept) for row, kept in pairs(whole, "times") if row["option"] != "plain"]
    for row, kept in [*pairs(plain, "times"), *every]:
        cells = [", ".join(map(str, row["shape"]))]
        for mode in MODES:
            shown = (kept or row)[mode]
            cells.append(milliseconds(shown["sdpa"]))
            for peer in ("naive", "blocked"):
                times = ratio(row, kept, in_times(mode, "sdpa", peer, is_cost=True), is_cost=True)
                cells.append(f"{milliseconds(shown[peer])} ({times})")
        yield cells


@table("results_talking_heads.md", "talking_heads_cpu_layers")
def whole_layers(report: dict[str, Any]) -> Rows:
    names = ("sdpa", "naive", "blocked", PEER, "x-transformers flash")
    for row, kept in pairs(report, "layers"):
        for mode in MODES:
            times = [(kept or row)[mode][name] for name in names]
            text = f"{times[3] / times[2]:.1f}x" if kept is None else ratio(row, kept, in_times(mode, PEER, "blocked"))
            yield [", ".join(map(str, row["shape"])), mode, *map(milliseconds, times), text]


@table("results_serving.md", "serving_t5-small_cpu_batch1", "serving_t5-small_cpu_batch4")
def serving(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    sizes = [pair for report in reports for pair in pairs(report, "runs")]
    (last, _) = sizes[-1]
    base, *others = last["milliseconds"]
    for name in (base, *others):
        peak = f"{last['peak_bytes'][name] / 2**20:,.0f} MiB"
        found = in_times("milliseconds", base, name)
        yield [name, *("1" if name == base else ratio(row, kept, found) for row, kept in sizes), peak]


@table("results_serving.md", "serving_t5-small_amx_batch1", "serving_t5-small_amx_batch4")
def serving_with_amx(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from serving(*reports)


@table("results_serving.md", "serving_t5-base_amx_batch4")
def serving_t5_base(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from serving(report)


@table("results_serving.md", "serving_opus-mt_cpu")
def serving_a_marian(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from serving(report)


@table("whisper.md", "serving_whisper-base_variants")
def converted_whispers(report: dict[str, Any]) -> Iterator[Sequence[Any]]:
    yield from (row for row in serving(report) if "int8" not in row[0] and "CTranslate2" not in row[0])


@table("results_serving.md", "serving_whisper-base_cpu_batch1", "serving_whisper-base_cpu_batch4")
def serving_a_whisper(one: dict[str, Any], four: dict[str, Any]) -> Iterator[Sequence[Any]]:
    # The peaks are of batch 1 with beams; of batch 4 there are times alone.
    peaks = one["runs"][-1]["peak_bytes"]
    for row in four["runs"]:
        row["peak_bytes"] = peaks
    yield from serving(one, four)


RECORDINGS = ("batch8_greedy", "batch8", "batch16_greedy", "batch16")


@table("results_serving.md", *(f"serving_whisper-base_amx_{size}" for size in RECORDINGS))
def serving_many_recordings(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """Seconds in both ways: engines that keep their own memory have no ratio that could be claimed."""
    sizes = [way for report in reports for pair in pairs(report, "runs") for way in pair]
    for name in reports[0]["runs"][0]["milliseconds"]:
        found = [(way or {}).get("milliseconds", {}).get(name) for way in sizes]
        yield [name, *("" if each is None else f"{each / 1000:.1f}" for each in found)]


HEARD = ("greedy", "5beams", "5beams_batch16")


@table("results_serving.md", *(f"transcription_whisper-base_amx_{part}" for part in HEARD))
def transcribing_speech(*reports: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """Seconds with glibc as it is and with memory kept, greedily before beams; how many of the largest batch agree."""
    runs = [pair for report in reports for pair in pairs(report, "runs")]
    runs.sort(key=lambda pair: (pair[0]["batch_size"], pair[0]["num_beams"]))
    for name in reports[0]["runs"][0]["milliseconds"]:
        cells = []
        for ways in runs:
            times = [(way or {}).get("milliseconds", {}).get(name) for way in ways]
            cells.append(", ".join(f"{each / 1000:.1f}" for each in times if each is not None))
        same = [str(row["same_texts"].get(name, "-")) for row, _ in runs[-2:]]
        yield [name, *cells, ", ".join(same)]
