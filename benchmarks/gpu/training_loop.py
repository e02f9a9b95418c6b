"""Check that the training loop learns in mixed precision, and that killed runs resume like uninterrupted ones.

The texts count upwards, so that a masked token follows from its neighbors. Each run is a separate process. SIGKILL
comes inside a step, or when a checkpoint is about to be renamed. On a CPU, the resumed run must have the same bits. On
a GPU, the order of sums may differ.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from fixtures.processes import Signal
from torch.utils.data import DataLoader

from benchmarks.gpu.cells import Cells, main
from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertForMaskedLM
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.optimization import compute_logits, make_cross_entropy_objective
from hf_attn_variants.training.engine.settings import TrainingSettings

SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
WORDS, LENGTH, MASK = 64, 32, 1
# The loss of the last steps must be below this share of the loss of the first steps.
LEARNED = 0.7
# Whether the signal comes during a checkpoint, and after which share of the steps. A run has four checkpoints.
KILLS = {"in a step": (False, 0.65), "in a checkpoint": (True, 0.5)}
CLOSE = 2e-2


def make_cells(args: argparse.Namespace) -> Cells:
    """Return one cell per precision that checks learning, then the cells of the killed runs."""
    precisions = ("bf16", "fp16", "no") if args.device == "cuda" else ("no",)
    cells: Cells = {
        f"learns, {precision}": lambda precision=precision: measure_learning(precision, args)
        for precision in precisions
    }
    for precision in precisions[: 2 if args.device == "cuda" else 1]:
        for name in KILLS:
            cells[f"killed {name}, {precision}"] = lambda precision=precision, name=name: measure_killed_run(
                precision, name, args
            )
    return cells


def make_examples(count: int) -> list[dict[str, torch.Tensor]]:
    """Return texts that count upwards, with a sixth of their tokens masked."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(count):
        first = torch.randint(WORDS, (1,), generator=generator)
        ids = 2 + (first + torch.arange(LENGTH)) % WORDS
        hidden = torch.rand(LENGTH, generator=generator) < 1 / 6
        examples.append({"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)})
    return examples


def train(folder: str, device: str, precision: str, tiny: bool, resume: bool, kill: str | None) -> None:
    """Train in this process. `kill` is a key of `KILLS`, or None."""
    steps = 12 if tiny else 200
    if kill is not None:
        in_checkpoint, share = KILLS[kill]
        Signal(signal.SIGKILL, round(share * steps), in_checkpoint=in_checkpoint).prepare()
    torch.manual_seed(0)
    fields = TINY if tiny else SIZES
    model = AttnVariantBertForMaskedLM(AttnVariantBertConfig(vocab_size=WORDS + 2, num_key_value_heads=2, **fields))
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision=precision, step_scheduler_with_optimizer=False, rng_types=[]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if tiny else 5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    # Without its own generator, the data loader would change the random numbers of dropout.
    loader = DataLoader(make_examples(8 if tiny else 1024), batch_size=4 if tiny else 32, generator=torch.Generator())
    prepared = accelerator.prepare(model, optimizer, schedule, loader)
    settings = TrainingSettings(
        model_name_or_path="",
        output_dir=folder,
        logging_steps=1,
        checkpointing_steps=steps // 4,
        resume_from_checkpoint="latest" if resume else None,
        disable_tqdm=True,
    )
    Path(folder).mkdir(exist_ok=True)
    loop = TrainingLoop(accelerator, *prepared, make_cross_entropy_objective(compute_logits), settings, steps)
    loop.run()
    (Path(folder) / "results.json").write_text(json.dumps(loop.get_results(len(loader.dataset))))


def run(folder: Path, precision: str, args: argparse.Namespace, resume: bool = False, kill: str | None = None) -> int:
    """Train in a separate process, and return its exit status.

    Raises:
        RuntimeError: if the exit status is not 0, or not that of SIGKILL if `kill` is given.
    """
    call = f"train({str(folder)!r}, {args.device!r}, {precision!r}, {args.tiny}, {resume}, {kill!r})"
    command = [sys.executable, "-c", f"from training_loop import train; {call}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != (-signal.SIGKILL if kill else 0):
        raise RuntimeError(f"The run ended with status {done.returncode}: {done.stderr[-1500:]}")
    return done.returncode


def read_losses(folder: Path) -> list[float]:
    """Return the loss of each step."""
    records = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def measure_learning(precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the mean losses of the first and the last steps of a run, and its results."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "run", precision, args)
        run_losses = read_losses(Path(folder) / "run")
        results = json.loads((Path(folder) / "run/results.json").read_text())
    part = max(1, len(run_losses) // 10)
    first, last = sum(run_losses[:part]) / part, sum(run_losses[-part:]) / part
    return {"first_loss": first, "last_loss": last, "results": results, "met": args.tiny or last < LEARNED * first}


def measure_killed_run(precision: str, kill: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the largest difference between the losses of a resumed and an uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, cut = Path(folder) / "whole", Path(folder) / "cut"
        run(uninterrupted, precision, args)
        run(cut, precision, args, kill=kill)
        left = sorted(path.name for path in cut.iterdir())
        run(cut, precision, args, resume=True)
        expected, actual = read_losses(uninterrupted), read_losses(cut)
    gap = max((abs(a - b) / max(abs(b), 1e-3) for a, b in zip(actual, expected, strict=False)), default=float("inf"))
    met = len(actual) == len(expected) and (gap == 0 if args.device == "cpu" else gap <= CLOSE)
    return {
        "steps": len(actual),
        "largest_relative_gap": gap,
        "same_bits": actual == expected,
        "left": left,
        "met": met,
    }


if __name__ == "__main__":
    main(make_cells)
