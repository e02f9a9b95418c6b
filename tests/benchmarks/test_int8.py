"""The benchmarks of int8: each contestant is timed, and the quality of a tiny translator is scored."""

import importlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_each_contestant_is_timed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("int8_speed")
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
    options += ["--num_threads", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(importlib.import_module("hf_attn_variants.quantization.kept_maps"), "LEAST_WEIGHTS", 1)
    for shape, count in (("tiny", 7), ("tiny-bert", 2)):
        report = benchmark.main(benchmark.parse_args([*options, "--shape", shape]))
        (row,) = report["runs"]
        assert len(row["milliseconds"]) == count + 1
        claims = importlib.import_module("speed_claims").claims(f"int8_speed_{shape}_cpu", report)
        assert len(list(claims)) == count
