"""Check the benchmark of serving engines: the report of each shape contains the ratios of the engines."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shape", ["tiny", "tiny-bert", "tiny-whisper"])
def test_serving_report_has_a_ratio_per_engine(shape, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    benchmark = importlib.import_module("benchmarks.speed.serving")
    for name in ("packed_linear", "quantize"):
        monkeypatch.setattr(importlib.import_module(f"hf_attn_variants.quantization.{name}"), "MIN_WEIGHTS", 1)
    options = [
        "--batch_size",
        "2",
        "--source_length",
        "8",
        "--num_beams",
        "2",
        "--max_new_tokens",
        "2",
        "--rounds",
        "1",
    ]
    options += ["--num_threads", "1", "--no_peak_memory", "--output_dir", str(tmp_path), "--shape", shape]
    report = benchmark.main(benchmark.parse_args(options))
    (row,) = report["runs"]
    assert next(iter(row["milliseconds"])) == "transformers" and row["advice"].startswith("Recommended for batch 2")
    claims = importlib.import_module("benchmarks.speed_claims").iterate_claims(f"serving_{shape}_cpu", report)
    assert len(list(claims)) == len(row["milliseconds"]) - 1 >= 3
