"""What numbers below float32's normal range cost on this machine's CPU, which training and calibration here avoid.

Training steps (question answering, AdamW) and forward passes of one model on real pairs of texts, each with denormals
as they are and with `hf_attn_variants.denormals.flushed_denormals`, by turns; CPU time of the process, medians over
the turns. The models of the two are trained apart, from the same weights and on the same batches.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedModel

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)
from hf_attn_variants.denormals import flushed_denormals
from hf_attn_variants.training.checkpoints import atomic_write
from hf_attn_variants.training.squad_data import read_squad
from hf_attn_variants.training.tracking import library_versions

ROOT = Path(__file__).resolve().parents[1]
EPILOG = """example (all-MiniLM-L6-v2):
  python benchmarks/denormals.py --model_name_or_path MINILM \\
      --train_file squad/train-v1.1.subset.json"""
EVERY = 50  # question: whole passages, and so lengths, stand together in the file
WAYS: dict[str, Any] = {"as they are": nullcontext, "flushed": flushed_denormals}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path", required=True, help="A BERT with its tokenizer.")
    parser.add_argument("--train_file", type=Path, required=True, help="Questions in SQuAD's format.")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_length", type=int, default=256, help="Tokens of a pair at most.")
    parser.add_argument("--steps", type=int, default=2, help="Steps of a turn.")
    parser.add_argument("--turns", type=int, default=5, help="Turns of each way; one before them is not counted.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/denormals.json")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Measure, write the JSON and print a table."""
    torch.set_num_threads(1)  # the setting is a thread's own
    torch.manual_seed(0)
    start = AutoModelForQuestionAnswering.from_pretrained(args.model_name_or_path)
    batches = _batches(args)
    models = {way: copy.deepcopy(start) for way in WAYS}
    optimizers = {way: torch.optim.AdamW(model.parameters(), lr=1e-4) for way, model in models.items()}
    seconds: dict[str, dict[str, list[float]]] = {"training step": {}, "forward pass": {}}
    for turn in range(args.turns + 1):
        chosen = batches[turn * args.steps : (turn + 1) * args.steps]
        for way, context in WAYS.items():
            spent = {
                "training step": _timed(context(), partial(_train, models[way], optimizers[way], chosen)),
                "forward pass": _timed(context(), partial(_evaluate, models[way], chosen)),
            }
            for what, value in spent.items():
                seconds[what].setdefault(way, []).extend([value / len(chosen)] if turn else [])
    rows = []
    for what, ways in seconds.items():
        medians = {way: round(statistics.median(values), 4) for way, values in ways.items()}
        rows.append({"what": what, "seconds": medians, "ratio": round(medians["as they are"] / medians["flushed"], 3)})
        print(f"{what}: {medians['as they are']:.2f} s as they are, {medians['flushed']:.2f} s flushed")
    found = {
        "arguments": {**vars(args), "model_name_or_path": Path(args.model_name_or_path).name},
        "processor": _processor(),
        "threads": 1,
        "versions": library_versions(),
        "runs": rows,
    }
    found["arguments"] |= {"train_file": args.train_file.name, "output": None}
    atomic_write(args.output, json.dumps(found, indent=1) + "\n")


def _timed(context: AbstractContextManager, work: Callable[[], None]) -> float:
    with context:
        started = time.process_time()
        work()
        return time.process_time() - started


def _batches(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    questions = read_squad(args.train_file, has_answers=True)[::EVERY]
    needed = args.steps * (args.turns + 1) * args.batch_size
    if len(questions) < needed:
        raise SystemExit(f"{args.train_file} has {len(questions)} x {EVERY} questions; {needed} x {EVERY} are needed")
    batches = []
    for index in range(args.steps * (args.turns + 1)):
        rows = questions[index * args.batch_size :][: args.batch_size]
        pairs = [row.question for row in rows], [row.context for row in rows]
        batches.append(
            dict(tokenizer(*pairs, padding=True, truncation=True, max_length=args.max_length, return_tensors="pt"))
        )
    return batches


def _train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]) -> None:
    model.train()
    for batch in batches:
        place = torch.ones(len(batch["input_ids"]), dtype=torch.long)  # what is learned does not matter here
        model(**batch, start_positions=place, end_positions=place).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def _evaluate(model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> None:
    model.eval()
    for batch in batches:
        model(**batch)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main(parse_args())
