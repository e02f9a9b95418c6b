"""Check the ONNX benchmark: T5's decoding step in ONNX Runtime generates the tokens of the model."""

import json

import numpy as np
import pytest
import torch
from fixtures.caches import get_cache

from benchmarks.speed import onnx_latency


# This test is slow because tests/export/test_onnx.py decodes with such a step by default.
@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 8, 1])
@torch.no_grad()
def test_exported_step_generates_the_tokens_of_the_model(kv_heads):
    torch.manual_seed(0)
    step = onnx_latency.make_decoding_step(onnx_latency.T5_TINY, kv_heads)
    model, new_tokens = step.model, 6
    # A small model whose head is tied to random embeddings would repeat one token.
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.generation_config.eos_token_id = None
    program = onnx_latency.export(step, onnx_latency.step_inputs(step, (2, 16, 4)), onnx_latency.step_shapes(step), 18)
    session = onnx_latency.open_session(program, threads=1)
    ids = torch.randint(5, 60, (3, 9))
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2, [1] * 4 + [0] * 5])
    expected = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    # torch computes the first two tokens, and the graph continues from its cache.
    start = model(input_ids=ids, attention_mask=mask, decoder_input_ids=expected[:, :2])
    caches = (get_cache(start).self_attention_cache, get_cache(start).cross_attention_cache)
    self_states, source = ([(layer.keys, layer.values) for layer in cache.layers] for cache in caches)
    assert source[0][0].shape == (3, kv_heads, 9, 8)
    tokens = start.logits[:, -1:].argmax(-1)
    for _ in range(new_tokens - 2):
        inputs = {"token": tokens[:, -1:], "source_mask": mask, "self_cache": self_states, "source": source}
        logits, *flat = (
            torch.from_numpy(item) for item in session.run(None, onnx_latency.to_named_arrays(session, inputs))
        )
        self_states = list(zip(flat[::2], flat[1::2], strict=True))
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(tokens, expected[:, 2:]) and len(np.unique(tokens)) > 3


@pytest.mark.thorough
@torch.no_grad()
def test_torch_export_step_supports_every_batch_size():
    step = onnx_latency.make_decoding_step(onnx_latency.T5_TINY, 2)
    step.model.set_attn_implementation("sdpa")
    inputs, shapes = onnx_latency.step_inputs(step, (2, 16, 4)), onnx_latency.step_shapes(step)
    program = torch.export.export(step, (), kwargs=inputs, dynamic_shapes=shapes).module()
    for size in [(1, 5, 7), (9, 20, 3)]:
        inputs = onnx_latency.step_inputs(step, size)
        torch.testing.assert_close(program(**inputs)[0], step(**inputs)[0], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_onnx_latency_script_runs(minilm, monkeypatch, tmp_path):
    options = ["--tiny", "--rounds", "2", "--num_key_value_heads", "4", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["onnx_latency.py", "--model_name_or_path", str(minilm), *options])
    onnx_latency.main(onnx_latency.parse_args())
    rows = json.loads((tmp_path / "onnx_latency.json").read_text())["rows"]
    assert [(row["opset"], row["attention_operators"]) for row in rows[:2]] == [(18, 0), (23, 6)]
    assert len(rows) == 5 and all(row["largest_error"] < 1e-4 and row["milliseconds"] > 0 for row in rows)
