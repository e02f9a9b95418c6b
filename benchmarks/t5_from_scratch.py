"""A small T5 from scratch on Multi30k, English to German, with every kind of attention: the questions of two papers.

Does multi-query attention lose quality where the feed-forward layers are widened to as many parameters (1911.02150,
section 4.1)? And do talking heads gain, with few large heads or many small ones (2003.02436, section 6)? Each run is
`scripts/run_seq2seq.py`; a run that is finished in the work folder is kept, so that this can be made in pieces.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EPILOG = """example:
  python benchmarks/t5_from_scratch.py --data_dir MULTI30K_FOLDER --tokenizer T5_FOLDER --work_dir WORK_FOLDER"""
# Two layers each of encoder and decoder; heads times their size is always 128. The tuned numbers are those of the
# checkpoint in shared/data, which another width was trained with: nothing was chosen by these runs.
WIDTH = 128
FEED_FORWARD = 512
SHAPE = {"d_model": WIDTH, "num_layers": 2, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}
RECIPE = (
    "--optim adafactor --adafactor_scale_parameter --learning_rate 2e-2 --lr_scheduler_type linear "
    "--label_smoothing_factor 0.1 --max_length 64 --per_device_train_batch_size 64 --group_by_length "
    "--num_beams 1 4 --eval_loss_only"
).split()
METRICS = {
    "dev_loss": "dev ln(PPL)",
    "test_bleu": "test BLEU, greedy",
    "test_bleu_beam4": "test BLEU, 4 beams",
    "num_parameters": "parameters",
}


@dataclass(frozen=True)
class Variant:
    """One model: its heads, and how much wider its feed-forward layers are for as many parameters as multi-head."""

    heads: int
    kv_heads: int | None = None
    talking_heads: str | None = None

    @property
    def name(self) -> str:
        """How tables call it."""
        size = f"{self.heads}x{WIDTH // self.heads}"
        kind = {None: "MHA", 1: "MQA"}.get(self.kv_heads, f"GQA-{self.kv_heads}")
        return f"{'talking heads' if self.talking_heads else kind} {size}"

    @property
    def feed_forward(self) -> int:
        """d_ff: what the keys and values of the decoder's two attentions save, spread over all gated layers."""
        layers = SHAPE["num_layers"] + SHAPE["num_decoder_layers"]
        saved = 0 if self.kv_heads is None else 2 * 2 * WIDTH * (WIDTH - WIDTH // self.heads * self.kv_heads)
        return FEED_FORWARD + round(saved * SHAPE["num_decoder_layers"] / (3 * WIDTH * layers))

    def flags(self) -> list[str]:
        """What scripts/run_seq2seq.py is given."""
        fields = SHAPE | {"num_heads": self.heads, "d_kv": WIDTH // self.heads, "d_ff": self.feed_forward}
        flags = ["--model_type", "t5", "--config_overrides", ",".join(f"{k}={v}" for k, v in fields.items())]
        flags += ["--num_key_value_heads", str(self.kv_heads)] if self.kv_heads else []
        return flags + (["--talking_heads", self.talking_heads] if self.talking_heads else [])


VARIANTS = [
    Variant(8),
    Variant(8, 1),
    Variant(8, 2),
    *(Variant(heads, talking_heads=mixes) for heads in (8, 4, 2) for mixes in ("both", None) if mixes or heads < 8),
]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", type=Path, required=True, help="Multi30k: train.en.gz, train.de.gz, ...")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer for both languages")
    parser.add_argument("--work_dir", type=Path, required=True, help="where runs go; finished ones are kept")
    parser.add_argument("--max_train_steps", type=int, default=1200)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--dropout_rate", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/t5_from_scratch.json")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is not there yet; write the JSON after each run, print the table at the end, and return the rows."""
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        for variant in VARIANTS:
            rows.append(_run(args, variant, seed))
            flags = " ".join([*RECIPE, "--max_train_steps", str(args.max_train_steps)])
            text = json.dumps({"flags": flags, "shape": SHAPE, "runs": rows}, indent=1)
            args.output.write_text(text + "\n", encoding="utf-8")
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table: variants by metrics, means over the seeds."""
    lines = ["| | " + " | ".join(METRICS.values()) + " |", "| --- " * (len(METRICS) + 1) + "|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        means = [statistics.mean(row[key] for row in rows if row["variant"] == name) for key in METRICS]
        lines.append(f"| {name} | {means[0]:.3f} | {means[1]:.1f} | {means[2]:.1f} | {means[3] / 1e6:.3f} M |")
    return "\n".join(lines)


def _run(args: argparse.Namespace, variant: Variant, seed: int) -> dict[str, Any]:
    folder = args.work_dir / f"{variant.name.replace(' ', '-')}-{args.max_train_steps}-{seed}"
    if not (folder / "all_results.json").is_file():
        files = {"": "train", "validation_": "val", "test_": "test_2016_flickr"}
        command = [sys.executable, str(ROOT / "scripts/run_seq2seq.py"), *variant.flags(), *RECIPE]
        for prefix, split in files.items():
            for side, language in (("source", "en"), ("target", "de")):
                command += [f"--{prefix}{side}_file", str(args.data_dir / f"{split}.{language}.gz")]
        command += ["--tokenizer_name", args.tokenizer, "--output_dir", str(folder), "--seed", str(seed)]
        command += ["--max_train_steps", str(args.max_train_steps), "--dropout_rate", str(args.dropout_rate)]
        command += ["--num_warmup_steps", str(args.max_train_steps // 6), "--disable_tqdm", "--overwrite_output_dir"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".log"), "w", encoding="utf-8") as log:
            status = subprocess.run(command, stdout=log, stderr=log, env=dict(os.environ)).returncode
        if status:
            raise SystemExit(f"{variant.name}, seed {seed}, failed: see {folder.with_suffix('.log')}")
    found = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    if not math.isfinite(found["eval_loss"]):
        raise SystemExit(f"{folder}: the loss is {found['eval_loss']}")
    kept = {"dev_loss": found["eval_loss"], "dev_bleu": found["eval_bleu"]}
    names = ("test_bleu", "test_bleu_beam4", "num_parameters", "steps", "train_loss", "train_runtime", "versions")
    kept |= {name: found[name] for name in names}
    kept |= {name: value for name, value in found.items() if "tokens_per_second" in name}
    return {"variant": variant.name, "seed": seed, "d_ff": variant.feed_forward, **kept}


if __name__ == "__main__":
    main(parse_args())
