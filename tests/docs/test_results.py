"""The tables of docs/: each row of these is what the JSON files in benchmarks/results/ say, to the last digit."""

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "talking_heads.md")}

TWO_TASKS = ("sst2", "qnli")
Rows = Iterable[Sequence[Any]]
TABLES: dict[str, tuple[str, Callable[[], Rows]]] = {}


def table(document: str) -> Callable:
    """Register a function that yields the rows of a document's table, as the cells' texts."""

    def register(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[rows.__name__] = (document, rows)
        return rows

    return register


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def found(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one row with these values; rows of the earlier order of batches are in no table."""
    matching = [r for r in rows if "batch_order" not in r and all(r.get(k) == v for k, v in wanted.items())]
    (row,) = matching
    return row


def three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def spread(values: list[float], form: str) -> str:
    ends = [f"{end:{form}}" for end in (min(values), max(values))]
    return f"{mean(values):{form}}" + (f" ({' to '.join(ends)})" if len(values) > 1 else "")


@table("results.md")
def conversion_quality() -> Rows:
    quality = importlib.import_module("conversion_quality")
    rows = load("conversion_quality")["rows"]
    lines = [line for line in quality.tables(rows).splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@table("results.md")
def uptraining() -> Rows:
    rows = load("conversion_quality")["rows"]
    for share, steps in (("5 % (377 steps)", 377), ("10 % (754 steps)", 754)):
        of = {"model": "t5-mini-multi30k-en-de", "steps": steps, "seed": 0}
        groups = [(m, k) for k in (2, 1) for m in ("mean", "calibrated+fit")]
        cells = [found(rows, method=method, num_key_value_heads=k, **of) for method, k in groups]
        yield [share, *(f"{row['bleu']:.1f} ({row['loss']:.3f})" for row in cells)]


@table("results.md")
def decoding() -> Rows:
    runs = {
        "T5-small, batch 32, source 1024": "t5-small_cpu",
        "the same, batch 8, 4 beams": "t5-small_cpu_beams4",
        "16 heads of 64, d_model 1024, 4 + 4 layers, batch 32, source 2048, 32 tokens": "t5-large-attention_cpu",
        "T5-small, batch 1, source 32 (9 repeats)": "t5-small_cpu_batch1",
        "the same, static cache": "t5-small_cpu_batch1_static",
        "the same, static cache and `torch.compile` (5 repeats)": "t5-small_cpu_batch1_static_compiled",
        "T5-small, batch 8, source 4096, 32 tokens": "t5-small_cpu_sizes",
    }
    for label, name in runs.items():
        rows = load(f"decode_{name}")["rows"]
        last = (rows[-1]["batch_size"], rows[-1]["source_length"])
        by_model = {r["model"]: r for r in rows if (r["batch_size"], r["source_length"]) == last}
        speeds = [three_digits(by_model["upstream MHA"]["tokens_per_second"])]
        for model in ("MHA", "GQA-4", "GQA-2", "MQA"):
            row = by_model.get(model)
            speeds.append(f"{three_digits(row['tokens_per_second'])} ({row['speedup']:.2f}x)" if row else "")
        steps = [f"{by_model[m]['step_speedup']:.2f}x" if m in by_model else "" for m in ("GQA-2", "MQA")]
        yield [label, *speeds, *steps]


@table("results.md")
def encoding() -> Rows:
    rows = load("encode_minilm_cpu")["rows"]
    upstream, *ours = (row["milliseconds"] for row in rows)
    cells = [f"{time:.0f} ({upstream / time:.2f}x)" for time in ours]
    yield ["MiniLM, ms a batch (lower is better)", f"{upstream:.0f}", *cells]


@table("results.md")
def windows() -> Rows:
    measured = load("sliding_window_cpu")
    memory = {row["shape"][2]: row for row in measured["memory"]}
    for row, layer in zip(measured["attention"], measured["layers"], strict=True):
        cells, length = [f"{row['length']:,}"], row["length"]
        for mode in ("forward", "training"):
            full, window = row[mode]["sdpa"], row[mode]["window"]
            whole = layer[mode]["BERT layer"] / layer[mode]["BERT layer, window"]
            peer = layer[mode]["Longformer's self-attention"] / layer[mode]["self-attention, window"]
            used = memory[length][mode]["window"] / memory[length][mode]["sdpa"]
            cells += [f"{milliseconds(full)}, {milliseconds(window)} ({full / window:.2f}x)"]
            cells += [f"{whole:.2f}x, {peer:.2f}x, {used:.2f}"]
        yield cells


@table("results.md")
def long_inputs() -> Rows:
    rows = load("long_inputs")["runs"]
    for row in rows:
        found = (f"{row[by]['accuracy']:.3f}, {row[by]['reciprocal_rank']:.3f}" for by in ("by_halves", "by_passages"))
        yield [row["reading"], *found, f"{row['spearman']:.4f}", f"{row['encoding_seconds']:.0f}"]


@table("results.md")
def long_questions() -> Rows:
    for row in load("long_questions")["runs"]:
        scores = f"{row['eval_exact_match']:.1f}", f"{row['eval_f1']:.1f}"
        yield [row["reading"], row["eval_windows"], *scores, f"{row['seconds']:.0f}"]


@table("results.md")
def long_t5() -> Rows:
    for row in load("long_t5")["runs"]:
        yield [row["encoder"], row["steps"], f"{row['bleu']:.2f}", f"{row['loss']:.4f}"]


@table("results.md")
def encoder_passes() -> Rows:
    for row in load("long_t5_passes")["runs"]:
        by, cells = row["milliseconds"], []
        for ours, theirs in (("everything", "T5"), ("windows", "LongT5, local"), ("transient global", None)):
            theirs = theirs or "LongT5, transient global"
            cells += [f"{by[ours]:,.0f}, {by[theirs]:,.0f} ({by[theirs] / by[ours]:.2f}x)"] if ours in by else [""]
        yield [f"{row['tokens']:,}", *cells]


@table("results.md")
def decoder_state() -> Rows:
    rows = load("decoder_state_cpu")["steps"]
    for name in rows[0]["step_ms"]:
        yield [name, *(f"{row['step_ms'][name]:.1f}, {row['bytes'][name] / 1e6:.1f}" for row in rows)]


@table("results.md")
def linear_attention() -> Rows:
    for row in load("linear_attention_cpu")["attention"]:
        cells = [f"{row['length']:,}"]
        for mode in ("forward", "training"):
            full, *kernels = row[mode].values()
            cells += [milliseconds(full), *(f"{full / kernel:.2f}x" for kernel in kernels)]
        yield cells


@table("results.md")
def kernel_conversion() -> Rows:
    for row in sorted(load("kernel_conversion")["runs"], key=lambda row: row["texts"]):
        text = f"{row['calibration_size']:,} {row['texts']} of {row['max_length']} tokens"
        scores = f"{row['spearman']:.3f}", f"{row['cosine']:.3f}", f"{row['conversion_seconds']:.0f}"
        kernel = row["kernel"] + (f", window {row['window']}: {row['reads']}" if "reads" in row else "")
        kernel += " but in matching layers" if "keep_matching_layers" in row else ""
        fit = f"{row['fit']}" + (f", distilled {row['distillation_steps']}" if "distillation_steps" in row else "")
        yield [kernel, row["features"] or "default", text, fit, *scores]


@table("results.md")
def finetuned_kernels() -> Rows:
    rows = [row for row in load("finetuned_kernels")["runs"] if "num_train_epochs" not in row]
    for variant, label in (("MHA", "MHA"), ("hedgehog (calibrated at the defaults)", "hedgehog")):
        tasks = ([row["accuracy"] for row in rows if (row["variant"], row["task"]) == (variant, t)] for t in TWO_TASKS)
        yield [label, *(spread(accuracies, ".3f") for accuracies in tasks)]


@table("results.md")
def matching_layers() -> Rows:
    """Some of its runs are those of other tables."""
    names = ("finetuned_from_general_text", "finetuned_kernels", "finetuned_matching_layers")
    rows = [row for name in names for row in load(name)["runs"] if "num_train_epochs" not in row]
    metrics = {"stsb": ("spearmanr", ".3f"), "qnli": ("accuracy", ".3f"), "mnli": ("accuracy", ".3f")}
    metrics["squad"] = ("f1", ".1f")
    grouped = ["GQA-4", "GQA-4 but in matching layers", "GQA-2 but in matching layers", "MQA but in matching layers"]
    grouped += ["GQA-4 but in layers 0 and 3", "hedgehog", "hedgehog but in matching layers"]
    names = {"MHA": "MHA"} | {name: f"{name} (calibrated at the defaults)" for name in grouped}
    on_task = "GQA-4 but in matching layers (calibrated on the task)"
    for label, variant in (names | {on_task: on_task}).items():
        cells = []
        for task, (metric, form) in metrics.items():
            of = {row["seed"]: row[metric] for row in rows if (row["variant"], row["task"]) == (variant, task)}
            cells.append(", ".join(f"{of[seed]:{form}}" for seed in (42, 43) if seed in of))
        yield [label, *cells]


@table("results.md")
def five_seeds() -> Rows:
    rows = load("finetuned_matching_layers")["runs"]
    for variant in ("MHA", "GQA-4", "GQA-4 but in matching layers"):
        full = variant if variant == "MHA" else f"{variant} (calibrated at the defaults)"
        of = {row["seed"]: row["spearmanr"] for row in rows if (row["variant"], row["task"]) == (full, "stsb")}
        yield [variant, *(f"{of[seed]:.3f}" for seed in range(42, 47))]


@table("results.md")
def retention() -> Rows:
    rows = load("retention")["runs"]
    settings = [{"passages": "no"}, {"passages": "yes"}, {"passages": "yes", "keep_matching_layers": 2}]
    anything = dict.fromkeys(("keep_matching_layers", "calibration_size", "kv_lora_rank", "fit_steps"))
    cases = [("4", {"heads": 4}, settings), ("1", {"heads": 1}, settings[1:])]
    cases += [("latents of 64", {"heads": 12, "kv_lora_rank": 64}, settings[2:])]
    for label, of, of_columns in cases:
        columns = [found(rows, **anything | of | each)["kinds"] for each in of_columns]
        for kind in columns[0]:
            kept = [column[kind] for column in columns]
            cells = [f"{each['error']:.2f}" + _embeddings(each) for each in kept]
            yield [label, kind, *[""] * (len(settings) - len(cells)), *cells]


def _embeddings(kept: dict[str, float]) -> str:
    return f", {kept['cosine']:.3f} / {kept['neighbours']:.2f}" if "cosine" in kept else ""


@table("results.md")
def quickstart() -> Rows:
    for row in load("quickstart")["rows"]:
        scores = [
            spread(row[stage], ".4f") if stage in row and len(set(row[stage])) > 1 else f"{row[stage][0]:.4f}"
            for stage in ("converted", "distilled")
            if stage in row
        ]
        size = [f"{row['parameters'] / 1e6:.2f} M", f"{row['projection_flops'] / 1e6:.2f} MFLOP a token"]
        yield [row["model"], *size, *scores, *[""] * (2 - len(scores))]


@table("results.md")
def encoders_in_onnx_runtime() -> Rows:
    rows = load("onnx_latency")["rows"]
    for size in ([1, 32], [1, 128], [8, 128], [1, 512]):
        for opset, words in ((18, "18 (expanded)"), (23, "23 (one `Attention` a layer)")):
            of = {"part": "encoder", "size": size, "opset": opset}
            times = [found(rows, num_key_value_heads=k, **of)["milliseconds"] for k in (12, 4, 1)]
            yield [", ".join(map(str, size)), words, *map(three_digits, times), f"{times[0] / times[2]:.2f}x"]


@table("results.md")
def decoding_steps_in_onnx_runtime() -> Rows:
    rows = load("onnx_latency")["rows"]
    for size in ([1, 128, 32], [8, 512, 32], [32, 1024, 32]):
        of = {"part": "decoding step", "size": size}
        times = [found(rows, num_key_value_heads=k, **of)["milliseconds"] for k in (8, 2, 1)]
        yield [f"{size[0]}, {size[1]}", *(f"{t:.1f}" for t in times), f"{times[0] / times[2]:.2f}x"]


@table("results.md")
def loop_overhead() -> Rows:
    for row in load("loop_overhead")["rows"]:
        bare, loop = (1000 * row[f"{name}_cpu_seconds_per_step"] for name in ("bare", "loop"))
        tiny = "tiny" in row["task"]
        overhead = f"{loop - bare:.1f} ms" if tiny else f"{row['overhead_percent']:+.1f} %"
        waiting = f"{row['waiting_for_data_percent']:.1f} %"
        yield [row["task"], f"{bare:.1f} ms", f"{loop:.1f} ms", overhead, waiting]


@table("results.md")
def albert() -> Rows:
    rows = load("albert_mlm")["rows"]
    for k in (4, 2, 1):
        losses = [found(rows, method=m, num_key_value_heads=k) for m in ("calibrated", "mean", "first", "random")]
        yield [k, *(f"{row['eval_loss']:.3f}" for row in losses)]


@table("results.md")
def span_corruption() -> Rows:
    for row in load("t5_span_corruption")["runs"]:
        costs = [f"{row[f'gate_{name}_cost']:+.2f}" for name in ("shuffled", "zeroed_attention")]
        gate = "passed" if row["gate_passed"] else "**failed**"
        scores = [f"{row['eval_loss']:.3f}", f"{row['eval_accuracy']:.3f}"]
        yield [row["optimizer"], row["attention"], *scores, *costs, gate]


@table("results.md")
def conversion_memory() -> Rows:
    names = {"large, one file": "one file", "large, 8 shards": "8 shards"}
    for row in load("conversion_memory")["rows"]:
        peaks = [f"{row[f'peak_{kind}_bytes'] / 1e6:.0f} MB" for kind in ("anonymous", "file_mapped")]
        read = f"{row['source_bytes'] / 1e9:.2f} GB"
        seconds = row["seconds_after_imports"]
        time = f"{seconds:.0f} s" if seconds > 10 else f"{seconds:.1f} s"
        yield [names.get(row["checkpoint"], row["checkpoint"]), read, *peaks, time]


ON_TASK = "calibrated on the task"
METRICS = {"sst2": "accuracy", "cola": "matthews_correlation", "stsb": "spearmanr"}
METRICS |= {"qnli": "accuracy", "mnli": "accuracy"}


GENERAL = {
    "qnli": lambda run: f"{run['accuracy']:.3f}",
    "mnli": lambda run: f"{run['accuracy']:.3f}",
    "squad": lambda run: f"{run['f1']:.1f}",
}


@table("results.md")
def glue() -> Rows:
    runs = load("finetuned_variants")["runs"]
    for variant in ("MHA", f"GQA-4 ({ON_TASK}, distilled on it)", f"MQA ({ON_TASK})", "GQA-4 (mean)"):
        cells = [f"{found(runs, variant=variant, task=task)[name]:.3f}" for task, name in METRICS.items()]
        squad = [run for run in runs if (run["variant"], run["task"]) == (variant, "squad")]
        yield [variant, *cells, f"{squad[0]['f1']:.1f}" if squad else "not run"]


@table("results.md")
def from_general_text() -> Rows:
    runs = load("finetuned_from_general_text")["runs"]
    for variant in ("MHA", "GQA-4 (calibrated at the defaults)"):
        of_task = {task: [run for run in runs if (run["variant"], run["task"]) == (variant, task)] for task in GENERAL}
        yield [variant, *(", ".join(GENERAL[task](run) for run in found_runs) for task, found_runs in of_task.items())]


@table("results.md")
def squad() -> Rows:
    runs = load("finetuned_variants")["runs"]
    after = f"GQA-4 (the fine-tuned MHA, {ON_TASK}"
    labels = {
        "MHA": "MHA (12 key/value heads), fine-tuned",
        "GQA-4 (mean)": "GQA-4, mean-pooled",
        "GQA-4 (calibrated, distilled)": "GQA-4, calibrated and distilled on lines",
        f"GQA-4 ({ON_TASK}, distilled on it)": "GQA-4, calibrated and distilled on question-passage pairs",
        f"GQA-4 ({ON_TASK}, distilled on it for 577 steps)": "the same, distilled for an epoch",
        f"{after})": "GQA-4, calibrated on pairs",
        f"{after}, distilled on it)": "GQA-4, calibrated and distilled on pairs",
    }
    for variant, label in labels.items():
        run = found(runs, variant=variant, task="squad")
        yield [label, f"{run['exact_match']:.1f}", f"**{run['f1']:.1f}**", f"`{variant}`"]


@table("results.md")
def squad_losses() -> Rows:
    losses = load("squad_training_losses")
    variants = [
        "MHA",
        f"GQA-4 ({ON_TASK}, distilled on it)",
        f"GQA-4 ({ON_TASK}, distilled on it for 577 steps)",
        f"GQA-4 ({ON_TASK})",
        "GQA-4 (calibrated, distilled)",
        "GQA-4 (mean)",
    ]
    for step in ("50", "100", "150", "200", "400", "600"):
        yield [step, *(f"{losses[name][step]:.2f}" if step in losses[name] else "" for name in variants)]


@table("results.md")
def from_scratch() -> Rows:
    runs = load("t5_multi30k_scratch")["runs"]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        group = [run for run in runs if run["variant"] == variant]
        bleu = [spread([run[name] for run in group], ".1f") for name in ("test_bleu", "test_bleu_beam4")]
        width = "" if group[0].get("d_ff", 512) == 512 else f", d_ff {group[0]['d_ff']}"
        yield [variant + width, spread([run["dev_loss"] for run in group], ".3f"), *bleu]


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


@table("talking_heads.md")
def attention_alone() -> Rows:
    every = [row for row in load("talking_heads_cpu")["times"] if row["option"] != "plain"]
    for row in [*load("talking_heads_cpu_plain")["times"], *every]:
        cells = [", ".join(map(str, row["shape"]))]
        for part in (row["forward"], row["training"]):
            cells.append(milliseconds(part["sdpa"]))
            ratios = [(part[peer], part[peer] / part["sdpa"]) for peer in ("naive", "blocked")]
            cells += [f"{milliseconds(time)} ({ratio:.2f}x)" for time, ratio in ratios]
        yield cells


@table("talking_heads.md")
def whole_layers() -> Rows:
    names = ("sdpa", "naive", "blocked", "x-transformers talking heads", "x-transformers flash")
    for row in load("talking_heads_cpu_layers")["layers"]:
        for part in ("forward", "training"):
            times = [row[part][name] for name in names]
            yield [", ".join(map(str, row["shape"])), part, *map(milliseconds, times), f"{times[3] / times[2]:.1f}x"]


@table("talking_heads.md")
def memory_of_a_call() -> Rows:
    for row in load("talking_heads_cpu")["memory"]:
        parts = [(row["forward"][peer], row["training"][peer]) for peer in ("naive", "blocked", "sdpa")]
        yield [row["shape"][2], *(f"{forward:.0f}, {training:.0f}" for forward, training in parts)]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("name", TABLES)
def test_the_rows_are_in_the_document(name):
    document, rows = TABLES[name]
    lines = {tuple(c.strip() for c in line.strip("|").split("|")) for line in DOCUMENTS[document].splitlines()}
    expected = [tuple(str(cell) for cell in row) for row in rows()]
    missing = [" | ".join(row) for row in expected if row not in lines]
    assert expected and not missing, f"docs/{document} lacks:\n" + "\n".join(f"| {row} |" for row in missing)


def test_a_wrong_digit_is_found(monkeypatch):
    text = DOCUMENTS["results.md"]
    row = next(line for line in text.splitlines() if line.startswith("| 2 | 2.379"))
    monkeypatch.setitem(DOCUMENTS, "results.md", text.replace(row, row.replace("2.379", "2.378")))
    with pytest.raises(AssertionError, match=r"2\.379"):
        test_the_rows_are_in_the_document("albert")
