"""Check the benchmark of serving engines: the report of each shape contains the ratios of the engines."""

import pytest
from fixtures.commands import run_command

from benchmarks import speed_claims
from benchmarks.speed import serving


@pytest.mark.usefixtures("small_maps")
@pytest.mark.parametrize("shape", ["tiny", "tiny-bert", "tiny-whisper"])
def test_serving_report_has_a_ratio_per_engine(shape, tmp_path):
    options = ["--batch_size", 2, "--source_length", 8, "--num_beams", 2, "--max_new_tokens", 2, "--rounds", 1]
    options += ["--num_threads", 1, "--no_peak_memory", "--output_dir", tmp_path, "--shape", shape]
    report = run_command(serving, *options)
    (row,) = report["runs"]
    assert next(iter(row["milliseconds"])) == "transformers" and row["advice"].startswith("Recommended for batch 2")
    claims = speed_claims.iterate_claims(f"serving_{shape}_cpu", report)
    assert len(list(claims)) == len(row["milliseconds"]) - 1 >= 3
