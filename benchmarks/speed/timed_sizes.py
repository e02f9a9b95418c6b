"""Shared parts of the generation benchmarks: a random encoder-decoder, and a report with a row per size."""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from benchmarks.kept_memory import NOT_SHOWN, add_memory_argument
from benchmarks.machine import describe_machine
from benchmarks.page_faults import describe_memory
from benchmarks.speed.decode import MARIANS, SHAPES
from hf_attn_variants.files import atomic_write

Row = dict[str, Any]


def make_random_model(shape: str) -> Any:
    """Return a Transformers model of a shape with random weights, for which the end token is disabled."""
    kind, fields = "marian" if shape in MARIANS else "t5", SHAPES[shape] | {"decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **fields)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


def parse_sizes(parser: argparse.ArgumentParser, arguments: list[str] | None, **defaults: Any) -> argparse.Namespace:
    """Add the arguments that `measure_sizes` needs to a benchmark's parser, and parse the command line.

    Args:
        parser: the parser, which already has the benchmark's other arguments.
        arguments: the arguments to parse, or None for the command line.
        defaults: other default values of the arguments that are added here.
    """
    parser.add_argument("--source_length", type=int, nargs="+", default=[64, 512], help="tokens per text")
    parser.add_argument("--num_beams", type=int, nargs="+", default=[1, 4], help="only for encoder-decoders")
    parser.add_argument("--max_new_tokens", type=int, default=32, help="only for encoder-decoders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    add_memory_argument(parser)
    parser.add_argument("--run_name", help="name of the JSON file; default: based on the shape")
    parser.set_defaults(**defaults)
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


def measure_sizes(
    args: argparse.Namespace, name: str, measure: Callable[[int, int, int], Row], format_row: Callable[[Row], str]
) -> Row:
    """Measure each size, write the JSON and print the figures after it, and return the report.

    Args:
        args: the arguments, with `batch_size`, `source_length`, `num_beams`, `num_threads`, `output_dir` and
            `run_name`.
        name: the name of the JSON file if `run_name` is not set.
        measure: a function from the batch size, the source length and the number of beams to the row of this size.
        format_row: a function that returns the text to print for a row.
    """
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.num_threads)
    arguments = {name: str(value) for name, value in vars(args).items() if name not in NOT_SHOWN}
    report: Row = {"arguments": arguments, "machine": describe_machine("cpu"), "memory": describe_memory(), "runs": []}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / f"{args.run_name or name}.json"
    for size in itertools.product(args.batch_size, args.source_length, args.num_beams):
        report["runs"].append(measure(*size))
        atomic_write(path, json.dumps(report, indent=1) + "\n")
        row = report["runs"][-1]
        label = f"batch {row['batch_size']}, source {row['source_length']}, beams {row['num_beams']}"
        print(f"{label}: {format_row(row)}", flush=True)
    return report
