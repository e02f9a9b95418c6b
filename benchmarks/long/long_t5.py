"""Measure the translations of a T5 whose encoder uses windows, on texts that fit into them.

The models are the unchanged T5 of shared/data/checkpoints, and two variants of it. One has windows of 128 tokens in
its encoder. Half of a window is longer than any caption. The other variant has windows and summaries of 16 tokens
(LongT5's transient-global attention), whose norm and bias are new. It is scored without training and after a short
distillation. The scores are BLEU (greedy) and loss on the Multi30k validation set. The script writes the JSON file
after each row and does not measure existing rows again.

The second part times one pass of an encoder of T5-small's shape (random weights, batch 1) by the number of tokens. It
also times T5 and LongT5 in Transformers with equal windows and blocks. Times are medians over rounds in which the
contestants take turns, in milliseconds.

Example:
    python -m benchmarks.long.long_t5 --work_dir long --steps 100
    python -m benchmarks.long.long_t5 --work_dir long --parts passes --num_threads 2 --lengths 4096 16384
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LongT5Config, LongT5EncoderModel, PreTrainedModel, T5Config, T5EncoderModel

from benchmarks.convert.conversion_subjects import Translator
from benchmarks.kept_memory import add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.run_records import check_data_dir, write_rows
from benchmarks.speed.decode import SHAPES
from benchmarks.speed.talking_heads_peers import measure_interleaved
from hf_attn_variants import AttnVariantT5Config, AttnVariantT5EncoderModel, AttnVariantT5ForConditionalGeneration
from hf_attn_variants.commands.training import uptrain as uptrain_command
from hf_attn_variants.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
KEY = ("encoder", "steps")
SUMMARIES = "transient global"
# The fields of each kind of encoder attention.
ENCODERS: dict[str, dict[str, Any]] = {
    "everything": {},
    "windows": {"encoder_attention_pattern": "sliding_window", "encoder_attention_window": 128},
    SUMMARIES: {
        "encoder_attention_pattern": "transient_global",
        "encoder_attention_window": 254,
        "encoder_attention_block_size": 16,
    },
}


# The encoders of Transformers that attend to the same tokens in a pass. They read 127 tokens on each side, like a
# window of 254 tokens.
RADIUS = 127
UPSTREAM = {"everything": "T5", "windows": "LongT5, local", SUMMARIES: "LongT5, transient global"}
OF_PASSES = ("lengths", "rounds", "num_threads")
MOST_FULL = 8_192  # tokens of full attention: the size of T5's bias and logits grows with their square


def make_model(subject: Translator, encoder: str, steps: int, work_dir: Path) -> Path:
    """Return the folder of a T5 with this encoder after a number of training steps. Reuse an existing training."""
    folder = work_dir / f"{encoder.replace(' ', '_')}-{steps}"
    if steps == 0:
        torch.manual_seed(0)
        model = AttnVariantT5ForConditionalGeneration.from_pretrained(subject.source, **ENCODERS[encoder])
        model.save_pretrained(folder)
        subject.tokenizer.save_pretrained(folder)
    elif not (folder / "all_results.json").is_file():
        start = make_model(subject, encoder, 0, work_dir)
        argv = ["--model_name_or_path", str(start), "--teacher", str(subject.source), *subject.uptraining]
        argv += [
            *subject.write_training_texts(work_dir, 0, steps),
            "--max_train_steps",
            str(steps),
            "--trainable",
            "all",
        ]
        argv += ["--per_device_train_batch_size", str(subject.batch_size), "--group_by_length"]
        argv += ["--learning_rate", "3e-4", "--eval_steps", str(steps), "--max_eval_samples", "64"]
        argv += ["--disable_tqdm", "--overwrite_output_dir", "--output_dir", str(folder)]
        uptrain_command.main(uptrain_command.parse_args(argv))
    return folder


def make_encoders() -> dict[str, PreTrainedModel]:
    """Return a dictionary of our encoders and those of Transformers, in pairs that attend to the same tokens."""
    shape, encoders = SHAPES["t5-small"], {}
    for name, fields in ENCODERS.items():
        widths = {"encoder_attention_window": 2 * RADIUS} if fields else {}
        encoders[name] = AttnVariantT5EncoderModel(AttnVariantT5Config(**shape, **fields | widths))
        if not fields:
            encoders[UPSTREAM[name]] = T5EncoderModel(T5Config(**shape))
            continue
        kind = "local" if name == "windows" else "transient-global"
        config = LongT5Config(**shape, encoder_attention_type=kind, local_radius=RADIUS, global_block_size=16)
        encoders[UPSTREAM[name]] = LongT5EncoderModel(config)
    return {name: model.eval() for name, model in encoders.items()}


def time_passes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one pass of each encoder for each length, write and print each row, and return all rows."""
    torch.manual_seed(0)
    encoders, rows = make_encoders(), []
    for length in args.lengths:
        tokens = torch.randint(2, SHAPES["t5-small"].get("vocab_size", 32_128), (1, length))
        full = ("everything", UPSTREAM["everything"])
        steps = {
            name: torch.no_grad()(lambda model=model, tokens=tokens: model(tokens))
            for name, model in encoders.items()
            if length <= MOST_FULL or name not in full
        }
        times, usage = measure_interleaved(steps, "cpu", args.rounds)
        rows.append({"tokens": length, "milliseconds": times, "usage": {"milliseconds": usage}})
        arguments = {"parts": "['passes']"} | {name: str(getattr(args, name)) for name in OF_PASSES}
        report = {
            "arguments": arguments,
            "machine": describe_machine("cpu"),
            "memory": describe_memory(),
            "rounds": args.rounds,
        }
        report |= {"runs": rows}
        atomic_write(args.output.with_name("long_t5_passes.json"), json.dumps(report, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(args: argparse.Namespace) -> None:
    """Measure the selected parts."""
    torch.set_num_threads(args.num_threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if "quality" in args.parts:
        translate(args)
    if "passes" in args.parts:
        time_passes(args)


def translate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows that are not in the output file, write and print each new row, and return all rows."""
    check_data_dir(args.data_dir, *Translator.reads)
    subject = Translator(args.data_dir)
    rows = json.loads(args.output.read_text())["runs"] if args.output.is_file() else []
    for encoder, steps in [*((name, 0) for name in ENCODERS), (SUMMARIES, args.steps)]:
        key = dict(zip(KEY, (encoder, steps), strict=True))
        if any(key.items() <= row.items() for row in rows):
            continue
        started = time.process_time()
        folder = make_model(subject, encoder, steps, args.work_dir)
        timing = {"making_seconds": round(time.process_time() - started, 1)}
        rows.append(key | subject.evaluate(folder) | timing)
        write_rows(args.output, {"machine": describe_machine("cpu")}, rows, KEY)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["quality", "passes"], default=["quality"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="lengths of the passes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the passes")
    parser.add_argument("--steps", type=int, default=100, help="distillation steps (default: %(default)s)")
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--work_dir", type=Path, required=True, help="folder of the models; existing ones are reused")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/long/results/long_t5.json")
    add_memory_argument(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    args = parse_args()
    if "quality" in args.parts:
        main(argparse.Namespace(**vars(args) | {"parts": ["quality"]}))
    if "passes" in args.parts:
        run(main, parse_args, output="--output", more=["--parts", "passes"])
