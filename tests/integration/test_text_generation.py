"""Check text generation with Transformers' tools: the pipeline for a decoder, and assisted decoding."""

import pytest
import torch
from architectures import T5, make_token_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_attn_variants import AttnVariantBertLMHeadModel, convert


@torch.no_grad()
def test_text_generation_pipeline_equals_the_model(tiny_gqa, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_gqa)
    AttnVariantBertLMHeadModel.from_pretrained(tiny_gqa, is_decoder=True).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(model) is AttnVariantBertLMHeadModel and model.config.num_key_value_heads == 2
    generate = pipeline("text-generation", model=str(tmp_path))
    text = "two dogs run in"
    options = {"max_new_tokens": 6, "do_sample": False}
    (result,) = generate(text, **options, return_full_text=False)
    inputs = tokenizer(text, return_tensors="pt")
    # Generate token by token, with a full forward pass each time.
    ids = inputs.input_ids
    for _ in range(6):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    continued = ids[0, inputs.input_ids.shape[1] :]
    assert result["generated_text"].strip() == tokenizer.decode(continued, skip_special_tokens=True).strip()


@pytest.mark.parametrize("seed", range(3))
def test_multi_query_assistant_changes_no_token(seed):
    original = T5.make_model("T5ForConditionalGeneration", seed=seed)
    # If the output layer were tied to random embeddings, this small model would repeat one token.
    original.lm_head.weight = torch.nn.Parameter(torch.randn(60, 40))
    original.config.tie_word_embeddings = False
    assistant = convert(original, num_key_value_heads=1, copy=True)
    torch.manual_seed(seed)
    inputs = {"input_ids": make_token_ids(1, 8), "max_new_tokens": 16, "do_sample": False}
    for model in (original, assistant):
        model.generation_config.eos_token_id = None
    greedy = original.generate(**inputs)
    calls = []
    assistant.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(original.generate(**inputs, assistant_model=assistant), greedy)
    assert calls and not torch.equal(assistant.generate(**inputs), greedy)
