"""Measure peak memory and time of `convert_checkpoint` on synthetic checkpoints: two above 6 GB, one like BERT-base.

Each checkpoint is written to a temporary folder, converted in a separate process while its memory is sampled, and
deleted. Anonymous memory (RssAnon) must fit into RAM. The kernel can drop file-backed pages (RssFile) at any time.

Example:
    python -m benchmarks.convert.conversion_memory [--work_dir DIR] \\
        [--output_file benchmarks/convert/results/conversion_memory.json]
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from hf_attn_variants.conversion.checkpoint.tensor_files import SafetensorsWriter, TensorEntry, write_index
from hf_attn_variants.conversion.report import get_package_versions
from hf_attn_variants.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
MAX_ANONYMOUS_BYTES = 1_500_000_000
MAX_BERT_BASE_SECONDS = 5.0
LARGE_CONFIG = {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192, "num_hidden_layers": 30}

CONVERSION_PROGRAM = """
import json, os, sys, time

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

import hf_attn_variants.conversion.conversions
from hf_attn_variants.commands.convert import main, parse_args
imported = anonymous()
start = time.perf_counter()
main(parse_args(sys.argv[1:]))
print(json.dumps({"seconds": time.perf_counter() - start, "after_imports": imported}))
"""


@dataclass(frozen=True)
class Case:
    """A synthetic checkpoint and the settings of its conversion."""

    name: str
    config: dict[str, int]
    shards: int
    num_key_value_heads: int


CASES = [
    Case("large, one file", LARGE_CONFIG, 1, 8),
    Case("large, 8 shards", LARGE_CONFIG, 8, 8),
    Case("BERT-base shape", {}, 1, 4),
]


def write_checkpoint(folder: Path, case: Case) -> int:
    """Write a `BertForMaskedLM` with random weights tensor by tensor, and return its size in bytes."""
    folder.mkdir()
    config = transformers.BertConfig(**case.config, architectures=["BertForMaskedLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    total = sum(4 * parameter.numel() for parameter in model.parameters())
    entries, position = {}, 0
    for name, shape in shapes.items():
        shard = 1 + position * case.shards // total
        file = f"model-{shard:05}-of-{case.shards:05}.safetensors" if case.shards > 1 else "model.safetensors"
        entries[name] = TensorEntry(file, "F32", shape)
        position += 4 * entries[name].numel
    numbers = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        file_entries = {name: entry for name, entry in entries.items() if entry.file == file}
        with SafetensorsWriter(folder / file, file_entries) as writer:
            for name, entry in file_entries.items():
                rest = range(0, entry.numel, len(numbers))
                writer.write_chunks(name, (numbers[: min(len(numbers), entry.numel - start)] for start in rest))
    if case.shards > 1:
        write_index(folder / "model.safetensors.index.json", entries, {}, total)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class MemorySampler(threading.Thread):
    """A thread that records the largest RssAnon and RssFile of a process until the process ends."""

    def __init__(self, pid: int, interval: float = 0.005):
        super().__init__(daemon=True)
        self.status, self.interval = Path(f"/proc/{pid}/status"), interval
        self.peak = {"RssAnon": 0, "RssFile": 0}

    def run(self) -> None:
        while True:
            try:
                lines = self.status.read_text().splitlines()
            except OSError:
                return
            fields = dict(line.split(":", 1) for line in lines)
            if "RssAnon" not in fields:  # the process has ended, but its parent has not yet waited for it
                return
            for name in self.peak:
                self.peak[name] = max(self.peak[name], int(fields[name].split()[0]) * 1024)
            time.sleep(self.interval)


def run_case(case: Case, work_dir: Path) -> dict[str, object]:
    """Write one checkpoint, convert it in a separate process, and return the row with its memory and time."""
    source, output = work_dir / "source", work_dir / "output"
    try:
        size = write_checkpoint(source, case)
        arguments = ["--model_name_or_path", source, "--output_dir", output]
        arguments += ["--num_key_value_heads", case.num_key_value_heads]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", CONVERSION_PROGRAM, *map(str, arguments)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        sampler = MemorySampler(process.pid)
        sampler.start()
        printed, _ = process.communicate()
        sampler.join()
        if process.returncode:
            raise RuntimeError(f"Converting {case.name} failed with exit status {process.returncode}")
        inner = json.loads(printed.splitlines()[-1])
        return {
            "checkpoint": case.name,
            "files": case.shards,
            "source_bytes": size,
            "output_bytes": sum(path.stat().st_size for path in output.glob("*.safetensors")),
            "num_key_value_heads": case.num_key_value_heads,
            "seconds_after_imports": round(inner["seconds"], 2),
            "anonymous_bytes_after_imports": inner["after_imports"],
            "peak_anonymous_bytes": sampler.peak["RssAnon"],
            "peak_file_mapped_bytes": sampler.peak["RssFile"],
        }
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(output, ignore_errors=True)


def print_table(rows: list[dict]) -> None:
    """Print one line per checkpoint."""
    columns = ["files", "GB in", "GB out", "seconds", "peak anonymous MB", "(imports)", "file-mapped MB"]
    print("checkpoint".ljust(18) + "".join(column.rjust(len(column) + 3) for column in columns))
    for row in rows:
        values = [
            str(row["files"]),
            *(f"{row[name] / 1e9:.2f}" for name in ("source_bytes", "output_bytes")),
            f"{row['seconds_after_imports']:.1f}",
            f"{row['peak_anonymous_bytes'] / 1e6:.0f}",
            f"{row['anonymous_bytes_after_imports'] / 1e6:.0f}",
            f"{row['peak_file_mapped_bytes'] / 1e6:.0f}",
        ]
        cells = (value.rjust(len(column) + 3) for value, column in zip(values, columns, strict=True))
        print(row["checkpoint"].ljust(18) + "".join(cells))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(description="Measure the memory and time of checkpoint conversion.")
    parser.add_argument(
        "--work_dir", help="a folder with about 13 GB of free space (default: the system's temporary folder)"
    )
    parser.add_argument("--output_file", default=str(ROOT / "benchmarks/convert/results/conversion_memory.json"))
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Run every case, and return the exit status: 0 if all cases are within the limits, 1 otherwise."""
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work_dir:
        rows = [run_case(case, Path(work_dir)) for case in CASES]
    print_table(rows)
    results = {
        "what": "scripts/convert_checkpoint.py, method mean, fp32, page cache warm",
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load_average": os.getloadavg()},
        "versions": get_package_versions(),
        "limits": {"peak_anonymous_bytes": MAX_ANONYMOUS_BYTES, "bert_base_seconds": MAX_BERT_BASE_SECONDS},
        "rows": rows,
    }
    Path(args.output_file).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.output_file, json.dumps(results, indent=2) + "\n")
    within = all(row["peak_anonymous_bytes"] < MAX_ANONYMOUS_BYTES for row in rows)
    within &= rows[-1]["seconds_after_imports"] < MAX_BERT_BASE_SECONDS
    print("within the limits" if within else "OUTSIDE THE LIMITS", f"({args.output_file})")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main(parse_args()))
