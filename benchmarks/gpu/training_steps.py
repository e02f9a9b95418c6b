"""Measure training steps in bfloat16 and float16: tokens per second, and model FLOPs utilization (MFU).

MFU is relative to the measured speed of a large matrix product. BERT-base trains on masked tokens and T5-base on
targets, with the attention of Transformers and ours in turn.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from benchmarks.gpu.cells import Cells, main
from benchmarks.speed.decode import SHAPES
from benchmarks.speed.talking_heads_peers import measure_interleaved
from hf_attn_variants.training.engine.loop import TrainingCostCounter

BERT = {"vocab_size": 30522, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
TINY_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "upstream": None,
    "MHA": {},
    "GQA-4": {"num_key_value_heads": 4},
    "MQA": {"num_key_value_heads": 1},
    "talking heads": {"talking_heads": "both"},
}


def make_cells(args: argparse.Namespace) -> Cells:
    """Return one cell per model and number format."""
    cells: Cells = {}
    for dtype in ("bfloat16", "float16") if args.device == "cuda" else ("bfloat16",):
        for kind in ("bert", "t5"):
            cells[f"{kind}, {dtype}"] = lambda kind=kind, dtype=dtype: measure_speed(kind, dtype, args)
    return cells


def make_model(kind: str, fields: dict[str, Any] | None, args: argparse.Namespace) -> torch.nn.Module:
    """Return a model with random weights in training mode."""
    shape = BERT | (TINY_BERT if args.tiny else {}) if kind == "bert" else SHAPES["tiny" if args.tiny else "t5-base"]
    shape = shape | ({"dropout_rate": 0.0, "decoder_start_token_id": 0} if kind == "t5" else {})
    model_type = kind if fields is None else f"attn_variant_{kind}"
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForSeq2SeqLM
    config = AutoConfig.for_model(model_type, **shape, **(fields or {}), attn_implementation="sdpa")
    with torch.device(args.device):
        return auto.from_config(config).train()


def make_batch(kind: str, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return random tokens without padding. For BERT, 15 % of the tokens have labels."""
    b, n, t = (2, 16, 8) if args.tiny else (32, 512, 128)
    ids = torch.randint(5, 400, (b, n), device=args.device)
    if kind == "t5":
        return {"input_ids": ids, "labels": ids[:, :t].clone()}
    return {"input_ids": ids, "labels": ids.where(torch.rand(b, n, device=args.device) < 0.15, -100)}


def make_training_step(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that runs one step: forward, backward and AdamW, with a loss scaler for float16."""
    device = batch["input_ids"].device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def measure_matmul_flops_per_second(device: str, dtype: torch.dtype) -> float:
    """Return the best speed of a large matrix product, which is more realistic than that of a data sheet."""
    size = 8192 if device == "cuda" else 1024  # enough work for the whole device
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        (left @ right)[0, 0].item()  # reading a number waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def measure_speed(kind: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds per step, tokens per second and MFU of each contestant."""
    batch, number_format = make_batch(kind, args), getattr(torch, dtype)
    models = {name: make_model(kind, fields, args) for name, fields in CONTESTANTS.items()}
    steps = {name: make_training_step(model, batch, number_format) for name, model in models.items()}
    times, _ = measure_interleaved(steps, args.device, rounds=1 if args.tiny else 3)
    peak = measure_matmul_flops_per_second(args.device, number_format)
    rows = {}
    for name, model in models.items():
        tokens, flops = TrainingCostCounter(model).count(batch, 0)
        if (milliseconds := times[name]) is None:
            rows[name] = {"out_of_memory": True}
            continue
        rate = flops / milliseconds * 1e3
        rows[name] = {"milliseconds": milliseconds, "tokens_per_second": tokens / milliseconds * 1e3}
        rows[name] |= {"tflops_per_second": rate / 1e12, "mfu": rate / peak}
    return {
        "peak_tflops": peak / 1e12,
        "shapes": {key: list(value.shape) for key, value in batch.items()},
        "rows": rows,
    }


if __name__ == "__main__":
    main(make_cells)
