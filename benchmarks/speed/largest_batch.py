"""Find the largest batch of texts that each engine can serve within a given amount of memory.

Each trial runs in a process with only the engine and its libraries, with the default allocator setting. The batch
grows until the peak memory exceeds the limit. Then the interval is narrowed to a thirtieth of the batch, because peaks
of equal batches differ by about as much. The weights are random, because memory does not depend on them.

Example:
    python -m benchmarks.speed.largest_batch --shape t5-small --source_length 1024 --num_beams 4 --memory_gib 4
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from benchmarks.machine import describe_machine
from benchmarks.speed.decode import SHAPES
from benchmarks.speed.serving import make_config
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection.costs import get_variant_name, make_variant_config
from hf_attn_variants.serving.engines import (
    CTRANSLATE2,
    Engine,
    Workload,
    build_model,
    get_ctranslate2_unsupported_reason,
    make_workload_inputs,
)
from hf_attn_variants.serving.peak_memory import ExportedModel, measure_peak_bytes, write_ctranslate2_folder

# The search stops when the largest batch is known to 1/CLOSE of its size.
CLOSE = 30
LATENTS = {"cross_kv_lora_rank": 128, "kv_lora_rank": 32}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--source_length", type=int, default=1024, help="tokens per text")
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--memory_gib", type=float, default=4.0, help="memory limit of the whole process")
    parser.add_argument("--latents", type=json.loads, default=LATENTS, help="fields of the converted model, as JSON")
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def find_largest_batch(peak: Callable[[int], int], memory: int) -> tuple[int, dict[int, int]]:
    """Return the largest batch whose peak is within the memory (0 if one text is too many), and all measured peaks.

    Args:
        peak: a function that returns the peak bytes of a batch size, which must grow with the batch size.
        memory: the memory limit in bytes.
    """
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        peaks[batch] = peak(batch)
        return peaks[batch] <= memory

    fitting, too_many, tried = 0, None, 1
    while too_many is None or too_many - fitting > max(1, fitting // CLOSE):
        fitting, too_many = (tried, too_many) if fits(tried) else (fitting, tried)
        tried = choose_next_batch(peaks, memory, fitting, too_many)
    return fitting, peaks


def choose_next_batch(peaks: Mapping[int, int], memory: int, fitting: int, too_many: int | None) -> int:
    """Return the batch size to try next.

    The peak grows almost linearly with the batch size. The next batch size is where the line through the two peaks
    nearest to the memory limit reaches this limit, so that a few trials are enough.
    """
    max_batch_size = max(1, 4 * fitting) if too_many is None else too_many - 1
    nearest = sorted(peaks, key=lambda batch: abs(peaks[batch] - memory))[:2]
    if len(nearest) < 2 or peaks[nearest[0]] == peaks[nearest[1]]:
        return max_batch_size
    slope = (peaks[nearest[1]] - peaks[nearest[0]]) / (nearest[1] - nearest[0])
    met = int(nearest[0] + (memory - peaks[nearest[0]]) / slope)
    # If the line points to a batch that is known to fit, try the smallest batch that can end the search.
    return min(max_batch_size, max(fitting + max(1, fitting // CLOSE), met))


def list_contestants(config: Mapping[str, Any], latents: Mapping[str, int]) -> list[tuple[Mapping[str, Any], Engine]]:
    """Return the engines, each with the configuration of its model."""
    converted = make_variant_config(config, **latents)
    engines = [
        (config, Engine("transformers")),
        (config, Engine("share_memory", shared=True)),
        (converted.to_dict(), Engine(get_variant_name(converted))),
    ]
    if get_ctranslate2_unsupported_reason(config) is None:
        engines.append((config, Engine(CTRANSLATE2, ctranslate2=True)))
    return engines


def export(config: Mapping[str, Any], engine: Engine, folder: Path) -> ExportedModel | None:
    """Export the model for CTranslate2 to an empty folder; return None for a torch engine."""
    if not engine.ctranslate2:
        return None
    inputs = make_workload_inputs(config, Workload(1, 1, 1, 1))  # each trial replaces them
    return write_ctranslate2_folder(config, build_model(config, engine), inputs, folder, engine.int8)


def measure_peak(
    args: argparse.Namespace, config: Mapping[str, Any], engine: Engine, exported: ExportedModel | None, batch: int
) -> int:
    """Return the peak memory of a batch in bytes."""
    load = Workload(batch, args.source_length, args.max_new_tokens, args.num_beams)
    if exported is not None:
        exported = replace(exported, inputs=make_workload_inputs(config, load)["input_ids"].tolist())
    peak = measure_peak_bytes(config, engine, load, args.num_threads, exported)
    if peak is None:
        raise SystemExit("This system does not report the peak memory of a process (/proc/self/clear_refs).")
    print(f"{engine.name}: {batch} texts take {peak / 2**20:,.0f} MiB", flush=True)
    return peak


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each engine, write the JSON and print the largest batch after it, and return the report."""
    transformers.logging.set_verbosity_error()
    config = make_config(args.shape)
    arguments = {name: value for name, value in vars(args).items() if name != "output_dir"}
    report: dict[str, Any] = {"arguments": arguments, "machine": describe_machine("cpu"), "rows": {}}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for engine_config, engine in list_contestants(config, args.latents):
        with tempfile.TemporaryDirectory() as folder:
            exported = export(engine_config, engine, Path(folder))
            max_batch_size, peaks = find_largest_batch(
                partial(measure_peak, args, engine_config, engine, exported), int(args.memory_gib * 2**30)
            )
        report["rows"][engine.name] = {"largest_batch": max_batch_size, "peak_bytes": dict(sorted(peaks.items()))}
        atomic_write(args.output_dir / f"largest_batch_{args.shape}.json", json.dumps(report, indent=1) + "\n")
        print(f"{engine.name}: {max_batch_size} texts in {args.memory_gib:g} GiB", flush=True)
    return report


if __name__ == "__main__":
    main(parse_args())
