"""Check torch.compile: encoders without graph breaks, and one trace of T5's decoding step with a static cache.

The backend "eager" runs the captured graph without changes, so the tests need no C++ compiler.
"""

from typing import Any

import pytest
import torch
from architectures import ALBERT, BERT, T5
from torch._dynamo.utils import counters
from transformers import CompileConfig

pytestmark = pytest.mark.cross_product

BASES = {"bert": "BertModel", "albert": "AlbertModel", "t5": "T5EncoderModel"}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["gqa", "mqa", "talking", "latent"])
@pytest.mark.parametrize("architecture", [BERT, ALBERT, T5], ids=lambda row: row.name)
@torch.no_grad()
def test_encoders_compile_into_one_graph(architecture, variant):
    model = architecture.make_model(BASES[architecture.name], variant)
    batch = architecture.make_batch(BASES[architecture.name])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    actual = compiled(**batch).last_hidden_state
    torch.testing.assert_close(actual, model(**batch).last_hidden_state, atol=1e-6, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "variant", ["gqa", "latent", *(pytest.param(item, marks=pytest.mark.slow) for item in ("mqa", "talking"))]
)
@torch.no_grad()
def test_t5_decoding_step_compiles_once(variant):
    model = T5.make_model("T5ForConditionalGeneration", variant)
    model.generation_config.eos_token_id = None
    # The batch is so large that attention uses matrix products.
    batch = {name: tensor.repeat(3, 1) for name, tensor in T5.make_batch("T5EncoderModel").items()}
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**batch, **options)
    assert torch.equal(expected, model.generate(**batch, **(options | {"cache_implementation": "dynamic"})))
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(model.generate(**batch, **options), expected)
    graphs = counters["stats"]["unique_graphs"]
    # There is one graph for the first token, which fills the cross-attention cache, and one for later steps. Each of
    # them may be compiled once more with dynamic sizes.
    assert 2 <= graphs <= 4 and not counters["graph_break"]
    assert torch.equal(model.generate(**batch, **options), expected)
    assert counters["stats"]["unique_graphs"] == graphs


STEPS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "talking": {"talking_heads": "both"},
    "exact": {"cross_kv_lora_rank": 40},
    "latents": {"cross_kv_lora_rank": 16, "kv_lora_rank": 16},
}


# By default, test one case of each kind of cache: keys and values, encoder outputs, and latents.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=() if name in ("gqa", "exact", "latents") else pytest.mark.slow)
        for name, fields in STEPS.items()
    ],
)
@torch.no_grad()
def test_generate_compiles_one_step_for_all_batch_sizes(fields):
    """Check the compiled step that `generate` uses on a GPU. From the second batch on, sizes are dynamic."""
    model = T5.make_model("T5ForConditionalGeneration", **fields)
    model.generation_config.eos_token_id = None
    compiling = CompileConfig(fullgraph=True, backend="eager")
    compiling._compile_all_devices = True  # like the tests of Transformers on a CPU
    for batch, length in ((2, 6), (3, 9), (1, 5)):
        ids = torch.randint(5, 40, (batch, length))
        options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
        expected = model.generate(**options)
        actual = model.generate(**options, cache_implementation="static", compile_config=compiling)
        assert torch.equal(actual, expected), batch
        assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
