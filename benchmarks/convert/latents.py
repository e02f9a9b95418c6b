"""Compare the quality of latents and of shared heads at equal cache sizes, on a real T5 and a real BERT.

The T5 of shared/data/checkpoints is scored by BLEU (greedy) and loss on Multi30k. all-MiniLM-L6-v2 is scored by
Spearman's correlation on STS-B dev, and by the mean cosine between its embeddings and the original ones. The cosine is
measured on Wikipedia lines, like those of the calibration, and on STS-B sentences. The models are not trained.
`convert` creates each checkpoint, with its defaults and with only the closed form. The script writes the JSON file
after each row and keeps existing rows.

The cache size is the number of values that the caches of all layers store per source token and per generated token.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import sacrebleu
import torch
import transformers
from transformers import AutoModel, AutoModelForSeq2SeqLM

from benchmarks.convert.conversion_quality import make_run_record
from benchmarks.convert.conversion_subjects import (
    SentenceEncoder,
    Translator,
    compute_translation_loss,
    read_lines,
    translate,
)
from hf_attn_variants.commands import convert as command
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection import sentence_embeddings
from hf_attn_variants.inspection.costs import compute_kv_cache_bytes_per_token
from hf_attn_variants.registration import get_variant_model_class

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """examples:
  python -m benchmarks.convert.latents --models t5
  python -m benchmarks.convert.latents --models minilm --threads 1
  python -m benchmarks.convert.latents --table"""

T5_OPTIONS: tuple[dict[str, int], ...] = (
    {},
    *({"num_key_value_heads": k} for k in (4, 2, 1)),
    *({"cross_kv_lora_rank": r} for r in (256, 192, 128, 96, 64, 48, 32)),
    *({"kv_lora_rank": r} for r in (64, 32)),
    *({"cross_kv_lora_rank": 128, "kv_lora_rank": r} for r in (64, 32)),
    {"cross_kv_lora_rank": 64, "kv_lora_rank": 32},
)
# The first four latents have the cache size per token of 6, 4, 2 and 1 heads (2 k d for heads, r for a latent). The
# latents of 85, 43 and 21 have about the number of parameters of 4, 2 and 1 heads.
MINILM_OPTIONS: tuple[dict[str, int], ...] = (
    {},
    *({"num_key_value_heads": k} for k in (6, 4, 2, 1)),
    *({"kv_lora_rank": r} for r in (384, 256, 128, 64)),
    *({"kv_lora_rank": r} for r in (192, 85, 43, 21)),
)
Row = dict[str, Any]


class T5(Translator):
    """The T5 trained on Multi30k. Its decoder is converted."""

    options = T5_OPTIONS
    splits = {"val": "val", "test": "test_2016_flickr"}

    def score(self, folder: Path, split: str) -> Row:
        """Return BLEU and loss on a split."""
        model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        name = self.splits[split]
        sources, targets = (
            read_lines(self.data_dir / "multi30k" / f"{name}.{language}.gz") for language in ("en", "de")
        )
        bleu = sacrebleu.corpus_bleu(translate(model, self.tokenizer, sources), [targets]).score
        return {"bleu": bleu, "loss": compute_translation_loss(model, self.tokenizer, sources, targets)}


class MiniLM(SentenceEncoder):
    """all-MiniLM-L6-v2."""

    options = MINILM_OPTIONS

    def score(self, folder: Path, split: str) -> Row:
        """Return Spearman's correlation, and the cosines to the original embeddings on two kinds of text."""
        sentences = [sentence for pair in self.pairs[:256] for sentence in pair]
        source_embeddings, converted_embeddings = (
            sentence_embeddings(AutoModel.from_pretrained(checkpoint), self.tokenizer, sentences)
            for checkpoint in (self.source, folder)
        )
        other = torch.nn.functional.cosine_similarity(source_embeddings, converted_embeddings).mean().item()
        return self.evaluate(folder) | {"cosine_other_text": other}


SUBJECTS: dict[str, Any] = {"t5": T5, "minilm": MiniLM}


def main(args: argparse.Namespace) -> list[Row]:
    """Measure the missing rows, draw the plots, print the tables, and return all rows."""
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"runs": [], "rows": []}
    rows, runs = report["rows"], report["runs"]
    if not args.table:
        runs.append(make_run_record())
        for name in args.models:
            subject = SUBJECTS[name](args.data_dir)
            subject.data_dir = args.data_dir
            for row in _list_requested_rows(name, subject, args):
                if any(row.items() <= existing_row.items() for existing_row in rows):
                    continue
                rows.append(row | measure(subject, row) | {"run": len(runs) - 1})
                atomic_write(args.output, json.dumps({"runs": runs, "rows": rows}, indent=1) + "\n")
                print(rows[-1], flush=True)
    print(format_tables(rows))
    save_plot(rows, args.output)
    return rows


def _list_requested_rows(name: str, subject: Any, args: argparse.Namespace) -> list[Row]:
    options = [dict(_parse_option(part) for part in option.split(",")) for option in args.options or ()]
    base = {"model": name, "split": args.split}
    rows = []
    for option in options or subject.options:
        # A lossless conversion has nothing to fit.
        lossless = not option or option.get("cross_kv_lora_rank", option.get("kv_lora_rank")) in (256, 384)
        fits = [False] if lossless and len(option) < 2 and "num_key_value_heads" not in option else args.fit
        rows += [base | {"option": option, "fitted": fitted} for fitted in fits]
    return rows


def _parse_option(text: str) -> tuple[str, int]:
    name, value = text.split("=")
    return name, int(value)


def measure(subject: Any, row: Row) -> Row:
    """Convert with the command, and return the scores and sizes of the converted model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, seconds = Path(subject.source), 0.0
        if row["option"]:
            folder = Path(temporary) / "converted"
            flags = ["--model_name_or_path", str(subject.source), "--output_dir", str(folder), "--disable_tqdm"]
            for name, value in row["option"].items():
                flags += [f"--{name}", str(value)]
            flags += subject.write_calibration_texts(Path(temporary), 0) + (
                [] if row["fitted"] else ["--fit_steps", "0"]
            )
            started = time.perf_counter()
            command.main(command.parse_args(flags))
            seconds = time.perf_counter() - started
        config = json.loads((folder / "config.json").read_text())
        model_class = get_variant_model_class(config["architectures"][0])
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_upstream(config))
        # With one byte per value, this is the number of values. An encoder has no cache, so that its keys and values
        # are counted instead.
        cache = compute_kv_cache_bytes_per_token(model, 1) or {"self": _count_cached_values(model)}
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return subject.score(folder, row["split"]) | {
            "numbers_per_token": cache,
            "parameters": parameters,
            "conversion_seconds": round(seconds, 1),
        }


def _count_cached_values(model: Any) -> int:
    heads = [site.get_heads(model.config, path) for site, path, _ in model.named_attention_modules()]
    return sum(
        module_heads.rank or (module_heads.key + module_heads.value) * module_heads.head_dim for module_heads in heads
    )


def format_option(option: dict[str, int]) -> str:
    """Return the label of a conversion in the tables."""
    words = {"num_key_value_heads": "{} heads", "cross_kv_lora_rank": "cross {}", "kv_lora_rank": "self {}"}
    name = " + ".join(words[name].format(value) for name, value in option.items()) or "multi-head"
    return name.replace("1 heads", "1 head")


def format_tables(rows: list[Row]) -> str:
    """Return a Markdown table for each model and split."""
    lines = []
    for model, split in dict.fromkeys((row["model"], row["split"]) for row in rows):
        selected_rows = [row for row in rows if (row["model"], row["split"]) == (model, split)]
        metrics = ("bleu", "loss") if model == "t5" else ("spearman", "cosine", "cosine_other_text")
        titles = [f"{metric}, {state}" for state in ("closed form", "fitted") for metric in metrics]
        lines += [f"{model}, {split}:", "", "| | numbers a token | parameters | " + " | ".join(titles) + " |"]
        lines.append("| --- " * (len(titles) + 3) + "|")
        for option in dict.fromkeys(json.dumps(row["option"]) for row in selected_rows):
            group = {row["fitted"]: row for row in selected_rows if json.dumps(row["option"]) == option}
            row = next(iter(group.values()))
            numbers = " + ".join(str(number) for number in row["numbers_per_token"].values())
            cells = [
                "" if group.get(fitted) is None else f"{group[fitted][metric]:{'.2f' if metric == 'bleu' else '.4f'}}"
                for fitted in (False, True)
                for metric in metrics
            ]
            name = format_option(json.loads(option))
            lines.append(f"| {name} | {numbers} | {row['parameters']:,} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def save_plot(rows: list[Row], output: Path) -> None:
    """Plot quality against cache size per token and against the number of parameters, with one file per model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for model in dict.fromkeys(row["model"] for row in rows):
        selected_rows = [row for row in rows if row["model"] == model and row["split"] == "val"]
        metrics = {"bleu": "BLEU, Multi30k val"} if model == "t5" else {
            "spearman": "Spearman, STS-B dev", "cosine_other_text": "cosine to the source, STS-B sentences"
        }  # fmt: skip
        axes_of = {"numbers": "numbers a token in the cache, all layers", "parameters": "parameters, millions"}
        figure = Figure(figsize=(11, 4 * len(metrics)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(metrics), 2, squeeze=False, sharey="row")
        for (metric, title), line in zip(metrics.items(), grid, strict=True):
            for axes, (size, label) in zip(line, axes_of.items(), strict=True):
                named: set[str] = set()  # one label per option, because closed form and fit are close together
                for row in selected_rows:
                    if row["option"]:
                        is_heads = "num_key_value_heads" in row["option"]
                        point = (_get_size(row, size), row[metric])
                        color = "C0" if is_heads else "C1"
                        axes.scatter(*point, color=color, marker="s" if row["fitted"] else "o")
                        # Labels of heads are on the lower right and those of latents on the upper left, because many
                        # points have the same size.
                        side = ((5, -10), "left") if is_heads else ((-4, 5), "right")
                        place = {"xytext": side[0], "ha": side[1], "textcoords": "offset points", "fontsize": 7}
                        name = format_option(row["option"])
                        axes.annotate("" if name in named else name, point, **place)
                        named.add(name)
                base = [row[metric] for row in selected_rows if not row["option"]]
                if base:
                    axes.axhline(base[0], color="black", linestyle="--", linewidth=1, label="multi-head")
                if size == "numbers":
                    axes.set_xscale("log", base=2)
                    axes.xaxis.set_major_formatter("{x:,.0f}")
                axes.margins(x=0.2, y=0.1)
                axes.set_xlabel(label)
                axes.set_ylabel(title)
                axes.grid(alpha=0.3)
        for color, marker, name in (("C0", "o", "heads"), ("C1", "o", "latents"), ("0.5", "s", "fitted")):
            grid[0][0].scatter([], [], color=color, marker=marker, label=name)
        grid[0][0].legend(fontsize=8)
        figure.savefig(output.with_name(f"{output.stem}_{model}.png"), dpi=120)


def _get_size(row: Row, size: str) -> float:
    return row["parameters"] / 1e6 if size == "parameters" else sum(row["numbers_per_token"].values())


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument(
        "--options", nargs="+", metavar="FIELD=VALUE[,...]", help="the conversions (default: those of the tables)"
    )
    parser.add_argument(
        "--fit",
        nargs="+",
        type=lambda text: text == "yes",
        default=[False, True],
        help="whether to fit the models: no, yes or both",
    )
    parser.add_argument("--split", choices=T5.splits, default="val", help="the split of Multi30k")
    parser.add_argument("--threads", type=int, help="number of CPU threads (default: that of PyTorch)")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/convert/results/latents.json")
    parser.add_argument("--table", action="store_true", help="only print the tables of the JSON and draw its plots")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
