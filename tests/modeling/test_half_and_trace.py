"""Check half precision, offloaded weights, `torch.jit.trace`, and decoding that discards tokens."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, BERT, T5
from relatives import ENCODERS, RELATIVES

EVERY = {item.name: item for item in (*ARCHITECTURES, *RELATIVES)}
SINUSOIDAL = {name: item for name, item in EVERY.items() if "sinusoidal" in item.config_class.position_types}


@pytest.mark.parametrize("architecture", SINUSOIDAL.values(), ids=SINUSOIDAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinusoidal_positions_follow_the_dtype(architecture, dtype, tmp_path):
    head = next(iter(architecture.heads))
    model, batch = architecture.make_model(head, position_embedding_type="sinusoidal"), architecture.make_batch(head)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**batch)[0]
        for half in (type(model).from_pretrained(tmp_path, dtype=dtype).eval(), copy.deepcopy(model).to(dtype)):
            output = half(**batch)[0]
            assert output.dtype == dtype
            torch.testing.assert_close(output.float(), expected, atol=0.15, rtol=0.05)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_transient_global_summaries_work_with_offloaded_weights(offload, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    fields = {"attention_pattern": "transient_global", "attention_window": 4, "attention_block_size": 2}
    model = T5.make_model("T5Model", **{f"encoder_{name}": value for name, value in fields.items()})
    batch = T5.make_batch("T5Model")
    with torch.no_grad():
        expected = model(**batch)[0]
        folder = (tmp_path,) if offload == "disk_offload" else ()
        offloaded = getattr(accelerate, offload)(model, *folder, execution_device="cpu")
        torch.testing.assert_close(offloaded(**batch)[0], expected)


@pytest.mark.parametrize("head", ["BertLMHeadModel", "RobertaForCausalLM", "BartForCausalLM", "T5Model"])
@pytest.mark.parametrize("length", [1, 4])
def test_model_can_be_traced_without_a_mask(head, length):
    architecture = next(item for item in EVERY.values() if head in item.heads)
    is_encoder = architecture in (BERT, *ENCODERS)
    model = architecture.make_model(head, **({"is_decoder": True} if is_encoder else {}))
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            more = {"decoder_input_ids": ids} if head == "T5Model" else {}
            return self.model(input_ids=ids, **more, use_cache=False)[0]

    with torch.no_grad():
        traced = torch.jit.trace(First(), ids, check_trace=False)
        torch.testing.assert_close(traced(ids), First()(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration", "BertLMHeadModel"])
@pytest.mark.parametrize("more", [{}, {"kv_lora_rank": 16}], ids=["keys", "latents"])
def test_windows_support_assisted_decoding_and_prompt_lookup(name, more):
    architecture = next(item for item in EVERY.values() if name in item.heads)
    fields = {"attention_pattern": "sliding_window", "attention_window": 4, **more}
    model = architecture.make_model(name, **fields, **({"is_decoder": True} if architecture is BERT else {}))
    source = torch.randint(5, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 1}
    expected = model.generate(source, **settings)
    for options in ({"assistant_model": copy.deepcopy(model)}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(source, **settings, **options), expected)
