"""Check the decoding benchmark at tiny sizes: a row per model, and models of equal size."""

import json
import sys

import pytest

from benchmarks.speed import decode
from hf_attn_variants import AttnVariantT5Config, AttnVariantT5ForConditionalGeneration


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [[], ["--equal_parameters"]])
def test_every_model_has_a_row_with_its_cache_size(tmp_path, monkeypatch, flags):
    argv = ["--shape", "tiny", "--batch_size", "2", "--source_length", "8", "--max_new_tokens", "3", "--repeats", "1"]
    argv += ["--skip_encoder", "--output_dir", str(tmp_path), "--run_name", "run", *flags]
    monkeypatch.setattr(sys, "argv", ["decode.py", *argv])
    decode.main(decode.parse_args())
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    names, ratios = ["upstream MHA", "MHA", "GQA-2", "MQA"], [1, 1, 0.5, 0.25]
    if not flags:
        # A token has 2 x 4 x 16 numbers in each of 2 layers. The self-attention cache has 3 tokens: the start and all
        # generated tokens except the last. For each of 8 source tokens, a latent stores r numbers for all layers, and
        # also keys and values if r is at least 2 x 8.
        names += ["exact", "cross r=32", "cross r=16", "cross r=8"]
        token = 2 * 2 * 4 * 16
        cache_bytes = [3 * token + 8 * rank + (8 * token if rank >= 16 else 0) for rank in (64, 32, 16, 8)]
        ratios += [numbers / (11 * token) for numbers in cache_bytes]
    assert [row["model"] for row in rows] == names
    assert [row["cache_bytes_ratio"] for row in rows] == pytest.approx(ratios)
    assert (tmp_path / "run.png").stat().st_size > 1000


@pytest.mark.parametrize("shape", ["tiny", "t5-multi30k"])
def test_wider_feed_forward_layers_equalize_parameter_counts(shape):
    fields = decode.SHAPES[shape]

    def parameters(kv_heads):
        wider = {"d_ff": decode.compute_equal_feed_forward_size(fields, kv_heads)}
        config = AttnVariantT5Config(**fields | wider, num_key_value_heads=kv_heads)
        return sum(parameter.numel() for parameter in AttnVariantT5ForConditionalGeneration(config).parameters())

    assert parameters(1) == pytest.approx(parameters(fields["num_heads"]), rel=1e-3)
