"""Check the benchmark of decoding steps with cached encoder outputs: equal outputs and the operation counts."""

import pytest
from fixtures.commands import run_command

from benchmarks import speed_claims
from benchmarks.speed import exact_step


@pytest.mark.thorough
def test_step_equals_transformers_and_reports_its_matrix_products(monkeypatch, tmp_path):
    options = ["--shape", "tiny", "--batch_size", "2", "--source_length", "80", "--num_beams", "1", "3"]
    options += ["--rounds", "1", "--num_threads", "1", "--output_dir", str(tmp_path)]
    report = run_command(exact_step, *options)
    for row in report["runs"]:
        assert max(row["largest_difference"].values()) < 1e-5
        assert row["milliseconds"].keys() == {"products", "exact", "share_memory", "upstream"}
    # Three times as many queries attend to the same source.
    one, three = report["runs"]
    assert one["operations"] * 3 == three["operations"] == 2 * 2 * 6 * (4 * 64 * 64 + 2 * 4 * 80 * 64)
    claims = speed_claims.iterate_claims("exact_step_tiny", report)
    assert len(list(claims)) == 2 * 3
