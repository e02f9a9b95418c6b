"""Measure decoding of T5-base and T5-large by batch size: tokens per second, memory and the largest batch.

The contestants are Transformers, multi-head attention, two key/value heads, one key/value head, cached encoder outputs
("exact"), and latents a quarter as wide. The target for "exact" is 1.5 times the speed of Transformers, at batch 64
and a source of 2,048 tokens. `decode.py` measures the same on CPUs.
"""

import argparse
from functools import cache
from typing import Any

import torch

from benchmarks.gpu.cells import Cells, main
from benchmarks.machine import synchronize
from benchmarks.speed import decode
from hf_attn_variants.modeling.ops import latent_decoding

SOURCE = 2048
# The shape of the target comes first. None stands for the largest batch. A change of the shape rebuilds all models.
SETTINGS = [("t5-base", 64), *(("t5-large", batch) for batch in (64, 256, 1, None))]
SETTINGS += [*(("t5-base", batch) for batch in (256, 1, None, 16)), ("t5-large", 16)]
TINY_SETTINGS = [("tiny", 2), ("tiny", 1), ("tiny", None)]
GOAL, GOAL_BATCH = 1.5, 64
MAX_BATCH = 8192
NOT_COMPILED = ("MHA", "MQA")  # the least informative models, as compiling takes about 20 seconds per model
NUM_TRIES = 2  # the number of new tokens to check whether a batch fits


def make_cells(args: argparse.Namespace) -> Cells:
    """Return the cells: the speed by shape and batch, the largest batches, and compiled steps with a static cache."""
    cells: Cells = {}
    for shape, batch in TINY_SETTINGS if args.tiny else SETTINGS:
        if batch is None:
            cells[f"{shape}, largest batch"] = lambda shape=shape: find_largest_batches(shape, args)
        else:
            cells[f"{shape}, batch {batch}"] = lambda shape=shape, batch=batch: measure_speed(shape, batch, args)
    first = next(iter(cells)).split(",")[0]
    for batch in (GOAL_BATCH, 1) if args.device == "cuda" else ():
        cells[f"{first}, batch {batch}, static cache"] = lambda batch=batch: measure_with_static_cache(
            first, batch, args
        )
    return cells


@cache
def make_contestants(shape: str, device: str, *flags: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the settings of `decode.py`, and a dictionary of the models."""
    width, heads = decode.SHAPES[shape]["d_model"], decode.get_decoder_heads(decode.SHAPES[shape])
    argv = ["--shape", shape, "--device", device, "--dtype", "bfloat16" if device == "cuda" else "float32"]
    argv += ["--num_key_value_heads", str(heads), "2", "1", "--cross_kv_lora_rank", str(width), str(width // 4)]
    argv += ["--max_new_tokens", "32" if device == "cuda" else "3", "--repeats", "3" if device == "cuda" else "1"]
    # The models of other shapes would reduce the largest batch.
    make_contestants.cache_clear()
    settings = decode.parse_args([*argv, *flags])
    return settings, decode.build_models(settings)


def measure_speed(shape: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of `decode.py` for the models whose batch fits, and the memory of each model."""
    settings, models = make_contestants(shape, args.device)
    source = 8 if args.tiny else SOURCE
    peaks = {name: measure_peak_bytes(model, settings, batch, source) for name, model in models.items()}
    fitting = {name: model for name, model in models.items() if peaks[name] is not None}
    rows = decode.measure(fitting, settings, batch, source)
    result: dict[str, Any] = {"peak_bytes": peaks, "out_of_memory": sorted(set(models) - set(fitting)), "rows": rows}
    if args.device == "cuda" and batch == GOAL_BATCH:
        exact = [row["speedup"] for row in rows if row["model"] == "exact"]
        result["met"] = bool(exact) and rows[0]["model"] == decode.UPSTREAM and exact[0] >= GOAL
    return result


def measure_with_static_cache(shape: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of `decode.py` with `cache_implementation="static"`, for which `generate` compiles the step.

    The last row is that of "exact" without the kernels of this package.
    """
    settings, models = make_contestants(shape, args.device, "--cache", "static")
    chosen = {name: model for name, model in models.items() if name not in NOT_COMPILED}
    rows = []
    for served, names in ((latent_decoding.MAX_LATENT_ROWS, list(chosen)), (0, ["exact"])):
        torch._dynamo.reset()  # with graphs of other batches, torch would compile for any batch
        latent_decoding.MAX_LATENT_ROWS, saved_limit = served, latent_decoding.MAX_LATENT_ROWS
        try:
            rows += decode.measure({name: chosen[name] for name in names}, settings, batch, SOURCE)
        finally:
            latent_decoding.MAX_LATENT_ROWS = saved_limit
    rows[-1]["model"] += ", torch's kernels"
    return {"rows": rows}


@torch.no_grad()
def measure_peak_bytes(model: Any, settings: argparse.Namespace, batch: int, source: int) -> int | None:
    """Return the peak bytes of decoding a batch, including the encoder outputs, or None if they do not fit.

    On a CPU, the peak is not measured and the result is 0.
    """
    short_settings = argparse.Namespace(**vars(settings) | {"max_new_tokens": NUM_TRIES})
    on_cuda = settings.device == "cuda"
    before = torch.cuda.memory_allocated() if on_cuda else 0
    try:
        decoder_inputs = decode.make_source(model, short_settings, batch, source)
        if on_cuda:  # do not count the memory for making the inputs
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        decode.decode(model, *decoder_inputs, short_settings)
        synchronize(settings.device)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before if on_cuda else 0


def find_largest_batches(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the largest batch (a power of two) of each model that fits, and its bytes, with all models loaded."""
    settings, models = make_contestants(shape, args.device)
    source, max_batch_size = (8, 4) if args.tiny else (SOURCE, MAX_BATCH)
    results: dict[str, Any] = {}
    for name, model in models.items():
        batch, taken = 64 if not args.tiny else 1, None
        while batch <= max_batch_size and (peak := measure_peak_bytes(model, settings, batch, source)) is not None:
            taken = {"batch": batch, "peak_bytes": peak}
            batch *= 2
        results[name] = (taken or {"batch": None}) | {"next_one_fits": None if batch > max_batch_size else False}
    weights = sum(p.numel() * p.element_size() for model in models.values() for p in model.parameters())
    return {"source": source, "models": results, "weights_of_all_bytes": weights}


if __name__ == "__main__":
    main(make_cells)
