"""Train T5 models with several kinds of attention on Multi30k, English to German, from scratch or from a checkpoint.

The models from scratch answer two questions. How much quality does multi-query attention lose if wider feed-forward
layers restore the number of parameters (arXiv 1911.02150, section 4.1)? Do talking heads improve the quality, with few
large heads or many small heads (arXiv 2003.02436, section 6)? From a trained checkpoint, fine-tuning with talking
heads is compared with the same number of steps with multi-head attention. Each run executes
`scripts/run_seq2seq.py`. Finished runs in the work folder are reused, so that an interrupted comparison can continue.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.run_records import check_arguments, check_data_dir, check_source, write_rows
from hf_attn_variants.commands.training import seq2seq as run_seq2seq

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/train/results"
EPILOG = """examples:
  python -m benchmarks.train.t5_multi30k scratch --data_dir MULTI30K_FOLDER --tokenizer T5_FOLDER \\
      --work_dir WORK_FOLDER
  python -m benchmarks.train.t5_multi30k finetune --data_dir MULTI30K_FOLDER --model T5_FOLDER \\
      --work_dir WORK_FOLDER"""
# The models from scratch have two encoder layers and two decoder layers. The number of heads times their size is 128.
WIDTH = 128
FEED_FORWARD = 512
SHAPE = {"d_model": WIDTH, "num_layers": 2, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}
# The checkpoint in shared/data, which has another width, was trained with these settings. Its fine-tuning starts at a
# quarter of its peak learning rate. No setting was tuned on these runs.
RECIPE = (
    "--optim adafactor --adafactor_scale_parameter --lr_scheduler_type linear --label_smoothing_factor 0.1 "
    "--max_length 64 --per_device_train_batch_size 64 --group_by_length --eval_loss_only"
).split()
RATES = {"scratch": "2e-2", "finetune": "5e-3"}
STEPS = {"scratch": 1200, "finetune": 100}
BEAMS = {"scratch": ["1", "4"], "finetune": ["1"]}
METRICS = {
    "dev_loss": ("dev ln(PPL)", "{:.3f}", 1.0),
    "test_bleu": ("test BLEU, greedy", "{:.1f}", 1.0),
    "test_bleu_beam4": ("test BLEU, 4 beams", "{:.1f}", 1.0),
    "test_decode_tokens_per_second": ("tokens/s, greedy", "{:.0f}", 1.0),
    "num_parameters": ("parameters", "{:.3f} M", 1e-6),
}


class Variant(Protocol):
    """A model of a comparison."""

    @property
    def name(self) -> str:
        """The name of the model in tables."""

    def flags(self, args: argparse.Namespace) -> list[str]:
        """Return the flags with which scripts/run_seq2seq.py creates or loads the model."""


@dataclass(frozen=True)
class NewModel:
    """A model with random weights. Its feed-forward layers are wider if it has fewer key/value heads."""

    heads: int
    kv_heads: int | None = None
    talking_heads: str | None = None
    positions: str | None = None
    score: str | None = None
    kernel: str | None = None

    @property
    def name(self) -> str:
        """The name of the model in tables."""
        size = f"{self.heads}x{WIDTH // self.heads}"
        kind = {None: "MHA", 1: "MQA"}.get(self.kv_heads, f"GQA-{self.kv_heads}")
        name = f"{'talking heads' if self.talking_heads else kind} {size}"
        name += f", {self.positions} positions" if self.positions else ""
        name += f", {self.score} scores" if self.score else ""
        return name + (f", {self.kernel} in the decoder" if self.kernel else "")

    @property
    def feed_forward(self) -> int:
        """The d_ff with which the model has as many parameters as with all key/value heads in the decoder."""
        layers = SHAPE["num_layers"] + SHAPE["num_decoder_layers"]
        saved = 0 if self.kv_heads is None else 2 * 2 * WIDTH * (WIDTH - WIDTH // self.heads * self.kv_heads)
        return FEED_FORWARD + round(saved * SHAPE["num_decoder_layers"] / (3 * WIDTH * layers))

    def flags(self, args: argparse.Namespace) -> list[str]:
        """Return the flags for the architecture and the tokenizer."""
        fields = SHAPE | {"num_heads": self.heads, "d_kv": WIDTH // self.heads, "d_ff": self.feed_forward}
        fields |= {"attention_kernel": self.kernel} if self.kernel else {}
        flags = ["--model_type", "t5", "--config_overrides", ",".join(f"{k}={v}" for k, v in fields.items())]
        flags += ["--num_key_value_heads", str(self.kv_heads)] if self.kv_heads else []
        flags += ["--talking_heads", self.talking_heads] if self.talking_heads else []
        flags += ["--position_embedding_type", self.positions] if self.positions else []
        flags += ["--score_function", self.score] if self.score else []
        return [*flags, "--tokenizer_name", args.tokenizer]


@dataclass(frozen=True)
class ConvertedModel:
    """The trained checkpoint, unchanged or with new talking-heads projections, which are the identity or random."""

    talking_heads: str | None = None
    init: str = "identity"
    dynamic: bool = False

    @property
    def name(self) -> str:
        """The name of the model in tables."""
        if self.talking_heads is None:
            return "MHA"
        return f"{self.talking_heads}, {self.init}{', dynamic' if self.dynamic else ''}"

    def flags(self, args: argparse.Namespace) -> list[str]:
        """Return the flags for the checkpoint, which is converted first if it is not in the work folder."""
        if self.talking_heads is None:
            return ["--model_name_or_path", args.model]
        from hf_attn_variants.conversion import convert_checkpoint

        folder = args.work_dir / "checkpoints" / _make_slug(self.name)
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            fields: dict[str, Any] = {"talking_heads": self.talking_heads, "talking_heads_init": self.init}
            if self.dynamic:
                fields["talking_heads_dynamic"] = ["x2l", "m2l", "x2w", "m2w"]
            convert_checkpoint(args.model, folder, **fields)
        check_source(folder, args.model)
        return ["--model_name_or_path", str(folder)]


VARIANTS: dict[str, list[Variant]] = {
    "scratch": [
        NewModel(8),
        NewModel(8, 1),
        NewModel(8, 2),
        NewModel(8, talking_heads="both"),
        NewModel(4, talking_heads="both"),
        NewModel(4),
        NewModel(2, talking_heads="both"),
        NewModel(2),
        NewModel(8, positions="sinusoidal"),
        NewModel(8, positions="sinusoidal", kernel="elu"),
        NewModel(8, score="additive"),
    ],
    "finetune": [
        ConvertedModel(),
        *(ConvertedModel(place, init) for init in ("identity", "random") for place in ("both", "logits", "weights")),
        ConvertedModel("both", dynamic=True),
    ],
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("start", choices=list(VARIANTS), help="new models, or fine-tuning from --model")
    parser.add_argument(
        "--data_dir", type=Path, required=True, help="folder of Multi30k with train.en.gz, train.de.gz, ..."
    )
    parser.add_argument("--tokenizer", help="scratch: folder of a tokenizer for both languages")
    parser.add_argument("--model", help="finetune: folder of a multi-head T5 that was trained on Multi30k")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for runs; finished runs are reused")
    parser.add_argument(
        "--max_train_steps", type=int, help="number of steps (default: 1200 for scratch, 100 for finetune)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--variants", nargs="+", help="names of the models in the table (default: all)")
    parser.add_argument("--dropout_rate", type=float, default=0.1)
    parser.add_argument("--output", type=Path, help="default: benchmarks/train/results/t5_multi30k_START.json")
    args = parser.parse_args(argv)
    needed = {"scratch": "tokenizer", "finetune": "model"}[args.start]
    if getattr(args, needed) is None:
        parser.error(f"{args.start} requires --{needed}")
    names = [variant.name for variant in VARIANTS[args.start]]
    if unknown := set(args.variants or []) - set(names):
        parser.error(f"--variants {sorted(unknown)} must be in {names}")
    args.max_train_steps = args.max_train_steps or STEPS[args.start]
    args.output = args.output or RESULTS / f"t5_multi30k_{args.start}.json"
    return args


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Execute the missing runs, add each row to the JSON file, print the table, and return the rows."""
    check_data_dir(args.data_dir, "train.en.gz", "train.de.gz", "val.en.gz", "val.de.gz")
    rows: list[dict[str, Any]] = []
    variants = [v for v in VARIANTS[args.start] if not args.variants or v.name in args.variants]
    for seed in args.seeds:
        for variant in variants:
            rows.append(_run(args, variant, seed))
            write_rows(args.output, {"start": args.start}, rows, ("variant", "seed", "flags"))
            print(format_table(rows[-1:]).splitlines()[-1], flush=True)
    print(format_table(rows))
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of variants by metrics: means over the seeds, and ranges if the values differ."""
    metrics = {key: value for key, value in METRICS.items() if all(key in row for row in rows)}
    lines = ["| | " + " | ".join(title for title, *_ in metrics.values()) + " |"]
    lines.append("| --- " * (len(metrics) + 1) + "|")
    for name in dict.fromkeys(row["variant"] for row in rows):
        cells = []
        for key, (_, form, scale) in metrics.items():
            values = [scale * row[key] for row in rows if row["variant"] == name]
            low, high = form.format(min(values)), form.format(max(values))
            cells.append(form.format(statistics.mean(values)) + (f" ({low} to {high})" if low != high else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _make_slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def _make_recipe(args: argparse.Namespace) -> list[str]:
    steps = args.max_train_steps
    flags = [*RECIPE, "--learning_rate", RATES[args.start], "--num_beams", *BEAMS[args.start]]
    flags += ["--max_train_steps", str(steps), "--num_warmup_steps", str(steps // 6)]
    return [*flags, "--dropout_rate", str(args.dropout_rate)]


def _run(args: argparse.Namespace, variant: Variant, seed: int) -> dict[str, Any]:
    folder = args.work_dir / f"{args.start}-{_make_slug(variant.name)}-{args.max_train_steps}-{seed}"
    flags = [*variant.flags(args), *_make_recipe(args)]
    for prefix, split in {"": "train", "validation_": "val", "test_": "test_2016_flickr"}.items():
        for side, language in (("source", "en"), ("target", "de")):
            flags += [f"--{prefix}{side}_file", str(args.data_dir / f"{split}.{language}.gz")]
    flags += ["--output_dir", str(folder), "--seed", str(seed), "--disable_tqdm", "--overwrite_output_dir"]
    if not (folder / "all_results.json").is_file():
        command = [sys.executable, str(ROOT / "scripts/run_seq2seq.py"), *flags]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.log", "w", encoding="utf-8") as log:
            status = subprocess.run(command, stdout=log, stderr=log, env=dict(os.environ)).returncode
        if status:
            raise SystemExit(f"{variant.name}, seed {seed}, failed. See {folder}.log")
    results = check_arguments(folder, run_seq2seq.parse_args, flags)
    if not math.isfinite(results["eval_loss"]):
        raise SystemExit(f"{folder}: The evaluation loss must be finite, got {results['eval_loss']}")
    row = {"flags": " ".join(_make_recipe(args)), "dev_loss": results["eval_loss"], "dev_bleu": results["eval_bleu"]}
    names = ("test_bleu", "test_bleu_beam4", "num_parameters", "steps", "train_loss", "train_runtime", "versions")
    row |= {name: results[name] for name in names if name in results}
    row |= {name: value for name, value in results.items() if "tokens_per_second" in name}
    if isinstance(variant, NewModel):
        row["d_ff"] = variant.feed_forward
    return {"variant": variant.name, "seed": seed, **row}


if __name__ == "__main__":
    main(parse_args())
