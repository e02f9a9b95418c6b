"""Time a training step and a decoding step of each row of the comparison, and measure the peak memory of training.

Other programs may run at the same time as the trainings of the comparison, which makes their times unreliable. Run
this command while the machine is idle. It takes about five minutes and writes `results/timing.json`. The models have
random weights, and each row runs in its own process, so that rows do not share memory.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.comparison.report import RESULTS
from benchmarks.comparison.rows import MODELS, BaseModel, Row, build_config, list_head_rows, list_mechanism_rows
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from hf_attn_variants import load_plugin
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection.costs import compute_kv_cache_bytes
from hf_attn_variants.inspection.speed import make_timed_function, prepare_for_timing, time_run
from hf_attn_variants.registration import register

# The sizes of a batch: texts and tokens. T5 reads and generates as many tokens.
BATCH, LENGTH = 16, 64
VOCABULARY = 256
TRAINING_STEPS, DECODINGS = 9, 3
STATUS_FILE, CLEAR_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    """Time all rows and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads per row (default: 1)")
    parser.add_argument("--plugin", help="Python file that registers further mechanisms")
    parser.add_argument("--rows", nargs="+", help="only rows whose names contain one of these texts")
    parser.add_argument("--output", type=Path, default=RESULTS / "timing.json")
    args = parser.parse_args()
    report = {
        "machine": describe_machine("cpu"),
        "memory": describe_memory(),
        "threads": args.threads,
        "batch": BATCH,
        "length": LENGTH,
        "rows": {},
    }
    if args.plugin:
        load_plugin(args.plugin)
    # The parent process starts no threads, so that its children can use their own.
    context = multiprocessing.get_context("fork")
    for name, base in MODELS.items():
        rows = [row for row in (*list_head_rows(), *list_mechanism_rows(base)) if row.unsupported is None]
        for row in rows:
            if args.rows is None or any(text in row.name for text in args.rows):
                with context.Pool(1) as pool:
                    found = pool.apply(measure, (base, row, args.threads))
                report["rows"].setdefault(name, {})[row.name] = found
                print(name, row.name, found, flush=True)
                atomic_write(args.output, json.dumps(report, indent=1) + "\n")


def measure(base: BaseModel, row: Row, threads: int) -> dict[str, Any]:
    """Return the milliseconds of a training step and of a decoding step, the peak memory and the cache size."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = getattr(transformers, base.auto_class).from_config(build_config(base, row, vocab_size=VOCABULARY))
    if model.config.is_encoder_decoder:  # a tokenizer would set the start token
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters())
    CLEAR_FILE.write_text("5")  # reset the peak
    before = _read_memory("VmRSS")
    times = [_train(model, ids, optimizer) for _ in range(TRAINING_STEPS)]
    result = {
        "training_ms": 1e3 * statistics.median(times[2:]),
        "training_mib": (_read_memory("VmHWM") - before) / 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if model.config.is_encoder_decoder:
        model = prepare_for_timing(model.eval(), "cpu")
        run = make_timed_function(model, BATCH, LENGTH, (LENGTH, 1))
        decodings = [time_run(run, "cpu") for _ in range(DECODINGS)]
        steps = [(end - first) / (LENGTH - 1) for first, end in decodings if first is not None]
        result |= {
            "decoding_ms": 1e3 * statistics.median(steps),
            "cache_bytes": compute_kv_cache_bytes(model, 4, LENGTH, LENGTH),
        }
    return result


def _train(model: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def _read_memory(name: str) -> int:
    """Return a value of the status of this process in KiB."""
    lines = STATUS_FILE.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    register()
    main()
