"""Check the benchmark of shared memory: equal tokens, and a source that is stored once."""

from fixtures.commands import run_command

from benchmarks import speed_claims
from benchmarks.speed import share_memory


def test_shared_memory_stores_a_source_once(monkeypatch, tmp_path):
    options = ["--shape", "tiny", "--batch_size", "2", "--source_length", "16", "--num_beams", "1", "3"]
    options += ["--max_new_tokens", "4", "--rounds", "1", "--num_threads", "1", "--output_dir", str(tmp_path)]
    report = run_command(share_memory, *options)
    # The bytes for two sentences: keys and values in two layers, and encoder outputs once.
    keys, outputs = 2 * 16 * 2 * 2 * 64 * 4, 2 * 16 * 64 * 4
    for row, beams in zip(report["runs"], (1, 3), strict=True):
        assert all(row["same_tokens"].values()) and row["milliseconds"].keys() == row["cross_cache_bytes"].keys()
        cache_bytes = row["cross_cache_bytes"]
        assert cache_bytes["upstream"] == keys * beams and cache_bytes["keys_and_values"] == keys
        assert cache_bytes["encoder_outputs"] == outputs
    claims = speed_claims.iterate_claims("share_memory_tiny", report)
    assert len(list(claims)) == 2 * 2
