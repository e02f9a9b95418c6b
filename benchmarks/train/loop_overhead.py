"""Measure the overhead of `TrainingLoop` over a plain PyTorch loop with the same model, data and optimizer.

The first task is the classification of tokenized rows. The second task is masked-LM pretraining, whose text is
tokenized, packed and masked during training in the same process. The third task is classification with a tiny model,
which shows the time of the loop itself. Both loops run in turns of a few steps. The figures are medians over the
turns, and the losses of both loops must agree. The overhead and the time of waiting for data are CPU times of the
process, which are nearly independent of other load. The JSON file also contains the elapsed times.
"""

import argparse
import copy
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import hf_attn_variants  # noqa: F401  (registers our architectures with the Auto classes)
from benchmarks.kept_memory import add_memory_argument, run
from benchmarks.machine import describe_machine
from benchmarks.page_faults import Usage, UsageRecorder, describe_memory, summarize_usages
from hf_attn_variants.files import atomic_write
from hf_attn_variants.training.classification.task import make_classification_objective
from hf_attn_variants.training.engine.dataloaders import (
    EpochSampler,
    MaskedLMPreparer,
    create_dataloader,
    create_stream_dataloader,
)
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.optimization import Objective
from hf_attn_variants.training.engine.session import get_library_versions
from hf_attn_variants.training.engine.settings import TrainingSettings
from hf_attn_variants.training.pretraining.task import make_masked_lm_objective
from hf_attn_variants.training.pretraining.text_stream import TextStream, check_text_files, stack_examples

ROOT = Path(__file__).resolve().parents[2]
TINY = "classification, a tiny model"
TASKS = ("classification", "masked LM", TINY)
TINY_SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
EPILOG = """example with all-MiniLM-L6-v2, on text whose articles are separated by empty lines:
  OMP_NUM_THREADS=1 python -m benchmarks.train.loop_overhead --model_name_or_path MINILM \\
      --train_file wikipedia/train-*.gz"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path", required=True, help="A BERT or ALBERT checkpoint with a tokenizer.")
    parser.add_argument("--train_file", required=True, nargs="+", help="Text files, .txt or .gz.")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--length", type=int, default=32, help="Tokens per example.")
    parser.add_argument("--steps", type=int, default=30, help="Steps per turn.")
    parser.add_argument("--turns", type=int, default=10, help="Turns per loop.")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/train/results/loop_overhead.json"))
    add_memory_argument(parser)
    return parser.parse_args(argv)


class TimedBatches:
    """An iterable of batches that measures the CPU seconds for their preparation."""

    def __init__(self, batches: Iterable[dict]):
        self.batches = batches
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict]:
        iterator = iter(self.batches)
        while True:
            start = time.process_time()
            batch = next(iterator, None)
            self.seconds += time.process_time() - start
            if batch is None:
                return
            yield batch


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all tasks, write the JSON file, print the table, and return the results."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, rng_types=[])
    load = os.getloadavg()
    rows = [measure(args, accelerator, task) for task in TASKS]
    result = {
        "machine": describe_machine("cpu"),
        "memory": describe_memory(),
        "model": Path(args.model_name_or_path).name,
        "batch_size": args.batch_size,
        "length": args.length,
        "device": f"CPU, {torch.get_num_threads()} threads",
        "load_average_before": load,
        "load_average_after": os.getloadavg(),
        "turns": args.turns,
        "steps_per_turn": args.steps,
        "versions": get_library_versions(),
        "rows": rows,
    }
    atomic_write(args.output, json.dumps(result, indent=1) + "\n")
    print(format_table(rows))
    return result


def measure(args: argparse.Namespace, accelerator: Accelerator, task: str) -> dict[str, Any]:
    """Run both loops in turns.

    Returns:
        Medians over the turns: the seconds per step of both loops, the overhead in percent, and the share of the time
        that the loop waits for data in percent.
    """
    set_seed(0)
    model, objective, loader = make_task(args, accelerator, task)
    loops = {"bare": run_bare_loop, "loop": run_training_loop}
    models = {name: copy.deepcopy(model) for name in loops}
    objectives = {name: objective(models[name]) for name in loops}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), LEARNING_RATE, fused=True) for name in loops}
    # The model and the optimizer are prepared only once, because this is not part of a step.
    models["loop"], optimizers["loop"] = accelerator.prepare(models["loop"], optimizers["loop"])
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    clock: dict[str, list[float]] = {name: [] for name in loops}
    usages: dict[str, list[Usage]] = {name: [] for name in loops}
    waits: list[float] = []
    losses: dict[str, float] = {}
    for turn in range(args.turns + 1):  # the first one warms up
        for name in list(loops)[:: 1 if turn % 2 else -1]:
            batches = TimedBatches(loader)
            torch.manual_seed(turn)  # for dropout
            start = time.process_time()
            with UsageRecorder() as watch:
                losses[name] = loops[name](
                    accelerator, models[name], optimizers[name], batches, objectives[name], args.steps
                )
            used = time.process_time() - start
            if turn:
                cpu[name].append(used / args.steps)
                clock[name].append(watch.usage.seconds / args.steps)
                usages[name].append(watch.usage)
            if turn and name == "loop":
                waits.append(100 * batches.seconds / used)
        if not math.isclose(losses["bare"], losses["loop"], rel_tol=1e-4):
            raise ValueError(f"{task}, turn {turn}: The losses of the loops must agree, got {losses}")
    bare, loop = statistics.median(cpu["bare"]), statistics.median(cpu["loop"])
    return {
        "task": task,
        "bare_cpu_seconds_per_step": bare,
        "loop_cpu_seconds_per_step": loop,
        "overhead_percent": 100 * (loop / bare - 1),
        "overhead_percent_of_turns": [
            round(100 * (a / b - 1), 2) for a, b in zip(cpu["loop"], cpu["bare"], strict=True)
        ],
        "waiting_for_data_percent": statistics.median(waits),
        "bare_seconds_per_step": statistics.median(clock["bare"]),
        "loop_seconds_per_step": statistics.median(clock["loop"]),
        "last_loss": losses["loop"],
        "usage": {name: summarize_usages(loop_usages) for name, loop_usages in usages.items()},
    }


def make_task(args: argparse.Namespace, accelerator: Accelerator, task: str) -> tuple[nn.Module, Any, Iterable[dict]]:
    """Return the model, a function from a model to its objective, and the batches."""
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    if task != "masked LM":
        if task == TINY:
            config.update(TINY_SHAPE)
            model = AutoModelForSequenceClassification.from_config(config)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, config=config)
        count = args.batch_size * (args.steps + 1)
        ids = torch.randint(config.vocab_size // 2, config.vocab_size, (count, args.length))
        data = [
            {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": torch.tensor(i % 2)}
            for i, row in enumerate(ids)
        ]
        options = {"batch_size": args.batch_size, "sampler": EpochSampler(count, 0), "collate_fn": _stack}
        loader = create_dataloader(data, **options)
        return model, lambda _: make_classification_objective(), accelerator.prepare(loader)
    # The masked-LM head can be random, because its weights do not affect the time.
    model = AutoModelForMaskedLM.from_pretrained(args.model_name_or_path, config=config)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    prepare = MaskedLMPreparer(tokenizer, args.length, 0.15, seed=0)
    files = check_text_files(args.train_file)
    # Each turn restarts the stream and fills its shuffling window. With a window of one turn's blocks, a turn only
    # prepares the blocks that it uses.
    window = args.batch_size * (args.steps + 1)
    stream = TextStream(files, tokenizer, prepare, args.batch_size, 0, window)
    return (
        model,
        lambda copied: make_masked_lm_objective(copied),
        create_stream_dataloader(accelerator, stream, seed=0),
    )


def _stack(rows: list[dict]) -> dict:
    return stack_examples([{key: value.numpy() for key, value in row.items()} for row in rows])


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def run_bare_loop(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: TimedBatches,
    objective: Objective,
    steps: int,
) -> float:
    """Train like a script without this package, and return the mean loss."""
    model.train()
    scheduler, losses = _schedule(optimizer), []
    for _, batch in zip(range(steps), batches, strict=False):
        loss = objective.loss_sum(model, batch) / objective.count(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.fmean(losses)


def run_training_loop(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: TimedBatches,
    objective: Objective,
    steps: int,
) -> float:
    """Train with `TrainingLoop`, which also counts, logs, and checks for NaN and SIGTERM, and return the mean loss."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_grad_norm": MAX_GRAD_NORM, "disable_tqdm": True}
        settings = TrainingSettings(model_name_or_path="", output_dir=folder, **options)
        prepared = accelerator, model, optimizer, _schedule(optimizer), batches
        state = TrainingLoop(*prepared, objective, settings, steps).run()
    return state.loss_total / state.step


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| task | bare loop | TrainingLoop | overhead | waiting for data |", "| --- " * 5 + "|"]
    for row in rows:
        seconds = [row[f"{name}_cpu_seconds_per_step"] for name in ("bare", "loop")]
        times = [f"{1000 * value:.1f} ms" for value in seconds]
        extra = 1000 * (seconds[1] - seconds[0])
        shares = [f"{extra:+.1f} ms, {row['overhead_percent']:+.1f} %", f"{row['waiting_for_data_percent']:.1f} %"]
        lines.append(f"| {' | '.join([row['task'], *times, *shares])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main, parse_args, output="--output")
