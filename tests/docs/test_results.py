"""The tables of docs/: each row of these is what the JSON files of benchmarks/ say, to the last digit."""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORTS = {path.stem: path for path in (ROOT / "benchmarks").glob("*/results/*.json")}
DOCUMENTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}

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
    return json.loads(REPORTS[name].read_text(encoding="utf-8"))


def found(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one row with these values; rows of the earlier order of batches are in no table."""
    matching = [r for r in rows if "batch_order" not in r and all(r.get(k) == v for k, v in wanted.items())]
    (row,) = matching
    return row


def spread(values: list[float], form: str) -> str:
    ends = [f"{end:{form}}" for end in (min(values), max(values))]
    return f"{mean(values):{form}}" + (f" ({' to '.join(ends)})" if len(values) > 1 else "")


@table("results_conversion.md")
def conversion_quality() -> Rows:
    quality = importlib.import_module("benchmarks.convert.conversion_quality")
    rows = load("conversion_quality")["rows"]
    lines = [line for line in quality.tables(rows).splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@table("results_training.md")
def uptraining() -> Rows:
    rows = load("conversion_quality")["rows"]
    for share, steps in (("5 % (377 steps)", 377), ("10 % (754 steps)", 754)):
        of = {"model": "t5-mini-multi30k-en-de", "steps": steps, "seed": 0}
        groups = [(m, k) for k in (2, 1) for m in ("mean", "calibrated+fit")]
        cells = [found(rows, method=method, num_key_value_heads=k, **of) for method, k in groups]
        yield [share, *(f"{row['bleu']:.1f} ({row['loss']:.3f})" for row in cells)]


@table("results_long.md")
def long_inputs() -> Rows:
    rows = load("long_inputs")["runs"]
    for row in rows:
        found = (f"{row[by]['accuracy']:.3f}, {row[by]['reciprocal_rank']:.3f}" for by in ("by_halves", "by_passages"))
        yield [row["reading"], *found, f"{row['spearman']:.4f}", f"{row['encoding_seconds']:.0f}"]


@table("results_appendix.md")
def long_questions() -> Rows:
    for row in load("long_questions")["runs"]:
        scores = f"{row['eval_exact_match']:.1f}", f"{row['eval_f1']:.1f}"
        yield [row["reading"], row["eval_windows"], *scores, f"{row['seconds']:.0f}"]


@table("results_long.md")
def long_t5() -> Rows:
    for row in load("long_t5")["runs"]:
        yield [row["encoder"], row["steps"], f"{row['bleu']:.2f}", f"{row['loss']:.4f}"]


@table("results_long.md")
def kernel_conversion() -> Rows:
    for row in sorted(load("kernel_conversion")["runs"], key=lambda row: row["texts"]):
        text = f"{row['calibration_size']:,} {row['texts']} of {row['max_length']} tokens"
        scores = f"{row['spearman']:.3f}", f"{row['cosine']:.3f}", f"{row['conversion_seconds']:.0f}"
        kernel = row["kernel"] + (f", window {row['window']}: {row['reads']}" if "reads" in row else "")
        kernel += " but in matching layers" if "keep_matching_layers" in row else ""
        fit = f"{row['fit']}" + (f", distilled {row['distillation_steps']}" if "distillation_steps" in row else "")
        yield [kernel, row["features"] or "default", text, fit, *scores]


@table("results_long.md")
def finetuned_kernels() -> Rows:
    rows = [row for row in load("finetuned_kernels")["runs"] if "num_train_epochs" not in row]
    for variant, label in (("MHA", "MHA"), ("hedgehog (calibrated at the defaults)", "hedgehog")):
        tasks = ([row["accuracy"] for row in rows if (row["variant"], row["task"]) == (variant, t)] for t in TWO_TASKS)
        yield [label, *(spread(accuracies, ".3f") for accuracies in tasks)]


@table("results_training.md")
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


@table("results_training.md")
def five_seeds() -> Rows:
    rows = load("finetuned_matching_layers")["runs"]
    for variant in ("MHA", "GQA-4", "GQA-4 but in matching layers"):
        full = variant if variant == "MHA" else f"{variant} (calibrated at the defaults)"
        of = {row["seed"]: row["spearmanr"] for row in rows if (row["variant"], row["task"]) == (full, "stsb")}
        yield [variant, *(f"{of[seed]:.3f}" for seed in range(42, 47))]


@table("results_conversion.md")
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


@table("results_conversion.md")
def quickstart() -> Rows:
    for row in load("quickstart")["rows"]:
        scores = [
            spread(row[stage], ".4f") if stage in row and len(set(row[stage])) > 1 else f"{row[stage][0]:.4f}"
            for stage in ("converted", "distilled")
            if stage in row
        ]
        size = [f"{row['parameters'] / 1e6:.2f} M", f"{row['projection_flops'] / 1e6:.2f} MFLOP a token"]
        yield [row["model"], *size, *scores, *[""] * (2 - len(scores))]


@table("results_appendix.md")
def albert() -> Rows:
    rows = load("albert_mlm")["rows"]
    for k in (4, 2, 1):
        losses = [found(rows, method=m, num_key_value_heads=k) for m in ("calibrated", "mean", "first", "random")]
        yield [k, *(f"{row['eval_loss']:.3f}" for row in losses)]


@table("results_appendix.md")
def span_corruption() -> Rows:
    for row in load("t5_span_corruption")["runs"]:
        costs = [f"{row[f'gate_{name}_cost']:+.2f}" for name in ("shuffled", "zeroed_attention")]
        gate = "passed" if row["gate_passed"] else "**failed**"
        scores = [f"{row['eval_loss']:.3f}", f"{row['eval_accuracy']:.3f}"]
        yield [row["optimizer"], row["attention"], *scores, *costs, gate]


@table("results_conversion.md")
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


@table("results_training.md")
def glue() -> Rows:
    runs = load("finetuned_variants")["runs"]
    for variant in ("MHA", f"GQA-4 ({ON_TASK}, distilled on it)", f"MQA ({ON_TASK})", "GQA-4 (mean)"):
        cells = [f"{found(runs, variant=variant, task=task)[name]:.3f}" for task, name in METRICS.items()]
        squad = [run for run in runs if (run["variant"], run["task"]) == (variant, "squad")]
        yield [variant, *cells, f"{squad[0]['f1']:.1f}" if squad else "not run"]


@table("results_training.md")
def from_general_text() -> Rows:
    runs = load("finetuned_from_general_text")["runs"]
    for variant in ("MHA", "GQA-4 (calibrated at the defaults)"):
        of_task = {task: [run for run in runs if (run["variant"], run["task"]) == (variant, task)] for task in GENERAL}
        yield [variant, *(", ".join(GENERAL[task](run) for run in found_runs) for task, found_runs in of_task.items())]


@table("results_training.md")
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


@table("results_training.md")
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


@table("results_scratch.md")
def from_scratch() -> Rows:
    runs = load("t5_multi30k_scratch")["runs"]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        group = [run for run in runs if run["variant"] == variant]
        bleu = [spread([run[name] for run in group], ".1f") for name in ("test_bleu", "test_bleu_beam4")]
        width = "" if group[0].get("d_ff", 512) == 512 else f", d_ff {group[0]['d_ff']}"
        yield [variant + width, spread([run["dev_loss"] for run in group], ".3f"), *bleu]


@table("results_talking_heads.md")
def memory_of_a_call() -> Rows:
    for row in load("talking_heads_cpu")["peak_memory"]:
        parts = [(row["forward"][peer], row["training"][peer]) for peer in ("naive", "blocked", "sdpa")]
        yield [row["shape"][2], *(f"{forward:.0f}, {training:.0f}" for forward, training in parts)]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def largest_batches() -> list[int]:
    return [row["largest_batch"] for row in load("largest_batch_t5-small")["rows"].values()]


@table("results_serving.md")
def texts_that_fit() -> Rows:
    latents = "converted, latents of 128 (source) and 32 (each layer)"
    yield from zip(("transformers", "share_memory", latents, "CTranslate2"), largest_batches(), strict=True)


@pytest.mark.parametrize("name", TABLES)
def test_the_rows_are_in_the_document(name):
    document, rows = TABLES[name]
    lines = {tuple(c.strip() for c in line.strip("|").split("|")) for line in DOCUMENTS[document].splitlines()}
    expected = [tuple(str(cell) for cell in row) for row in rows()]
    missing = [" | ".join(row) for row in expected if row not in lines]
    assert expected and not missing, f"docs/{document} lacks:\n" + "\n".join(f"| {row} |" for row in missing)


def test_a_wrong_digit_is_found(monkeypatch):
    text = DOCUMENTS["results_appendix.md"]
    row = next(line for line in text.splitlines() if line.startswith("| 2 | 2.379"))
    monkeypatch.setitem(DOCUMENTS, "results_appendix.md", text.replace(row, row.replace("2.379", "2.378")))
    with pytest.raises(AssertionError, match=r"2\.379"):
        test_the_rows_are_in_the_document("albert")


def test_the_figures_of_the_experiments_are_those_of_the_results():
    page = (ROOT / "docs/results_experiments.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"\d+\.\d+ \(\d+\.\d+ to \d+\.\d+\)", page))
    assert len(figures) >= 6 and not {figure for figure in figures if figure not in DOCUMENTS["results_scratch.md"]}


def test_the_texts_that_fit_are_the_reports_on_other_pages():
    upstream, shared, latents, ctranslate2 = largest_batches()
    assert f"| {upstream}, {shared}, {latents}, {ctranslate2} |" in DOCUMENTS["results.md"]
    assert shared > ctranslate2 > upstream  # as README.md says in words
