"""Tables of quality and of the GPU runs, which `result_tables.py` fills from the JSON reports."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.speed_tables import Rows, Table

__all__ = ["TABLES"]

FOLDER = Path(__file__).resolve().parent
PATHS = {path.stem: path for path in FOLDER.glob("*/results/*.json") if path.parts[-3] != "gpu"}
TABLES: dict[str, Table] = {}
MIB = 2**20


def register_table(*columns: str) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """Register a function that yields the rows of a table with these columns."""

    def register(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[rows.__name__] = Table((), columns, rows)
        return rows

    return register


def load(name: str) -> Any:
    """Return the content of a report."""
    return json.loads(PATHS[name].read_text(encoding="utf-8"))


def load_gpu(name: str) -> dict[str, Any]:
    """Return the "cells" of a report of the GPU runs."""
    return json.loads((FOLDER / f"gpu/results/{name}.json").read_text(encoding="utf-8"))["cells"]


def find_row(rows: Iterable[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """Return the only row with these values, without the rows that have an earlier batch order."""
    matching = [r for r in rows if "batch_order" not in r and all(r.get(k) == v for k, v in values.items())]
    (row,) = matching
    return row


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of values, followed by their range if there are several."""
    ends = [f"{end:{form}}" for end in (min(values), max(values))]
    return f"{mean(values):{form}}" + (f" ({'–'.join(ends)})" if len(values) > 1 else "")


def format_millions(parameters: int) -> str:
    return f"{parameters / 1e6:.2f} M"


# Conversion without training.
METHODS = {
    "mean": "mean pooling",
    "first": "first head",
    "random": "random head",
    "aligned": "aligned heads",
    "calibrated": "calibrated, closed form",
    "calibrated+fit": "calibrated and fitted",
}
MINILM, T5 = "all-MiniLM-L6-v2", "t5-mini-multi30k-en-de"


def _iterate_converted_rows(report: str, model: str, metric: str, form: str, heads: Sequence[int]) -> Rows:
    rows = [row for row in load(report)["rows"] if row["model"] == model and "batch_order" not in row]
    has_steps = any(row["steps"] for row in rows)
    for method, label in METHODS.items():
        for steps in sorted({row["steps"] for row in rows}):
            group = [row for row in rows if (row["method"], row["steps"]) == (method, steps)]
            if not group:
                continue
            values = [[row[metric] for row in group if row["num_key_value_heads"] == k] for k in heads]
            times = [
                row["conversion_seconds"] + row["training_seconds"] for row in group if "conversion_seconds" in row
            ]
            cells = [spread(cell_values, form) if cell_values else "" for cell_values in values]
            yield [label, *([steps] if has_steps else []), *cells, *([f"{mean(times):.0f} s"] if times else [])]


@register_table("method", "6 heads", "4 heads", "2 heads", "1 head", "time")
def minilm_spearman() -> Rows:
    return _iterate_converted_rows("conversion_quality", MINILM, "spearman", ".4f", (6, 4, 2, 1))


@register_table("method", "6 heads", "4 heads", "2 heads", "1 head", "time")
def minilm_cosine() -> Rows:
    return _iterate_converted_rows("conversion_quality", MINILM, "cosine", ".3f", (6, 4, 2, 1))


@register_table("method", "4 heads", "1 head", "time")
def minilm_spearman_again() -> Rows:
    return _iterate_converted_rows("conversion_quality_minilm_again", MINILM, "spearman", ".4f", (4, 1))


@register_table("method", "4 heads", "1 head", "time")
def minilm_cosine_again() -> Rows:
    return _iterate_converted_rows("conversion_quality_minilm_again", MINILM, "cosine", ".3f", (4, 1))


@register_table("method", "Spearman", "cosine", "time")
def minilm_on_sentences() -> Rows:
    names = {row["model"] for row in load("conversion_quality")["rows"]} - {MINILM, T5}
    (name,) = names
    both = [
        list(_iterate_converted_rows("conversion_quality", name, *metric, (1,)))
        for metric in (("spearman", ".4f"), ("cosine", ".3f"))
    ]
    for (label, spearman, time), (_, cosine, _) in zip(*both, strict=True):
        yield [label, spearman, cosine, time]


@register_table("method", "uptraining steps", "4 heads", "2 heads", "1 head", "time")
def t5_bleu() -> Rows:
    return _iterate_converted_rows("conversion_quality", T5, "bleu", ".2f", (4, 2, 1))


@register_table("method", "uptraining steps", "4 heads", "2 heads", "1 head", "time")
def t5_loss() -> Rows:
    return _iterate_converted_rows("conversion_quality", T5, "loss", ".3f", (4, 2, 1))


@register_table("method", "4 heads", "2 heads", "1 head")
def t5_bleu_again() -> Rows:
    return _iterate_converted_rows("conversion_quality_t5_again", T5, "bleu", ".2f", (4, 2, 1))


def _format_option(option: dict[str, int]) -> str:
    if heads := option.get("num_key_value_heads"):
        return f"{heads} head" + "s" * (heads > 1)
    names = {"cross_kv_lora_rank": "cross-attention", "kv_lora_rank": "self-attention"}
    return ", ".join(f"{names[name]} rank {rank}" for name, rank in option.items()) or "multi-head"


def _group_latent_rows(model: str, split: str) -> list[list[dict[str, Any]]]:
    rows = [row for row in load("latents")["rows"] if (row["model"], row["split"]) == (model, split)]
    options = {json.dumps(row["option"]): row["option"] for row in rows}.values()
    return [[row for row in rows if row["option"] == option] for option in options]


def _iterate_latent_t5_rows(split: str) -> Rows:
    for group in _group_latent_rows("t5", split):
        by_fit = {row["fitted"]: row for row in group}
        first = group[0]
        numbers = " + ".join(f"{value:,}" for value in first["numbers_per_token"].values())
        cells = [f"{by_fit[fit]['bleu']:.2f}" if fit in by_fit else "" for fit in (False, True)]
        cells += [f"{by_fit[fit]['loss']:.3f}" if fit in by_fit else "" for fit in (False, True)]
        yield [_format_option(first["option"]), numbers, f"{first['parameters']:,}", *cells]


OF_LATENTS = ("numbers per token", "parameters", "BLEU, closed form", "BLEU, fitted")
OF_LATENTS += ("loss, closed form", "loss, fitted")


@register_table("variant", *OF_LATENTS)
def latents_t5() -> Rows:
    return _iterate_latent_t5_rows("val")


@register_table("variant", *OF_LATENTS)
def latents_t5_test() -> Rows:
    return _iterate_latent_t5_rows("test")


@register_table("variant", "numbers per layer", "parameters", "Spearman, STS-B", "cosine, Wikipedia", "cosine, STS-B")
def latents_minilm() -> Rows:
    rows = [row for (row,) in _group_latent_rows("minilm", "val")]
    rows.sort(key=lambda row: (-row["numbers_per_token"]["self"], "kv_lora_rank" in row["option"]))
    for row in rows:
        label = _format_option(row["option"]).replace("self-attention", "latents of")
        scores = f"{row['spearman']:.4f}", f"{row['cosine']:.3f}", f"{row['cosine_other_text']:.3f}"
        yield [
            label.replace("of rank", "of"),
            row["numbers_per_token"]["self"] // 6,
            f"{row['parameters']:,}",
            *scores,
        ]


@register_table("variant", "numbers per token", "parameters", "BLEU", "loss", "BLEU, distilled", "loss, distilled")
def marian() -> Rows:
    for row in load("marian_multi30k")["rows"]:
        numbers = " + ".join(f"{value:,}" for value in row["numbers_per_token"].values())
        both = (row.get(stage) for stage in ("converted", "distilled"))
        cells = [
            text
            for stage_row in both
            for text in ([f"{stage_row['bleu']:.2f}", f"{stage_row['loss']:.3f}"] if stage_row else ["", ""])
        ]
        label = "cached encoder outputs" if row["option"] == "exact" else row["option"]
        label = re.sub(r"(cross|self) (\d+)", r"\1-attention rank \2", label).replace(" + ", ", ")
        yield [label.replace(", mean", ", mean pooling"), numbers, format_millions(row["parameters"]), *cells]


@register_table("model", "key/value heads", "masked tokens predicted", "increase of the loss, nats", "verdict")
def reactions() -> Rows:
    rows = load("reactions")["rows"]
    for model, name, full in (("albert", "ALBERT", 8), ("bert", "BERT", 4)):
        selected_rows = [row for row in rows if row["model"] == model]
        for row in sorted(selected_rows, key=lambda row: -(row["num_key_value_heads"] or full)):
            quality = row["quality"]
            verdict = ["", ""]
            if quality:
                verdict = [
                    f"+{quality['value']:.3f}",
                    "within tolerance" if quality["is_kept"] else "outside tolerance",
                ]
            yield [name, row["num_key_value_heads"] or f"{full} (original)", f"{row['masked_accuracy']:.3f}", *verdict]


@register_table("model (metric)", "heads", "reported", "95 % interval", "verdict", "on labeled examples", "metric")
def closing_numbers() -> Rows:
    names = {
        "rxnfp": "BERT classifier of reactions (accuracy)",
        "sapiens": "RoBERTa of proteins (masked tokens predicted)",
        "titles": "untied flan-T5-small (equal outputs)",
    }
    for row in load("closing_numbers")["rows"]:
        is_loss = row["measure"] == "loss"

        def text(value: float, is_loss: bool = is_loss) -> str:
            return f"{value:+.3f}" if is_loss else f"{100 * value:.1f} %"

        low, high = map(text, row["interval"])
        metric = f"{row['before']:.3f} → {row['after']:.3f}"
        heads = f"{row['heads'][1]} of {row['heads'][0]}"
        yield [
            names[row["model"]],
            heads,
            text(row["value"]),
            f"{low} – {high}",
            row["verdict"],
            text(row["true"]),
            metric,
        ]


@register_table("unconverted layers", "MiniLM: cosine", "BERT: masked tokens predicted", "T5 encoder: loss")
def unconverted_layers() -> Rows:
    runs = load("kept_layers")["runs"]
    metrics = {"minilm": ("cosine", ".3f"), "bert": ("masked_accuracy", ".3f"), "t5-mini": ("loss", ".4f")}
    labels = {"all": "all (original model)", "none": "none", "keep_matching_layers": "`--keep_matching_layers 2`"}
    labels |= {"the two of the least shares": "the two with the smallest shares"}
    labels |= {f"layer {number}": f"layer {number}" for number in range(1, 13)}
    for layer_key, label in labels.items():
        cells = []
        for model, (metric, form) in metrics.items():
            scores = [run[metric] for run in runs if (run["model"], run["kept"]) == (model, layer_key)]
            cells.append(f"{scores[0]:{form}}" if scores else "")
        yield [label, *cells]


@register_table("heads", "text", "lines only", "lines and passages", "the same, two layers unconverted")
def retention() -> Rows:
    rows = load("retention")["runs"]
    settings = [{"passages": "no"}, {"passages": "yes"}, {"passages": "yes", "keep_matching_layers": 2}]
    anything = dict.fromkeys(("keep_matching_layers", "calibration_size", "kv_lora_rank", "fit_steps"))
    cases = [("4", {"heads": 4}, settings), ("1", {"heads": 1}, settings[1:])]
    cases += [("latents of 64", {"heads": 12, "kv_lora_rank": 64}, settings[2:])]
    for label, options, column_fields in cases:
        columns = [find_row(rows, **anything | options | fields)["kinds"] for fields in column_fields]
        for kind in columns[0]:
            rows_of_kind = [column[kind] for column in columns]
            cells = [f"{fields['error']:.2f}" + _format_embedding_scores(fields) for fields in rows_of_kind]
            yield [label, kind, *[""] * (len(settings) - len(cells)), *cells]


def _format_embedding_scores(row: dict[str, float]) -> str:
    return f", {row['cosine']:.3f} / {row['neighbours']:.2f}" if "cosine" in row else ""


@register_table("calibration text", "Spearman", "cosine", "cosine on its own held-out text")
def starved_conversion() -> Rows:
    for row in load("starved_conversion")["rows"]:
        quality = "" if row["own_quality"] is None else f"{row['own_quality']:.3f}"
        label = row["calibration"].replace("none: averaged heads", "none (mean pooling)")
        yield [label, f"{row['spearman']:.3f}", f"{row['cosine']:.3f}", quality]


@register_table("2,000 sentences of", "4 heads", "4 heads, no passages", "1 head", "1 head, no passages")
def sentence_calibration() -> Rows:
    rows = load("sentence_calibration")["rows"]
    for source in dict.fromkeys(row["source"] for row in rows):
        yield [source, *(f"{row['spearman']:.4f}" for row in rows if row["source"] == source)]


@register_table("checkpoint", "read", "peak anonymous memory", "peak file-mapped memory", "time after imports")
def conversion_memory() -> Rows:
    names = {"large, one file": "one file", "large, 8 shards": "8 shards"}
    for row in load("conversion_memory")["rows"]:
        peaks = [f"{row[f'peak_{kind}_bytes'] / 1e6:.0f} MB" for kind in ("anonymous", "file_mapped")]
        read = f"{row['source_bytes'] / 1e9:.2f} GB"
        seconds = row["seconds_after_imports"]
        time = f"{seconds:.0f} s" if seconds > 10 else f"{seconds:.1f} s"
        yield [names.get(row["checkpoint"], row["checkpoint"]), read, *peaks, time]


@register_table("model", "parameters", "projections per token", "converted", "converted and distilled")
def quickstart() -> Rows:
    for row in load("quickstart")["rows"]:
        scores = [
            spread(row[stage], ".4f") if len(set(row[stage])) > 1 else f"{row[stage][0]:.4f}"
            for stage in ("converted", "distilled")
            if stage in row
        ]
        size = [format_millions(row["parameters"]), f"{row['projection_flops'] / 1e6:.2f} MFLOP"]
        yield [row["model"], *size, *scores, *[""] * (2 - len(scores))]


# Training after a conversion.
@register_table("share of the steps", "mean, 2 heads", "calibrated, 2 heads", "mean, 1 head", "calibrated, 1 head")
def uptraining() -> Rows:
    rows = load("conversion_quality")["rows"]
    for share, steps in (("0", 0), ("5 % (377 steps)", 377), ("10 % (754 steps)", 754)):
        key = {"model": T5, "steps": steps, "seed": 0}
        groups = [(m, k) for k in (2, 1) for m in ("mean", "calibrated+fit")]
        cells = [find_row(rows, method=method, num_key_value_heads=k, **key) for method, k in groups]
        yield [share, *(f"{row['bleu']:.1f} ({row['loss']:.3f})" for row in cells)]


ON_TASK = "calibrated on the task"
DEFAULTS = "(calibrated at the defaults)"
UNCONVERTED = {
    " but in matching layers": ", token-matching layers unconverted",
    " but in layers 0 and 3": ", layers 1 and 4 unconverted",
}
METRICS = {"sst2": "accuracy", "cola": "matthews_correlation", "stsb": "spearmanr"}
METRICS |= {"qnli": "accuracy", "mnli": "accuracy"}


def _format_variant_name(name: str) -> str:
    for old, new in UNCONVERTED.items():
        name = name.replace(old, new)
    return name.replace("(mean)", "(mean pooling)")


@register_table(
    "model", "SST-2 accuracy", "CoLA Matthews", "STS-B Spearman", "QNLI accuracy", "MNLI accuracy", "SQuAD F1"
)
def glue() -> Rows:
    runs = load("finetuned_variants")["runs"]
    for variant in ("MHA", f"GQA-4 ({ON_TASK}, distilled on it)", f"MQA ({ON_TASK})", "GQA-4 (mean)"):
        cells = [f"{find_row(runs, variant=variant, task=task)[name]:.3f}" for task, name in METRICS.items()]
        squad = [run for run in runs if (run["variant"], run["task"]) == (variant, "squad")]
        yield [_format_variant_name(variant), *cells, f"{squad[0]['f1']:.1f}" if squad else "not run"]


GENERAL = {"qnli": ("accuracy", ".3f"), "mnli": ("accuracy", ".3f"), "squad": ("f1", ".1f")}


@register_table("model", "QNLI accuracy", "MNLI accuracy", "SQuAD F1")
def from_general_text() -> Rows:
    runs = load("finetuned_from_general_text")["runs"]
    for variant in ("MHA", f"GQA-4 {DEFAULTS}"):
        cells = []
        for task, (metric, form) in GENERAL.items():
            of_task = [run for run in runs if (run["variant"], run["task"]) == (variant, task)]
            cells.append(", ".join(f"{run[metric]:{form}}" for run in of_task))
        yield [variant, *cells]


@register_table("model", "STS-B Spearman", "QNLI accuracy", "MNLI accuracy", "SQuAD F1")
def matching_layers() -> Rows:
    """Yield the rows of the table. Some of its runs are also in other tables."""
    names = ("finetuned_from_general_text", "finetuned_kernels", "finetuned_matching_layers")
    rows = [row for name in names for row in load(name)["runs"] if "num_train_epochs" not in row]
    metrics = {"stsb": ("spearmanr", ".3f")} | {"qnli": ("accuracy", ".3f"), "mnli": ("accuracy", ".3f")}
    metrics["squad"] = ("f1", ".1f")
    grouped = ["GQA-4", "GQA-4 but in matching layers", "GQA-2 but in matching layers", "MQA but in matching layers"]
    grouped += ["GQA-4 but in layers 0 and 3", "hedgehog", "hedgehog but in matching layers"]
    variants = {"MHA": "MHA"} | {name: f"{name} {DEFAULTS}" for name in grouped}
    on_task = f"GQA-4 but in matching layers ({ON_TASK})"
    for label, variant in (variants | {on_task: on_task}).items():
        cells = []
        for task, (metric, form) in metrics.items():
            scores_by_seed = {
                row["seed"]: row[metric] for row in rows if (row["variant"], row["task"]) == (variant, task)
            }
            cells.append(", ".join(f"{scores_by_seed[seed]:{form}}" for seed in (42, 43) if seed in scores_by_seed))
        yield [_format_variant_name(label), *cells]


@register_table("seed", "42", "43", "44", "45", "46")
def five_seeds() -> Rows:
    rows = load("finetuned_matching_layers")["runs"]
    for variant in ("MHA", "GQA-4", "GQA-4 but in matching layers"):
        full = variant if variant == "MHA" else f"{variant} {DEFAULTS}"
        scores_by_seed = {
            row["seed"]: row["spearmanr"] for row in rows if (row["variant"], row["task"]) == (full, "stsb")
        }
        yield [_format_variant_name(variant), *(f"{scores_by_seed[seed]:.3f}" for seed in range(42, 47))]


@register_table("model", "STS-B Spearman", "QNLI accuracy", "SST-2 accuracy", "MNLI accuracy")
def then_kernel() -> Rows:
    runs = load("finetuned_then_kernel")["runs"]
    start, distilled = f"the fine-tuned MHA, {ON_TASK}", "distilled on it for 577 steps"
    two = "hedgehog but in matching layers"
    labels = {
        "MHA": "MHA, fine-tuned",
        f"{two} ({start})": "hedgehog, token-matching layers unconverted",
        f"{two} ({start}, trained again)": "hedgehog, token-matching layers unconverted, trained again",
        f"hedgehog ({start})": "hedgehog in all layers",
        f"hedgehog ({start}, trained again)": "hedgehog in all layers, trained again",
        f"hedgehog ({start}, {distilled})": "hedgehog in all layers, distilled",
        f"hedgehog ({start}, {distilled}, trained again)": "hedgehog in all layers, distilled and trained again",
    }
    for variant, label in labels.items():
        cells = []
        for task in ("stsb", "qnli", "sst2", "mnli"):
            scores_by_seed = {
                run["seed"]: run[METRICS[task]] for run in runs if (run["variant"], run["task"]) == (variant, task)
            }
            cells.append(", ".join(f"{scores_by_seed[seed]:.3f}" for seed in (42, 43) if seed in scores_by_seed))
        yield [label, *cells]


@register_table("model", "order", "exact match", "F1", "`--variants`")
def squad() -> Rows:
    runs = load("finetuned_variants")["runs"]
    before, after = "converted, then fine-tuned", "fine-tuned, then converted"
    start = f"GQA-4 (the fine-tuned MHA, {ON_TASK}"
    labels = {
        "MHA": ("MHA (12 key/value heads)", "fine-tuned"),
        "GQA-4 (mean)": ("GQA-4, mean pooling", before),
        "GQA-4 (calibrated, distilled)": ("GQA-4, calibrated and distilled on lines", before),
        f"GQA-4 ({ON_TASK}, distilled on it)": ("GQA-4, calibrated and distilled on question-passage pairs", before),
        f"GQA-4 ({ON_TASK}, distilled on it for 577 steps)": ("the same, distilled for an epoch", before),
        f"{start})": ("GQA-4, calibrated on pairs", after),
        f"{start}, distilled on it)": ("GQA-4, calibrated and distilled on pairs", after),
    }
    for variant, (label, order) in labels.items():
        run = find_row(runs, variant=variant, task="squad")
        yield [label, order, f"{run['exact_match']:.1f}", f"{run['f1']:.1f}", f"`{variant}`"]


@register_table(
    "step",
    "MHA",
    "pairs: calibrated, distilled",
    "pairs: distilled for an epoch",
    "pairs: calibrated (stopped after 200 steps)",
    "lines: calibrated, distilled",
    "mean pooling",
)
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


# Training from scratch.
@register_table("model", "dev loss, nats per token", "test BLEU, greedy", "test BLEU, 4 beams")
def from_scratch() -> Rows:
    runs = load("t5_multi30k_scratch")["runs"]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        group = [run for run in runs if run["variant"] == variant]
        bleu = [spread([run[name] for run in group], ".1f") for name in ("test_bleu", "test_bleu_beam4")]
        width = "" if group[0].get("d_ff", 512) == 512 else f", d_ff {group[0]['d_ff']}"
        yield [variant + width, spread([run["dev_loss"] for run in group], ".3f"), *bleu]


@register_table("key/value heads", "calibrated", "mean pooling", "first head", "random head")
def albert() -> Rows:
    rows = load("albert_mlm")["rows"]
    for k in (4, 2, 1):
        losses = [find_row(rows, method=m, num_key_value_heads=k) for m in ("calibrated", "mean", "first", "random")]
        yield [k, *(f"{row['eval_loss']:.3f}" for row in losses)]


@register_table(
    "optimizer",
    "attention",
    "dev loss",
    "accuracy",
    "cost of shuffling",
    "cost without attention",
    "reads its context",
)
def span_corruption() -> Rows:
    for row in load("t5_span_corruption")["runs"]:
        costs = [f"{row[f'gate_{name}_cost']:+.2f}" for name in ("shuffled", "zeroed_attention")]
        scores = [f"{row['eval_loss']:.3f}", f"{row['eval_accuracy']:.3f}"]
        yield [row["optimizer"], row["attention"], *scores, *costs, "yes" if row["gate_passed"] else "no"]


@register_table("model", "SST-2 accuracy", "STS-B Spearman by seed", "T5: dev loss", "T5: test BLEU")
def talking_heads_finetuned() -> Rows:
    runs, of_t5 = load("talking_heads_finetuning")["runs"], load("t5_multi30k_finetune")["runs"]
    for variant in dict.fromkeys(run["variant"] for run in runs):
        selected_rows = [run for run in runs if run["variant"] == variant]
        sst2 = [run["accuracy"] for run in selected_rows if run["task"] == "sst2"]
        stsb = ", ".join(f"{run['spearmanr']:.3f}" for run in selected_rows if run["task"] == "stsb")
        t5 = [run for run in of_t5 if run["variant"] == variant]
        cells = (
            [spread([run["dev_loss"] for run in t5], ".3f"), spread([run["test_bleu"] for run in t5], ".1f")]
            if t5
            else ["", ""]
        )
        yield [variant, spread(sst2, ".3f"), stsb, *cells]


# The sweeps.
@register_table("talking heads", "loss, mean", "seed 0", "seed 1")
def talking_heads_places() -> Rows:
    rows = load("talking_heads_places")["rows"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        scores_by_seed = {row["seed"]: row["eval_loss"] for row in rows if row["variant"] == variant}
        yield [
            variant,
            *(f"{value:.3f}" for value in (mean(scores_by_seed.values()), scores_by_seed[0], scores_by_seed[1])),
        ]


HEAD_COUNTS = (2, 4, 8, 16)


def _iterate_rows_by_heads(report: str) -> Rows:
    rows = load(report)["rows"]
    for number, projected in enumerate(("multi-head", "logits", "weights", "both")):
        group = rows[4 * number : 4 * number + 4]
        assert all(row["variant"].startswith(projected) for row in group)
        yield [projected, *(f"{row['eval_loss']:.3f}" for row in group)]


@register_table("projected", *(f"{count} heads" for count in HEAD_COUNTS))
def talking_heads_t5() -> Rows:
    return _iterate_rows_by_heads("talking_heads_t5")


@register_table("projected", *(f"{count} heads" for count in HEAD_COUNTS))
def talking_heads_albert() -> Rows:
    return _iterate_rows_by_heads("talking_heads_albert")


@register_table("projections", "loss", "parameters")
def talking_heads_dynamic() -> Rows:
    names = {"multi-head": "none (multi-head)", "static": "static (talking heads)"}
    names |= {
        "x2l": "static, and logits from the query input (x2l)",
        "m2l": "static, and logits from the key input (m2l)",
    }
    names |= {
        "x2w": "static, and weights from the query input (x2w)",
        "m2w": "static, and weights from the key input (m2w)",
    }
    for row in load("talking_heads_dynamic")["rows"]:
        label = names.get(row["variant"], "static, and all four")
        yield [label, f"{row['eval_loss']:.3f}", f"{row['num_parameters']:,}"]


def _format_heads(variant: str) -> str:
    kind, number, size, *local = re.fullmatch(r"(multi-\w+)-(\d+)-of-(\d+)(-local)?", variant).groups()
    return f"{kind}, {number} of {size}" + (", local" if local[0] else "")


@register_table("heads", "loss")
def fewer_heads() -> Rows:
    for row in sorted(load("fewer_heads")["rows"], key=lambda row: row["eval_loss"]):
        yield [_format_heads(row["variant"]), f"{row['eval_loss']:.3f}"]


@register_table("heads", "dev loss", "BLEU, greedy", "BLEU, 4 beams")
def fewer_heads_translation() -> Rows:
    for row in load("fewer_heads_translation")["rows"]:
        bleu = (f"{row[name]:.1f}" for name in ("test_bleu", "test_bleu_beam4"))
        yield [_format_heads(row["variant"]), f"{row['eval_loss']:.3f}", *bleu]


@register_table("one key/value head", "loss before", "loss after", "BLEU before", "BLEU after")
def conversion_methods() -> Rows:
    names = {"mean": "mean of the heads", "first": "the first head", "random": "a random head"}
    for row in load("conversion_methods")["rows"]:
        losses = (f"{row[name]:.3f}" for name in ("initial_eval_loss", "eval_loss"))
        bleu = (f"{row[name]:.1f}" for name in ("initial_eval_bleu", "eval_bleu"))
        yield [names.get(row["variant"], "calibrated (closed form)"), *losses, *bleu]


@register_table("key/value heads", "mean pooling: loss", "mean pooling: BLEU", "calibrated: loss", "calibrated: BLEU")
def gqa_groups() -> Rows:
    by_variant = {row["variant"]: row for row in load("gqa_groups")["rows"]}

    def cells(variant: str) -> list[str]:
        return [f"{by_variant[variant]['eval_loss']:.3f}", f"{by_variant[variant]['eval_bleu']:.1f}"]

    for count in (1, 2, 4):
        both = (f"{method}-num_key_value_heads-{count}" for method in ("averaged", "calibrated"))
        yield [count, *(cell for variant in both for cell in cells(variant))]
    yield ["8 (not converted, trained for the same steps)", *cells("multi-head"), "", ""]


@register_table("key/value heads", "0", "1 %", "2 %", "5 %", "10 %")
def alpha() -> Rows:
    rows = load("alpha")["rows"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        selected_rows = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["alpha"])
        start = f"{selected_rows[0]['initial_eval_loss']:.3f}, {selected_rows[0]['initial_eval_bleu']:.1f}"
        yield [variant, start, *(f"{row['eval_loss']:.3f}, {row['eval_bleu']:.1f}" for row in selected_rows)]


# Long texts.
@register_table("read", "first half: accuracy, MRR", "passage: accuracy, MRR", "Spearman", "seconds")
def long_inputs() -> Rows:
    for row in load("long_inputs")["runs"]:
        both = (row[by] for by in ("by_halves", "by_passages"))
        cells = (f"{reading['accuracy']:.3f}, {reading['reciprocal_rank']:.3f}" for reading in both)
        yield [row["reading"], *cells, f"{row['spearman']:.4f}", f"{row['encoding_seconds']:.0f}"]


@register_table("read", "passes", "exact match", "F1", "seconds")
def long_questions() -> Rows:
    for row in load("long_questions")["runs"]:
        scores = f"{row['eval_exact_match']:.1f}", f"{row['eval_f1']:.1f}"
        yield [row["reading"], row["eval_windows"], *scores, f"{row['seconds']:.0f}"]


@register_table("encoder", "distillation steps", "BLEU", "loss")
def long_t5() -> Rows:
    names = {"everything": "full attention", "transient global": "transient-global attention"}
    for row in load("long_t5")["runs"]:
        yield [names.get(row["encoder"], row["encoder"]), row["steps"], f"{row['bleu']:.2f}", f"{row['loss']:.4f}"]


@register_table("kernel", "features", "calibration text", "fitting steps", "Spearman", "cosine", "seconds")
def kernel_conversion() -> Rows:
    branches = {"both": "", "the window": ", only the window", "outside of it": ", only outside the window"}
    for row in sorted(load("kernel_conversion")["runs"], key=lambda row: row["texts"]):
        text = f"{row['calibration_size']:,} {row['texts']} of {row['max_length']} tokens"
        scores = f"{row['spearman']:.3f}", f"{row['cosine']:.3f}", f"{row['conversion_seconds']:.0f}"
        kernel = row["kernel"] + (f", window {row['window']}{branches[row['reads']]}" if "reads" in row else "")
        kernel += ", token-matching layers unconverted" if "keep_matching_layers" in row else ""
        fit = f"{row['fit']}".replace("unfitted", "0")
        fit += f", distilled {row['distillation_steps']}" if "distillation_steps" in row else ""
        yield [kernel, row["features"] or "default", text, fit, *scores]


@register_table("model", "SST-2 accuracy", "QNLI accuracy")
def finetuned_kernels() -> Rows:
    rows = [row for row in load("finetuned_kernels")["runs"] if "num_train_epochs" not in row]
    for variant, label in (("MHA", "MHA"), (f"hedgehog {DEFAULTS}", "hedgehog")):
        tasks = (
            [row["accuracy"] for row in rows if (row["variant"], row["task"]) == (variant, t)]
            for t in ("sst2", "qnli")
        )
        yield [label, *(spread(accuracies, ".3f") for accuracies in tasks)]


@register_table("engine", "texts")
def texts_that_fit() -> Rows:
    names = (
        "Transformers",
        "`share_memory`",
        "converted, latents of 128 (cross) and 32 (self, per layer)",
        "CTranslate2",
    )
    yield from zip(
        names, (row["largest_batch"] for row in load("largest_batch_t5-small")["rows"].values()), strict=True
    )


# The GPU runs.
GPU_NAMES = {"upstream": "Transformers", "upstream MHA": "Transformers", "exact": "cached encoder outputs"}
GPU_NAMES |= {"cross r=192": "cross-attention latents of 192"}


@register_table("model", "BERT-base, ms", "BERT-base, tokens/s", "T5-base, ms", "T5-base, tokens/s")
def gpu_training() -> Rows:
    bert, t5 = (load_gpu("training_steps")[f"{kind}, bfloat16"]["rows"] for kind in ("bert", "t5"))
    for name in bert:
        cells = [
            text
            for row in (bert[name], t5[name])
            for text in (f"{row['milliseconds']:.1f}", f"{row['tokens_per_second']:,.0f}")
        ]
        yield [GPU_NAMES.get(name, name), *cells]


@register_table("tokens per text", "pass", "fused multi-head", "talking heads", "compiled formula", "formula")
def gpu_talking_heads() -> Rows:
    for length in (512, 2048, 8192):
        for mode in ("forward", "training"):
            row = load_gpu("kernel_speed")[f"{length}, plain"][mode]
            cells = (
                f"{row[peer]:.2f}" if row[peer] < 10 else f"{row[peer]:.1f}"
                for peer in ("sdpa", "triton", "compiled", "naive")
            )
            yield [f"{length:,}", mode, *cells]


@register_table("model", "tokens/s", "step, ms", "cross-attention per step, ms", "cache, MiB")
def gpu_decoding() -> Rows:
    for row in load_gpu("decoding")["t5-base, batch 64"]["rows"]:
        times = (f"{row[name]:.1f}" for name in ("step_milliseconds", "cross_attention_milliseconds"))
        cache = f"{row['cache_bytes'] / MIB:,.0f}"
        yield [GPU_NAMES.get(row["model"], row["model"]), f"{row['tokens_per_second']:,.0f}", *times, cache]


@register_table("model", "tokens/s", "speed", "step, ms", "cache, MiB")
def gpu_static_cache() -> Rows:
    printed = r"source 2048 (.+?) +([\d.]+) tokens/s +([\d.]+)x .* step +([\d.]+) ms .* cache +([\d.]+) MiB"
    for line in (FOLDER / "gpu/results/decoding_static_cache.txt").read_text(encoding="utf-8").splitlines():
        name, tokens, times, step, cache = re.search(printed, line).groups()
        yield [GPU_NAMES.get(name, name), f"{float(tokens):,.0f}", f"{times}×", step, f"{float(cache):,.0f}"]


# The current launch settings of the kernel by latent dimension, which the table shows.
WIDE = "32, 16, 4, 2, 264"
LAUNCHES = {1024: WIDE, 768: WIDE, 512: "32, 16, 4, 3, 264", 192: "64, 16, 4, 2, 528"}
OF_LATENT = {
    "t5-base, exact": ("T5-base, cached encoder outputs", "64 × 2,048 × 768"),
    "t5-large, exact": ("T5-large, cached encoder outputs", "64 × 2,048 × 1,024"),
    "whisper-base, exact": ("Whisper base, cached encoder outputs", "128 × 1,500 × 512"),
    "t5-base, latents": ("T5-base, latents of 192", "256 × 2,048 × 192"),
    "t5-base, exact, one text": ("T5-base, cached encoder outputs, one text", "1 × 2,048 × 768"),
}


@register_table(
    "model", "latents", "reading them once", "multi-head, fused", "latent, fused", "two products", "these kernels"
)
def gpu_latent_kernel() -> Rows:
    for name, (label, sizes) in OF_LATENT.items():
        cell = load_gpu("latent_kernel")[f"times, {name}"]
        times = cell["microseconds"]
        launch = times[f"[{LAUNCHES[int(sizes.split(' × ')[-1].replace(',', ''))]}]"]
        others = (times[peer] for peer in ("multi-head, fused", "latent, fused", "latent, two products"))
        yield [label, sizes, *(f"{value:.0f}" for value in (cell["reading_microseconds"], *others, launch))]


@register_table("tokens", "pass", "full, fused", "window, FlexAttention", "window, blocked")
def gpu_long_texts() -> Rows:
    for length in (16384, 65536):
        for mode in ("forward", "training"):
            row = load_gpu("long_texts")[f"attention, {length}"][mode]
            yield [
                f"{length:,}",
                mode,
                *(f"{row[peer]:#.3g}".rstrip(".") for peer in ("sdpa", "window", "window in blocks")),
            ]


@register_table("attention", "forward", "training")
def gpu_layers() -> Rows:
    cell = load_gpu("long_texts")["layers, 16384"]
    for name in cell["forward"]:
        label = name.replace("BERT layer, ", "").replace("BERT layer", "full")
        yield [label, *(f"{cell[mode][name]:.1f}" for mode in ("forward", "training"))]


@register_table("model", "key/value heads", "mean pooling", "aligned heads", "calibrated")
def rotary_encoders() -> Rows:
    names = {"bert": "BERT", "modernbert": "ModernBERT", "eurobert": "EuroBERT"}
    rows = load("rotary_encoders")["runs"]
    methods = dict.fromkeys(row["method"] for row in rows if row["method"])
    for model, label in names.items():
        original = find_row(rows, model=model, method=None)["accuracy"]
        yield [label, "8 (original)", f"{original:.1%}", "", ""]
        for heads in (4, 2, 1):
            scores = [find_row(rows, model=model, method=method, heads=heads)["accuracy"] for method in methods]
            yield [label, str(heads), *(f"{score:.1%} ({score / original:.0%})" for score in scores)]


@register_table(
    "model",
    "kurtosis",
    "largest value",
    "float32",
    "`quantize`",
    "OpenVINO, int8",
    "`quantize`, distance × 1000",
    "OpenVINO, distance × 1000",
)
def gated_int8() -> Rows:
    rows = load("gated_int8")["runs"]
    for name in dict.fromkeys(row["extension"] for row in rows):
        runs = [row for row in rows if row["extension"] == name]
        engines = ("float32", "quantize", "OpenVINO int8 (static)")
        outliers = [spread([run[key] for run in runs], ",.0f") for key in ("kurtosis", "infinity_norm")]
        scores = [spread([run["spearman"][engine] for run in runs], ".4f") for engine in engines]
        distances = [spread([1e3 * run["distance"][engine] for run in runs], ".2f") for engine in engines[1:]]
        yield [name, *outliers, *scores, *distances]
