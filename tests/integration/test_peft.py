"""Check peft: LoRA on grouped projections, and prefixes with as many heads as the keys and values."""

import pytest
import torch
import transformers
from architectures import ALBERT, ARCHITECTURES, BERT, T5
from fixtures.caches import get_cache_name
from packaging.version import Version
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.cross_product

peft = pytest.importorskip("peft")
# Transformers 5.24 renamed the argument for the cache, which passes prefixes, and requires peft 0.22.
DROPS_PREFIXES = get_cache_name() == "cache" and Version(peft.__version__) < Version("0.22")
FOR_BOTH = pytest.mark.skipif(
    DROPS_PREFIXES, reason=f"peft {peft.__version__} is older than transformers {transformers.__version__} requires"
)

ALL_OF_BERT = r".*attention\.(self\.(query|key|value)|output\.dense)"
CASES = {
    "bert query and value": (BERT, "BertForSequenceClassification", ["query", "value"], 4),
    "bert all projections": (BERT, "BertForSequenceClassification", ALL_OF_BERT, 8),
    "t5 query and value": (T5, "T5ForConditionalGeneration", ["q", "v"], 12),
    "t5 all projections": (T5, "T5ForConditionalGeneration", ["q", "k", "v", "o"], 24),
}
AUTO = {"BertForSequenceClassification": AutoModelForSequenceClassification}


@pytest.mark.parametrize("variant", ["gqa", "gqa_talking"])
@pytest.mark.parametrize("case", CASES)
def test_lora_trains_saves_loads_and_merges(case, variant, tmp_path):
    architecture, head, targets, maps = CASES[case]
    model = architecture.make_model(head, variant)
    model.save_pretrained(tmp_path / "base")
    batch = architecture.make_batch(head, labels=True)
    # Without a task type, the forward of the model gets all arguments, and the classifier does not change.
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    before = {name: parameter.detach().clone() for name, parameter in adapted.named_parameters()}
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * maps and all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # in the first step, B is zero and A gets no gradient
        optimizer.zero_grad()
        adapted(**batch).loss.backward()
        optimizer.step()
    moved = {name for name, parameter in adapted.named_parameters() if not torch.equal(before[name], parameter)}
    assert moved == set(trained)

    adapted.eval()
    with torch.no_grad():
        expected = adapted(**batch).logits
    adapted.save_pretrained(tmp_path / "adapter")
    auto_class = AUTO.get(head, AutoModelForSeq2SeqLM)
    loaded = peft.PeftModel.from_pretrained(auto_class.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    merged = loaded.eval().merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = auto_class.from_pretrained(tmp_path / "merged").eval()
    assert type(again) is type(model) and again.config.num_key_value_heads == 4
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(again(**batch).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("target", [["q", "v"], ["k", "v"], ["kv_a_proj", "cross_kv_a_proj"]], ids=str)
@pytest.mark.parametrize("rank", [40, 24], ids=["exact", "low rank"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"], indirect=True)
def test_lora_on_latent_projections_affects_decoding(target, rank, form):
    """Check steps that fold projections into the query: they must include the LoRA weights."""
    ranks = {"cross_kv_lora_rank": rank, "kv_lora_rank": 16, "encoder_kv_lora_rank": 16}
    model = T5.make_model("T5ForConditionalGeneration", "gqa", **ranks)
    inputs = T5.make_batch("T5EncoderModel") | {"max_new_tokens": 8, "do_sample": False}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    plain = torch.stack(model.generate(**inputs, **scores).scores)
    if rank == 40 and "kv_a_proj" in target:
        target = ["kv_a_proj"]  # cached encoder outputs have no latent projection
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=16, target_modules=target)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    actual = torch.stack(adapted.generate(**inputs, **scores).scores)
    assert (actual - plain[: len(actual)]).abs().max() > 0.1
    merged = torch.stack(adapted.merge_and_unload().generate(**inputs, **scores).scores)
    torch.testing.assert_close(actual, merged, atol=1e-4, rtol=0)


@FOR_BOTH
def test_prefix_works_with_latents_of_encoder_outputs():
    model = T5.make_model("T5ForConditionalGeneration", cross_kv_lora_rank=24)
    sizes = {"num_attention_heads": 12, "token_dim": 12 * model.config.d_kv}
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, **sizes)
    tuned = peft.get_peft_model(model, config).eval()
    inputs = T5.make_batch("T5EncoderModel")
    for beams in (1, 3):
        tokens = tuned.generate(**inputs, max_new_tokens=4, num_beams=beams, do_sample=False)
        assert tokens.shape[0] == len(inputs["input_ids"])
    # A prefix contains keys and values, which self-attention with a latent does not cache.
    latent = T5.make_model("T5ForConditionalGeneration", kv_lora_rank=16)
    with pytest.raises(ValueError, match=r"latents of dimension 16 \(`kv_lora_rank`\)"):
        peft.get_peft_model(latent, config).eval().generate(**inputs, max_new_tokens=4)


@pytest.mark.parametrize("variant, heads", [("mha", 12), ("gqa", 4), ("mqa", 1)])
def test_t5_prefix_has_the_key_value_heads(variant, heads, tmp_path):
    model = T5.make_model("T5ForConditionalGeneration", variant)
    # By default, peft uses d_model / heads as the head size. T5's heads have another size, so pass their total width.
    config = peft.PrefixTuningConfig(
        task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, num_attention_heads=12, token_dim=12 * model.config.d_kv
    )
    tuned = peft.get_peft_model(model, config)
    cache = tuned.get_prompt(batch_size=2)
    assert cache.self_attention_cache.layers[0].keys.shape == (2, heads, 3, model.config.d_kv)
    batch = T5.make_batch("T5ForConditionalGeneration", labels=True)
    del batch["decoder_input_ids"]
    tuned(**batch).loss.backward()
    gradients = [parameter.grad for parameter in tuned.parameters() if parameter.requires_grad]
    assert gradients and all(gradient.abs().sum() > 0 for gradient in gradients)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tuned.eval()
    if DROPS_PREFIXES:
        return
    tokens = tuned.generate(**inputs, max_new_tokens=4, do_sample=False)
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(T5.make_model("T5ForConditionalGeneration", variant), tmp_path).eval()
    assert torch.equal(loaded.generate(**inputs, max_new_tokens=4, do_sample=False), tokens)


@pytest.mark.skipif(not DROPS_PREFIXES, reason="this version of peft passes prefixes under the current name")
@pytest.mark.parametrize("head", ["T5ForConditionalGeneration", "BertLMHeadModel"])
def test_unsupported_prefix_raises_an_error(head):
    row, task = (T5, "SEQ_2_SEQ_LM") if "T5" in head else (BERT, "CAUSAL_LM")
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options["input_ids"] = row.make_batch(head)["input_ids"]

    def tuned(model):
        sizes = {"num_attention_heads": 12, "token_dim": 12 * getattr(model.config, "d_kv", 4)}
        config = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3, **sizes)
        return peft.get_peft_model(model, config).eval()

    with pytest.raises(ValueError, match=r"must have only one cache, got `past_key_values` and `cache`"):
        tuned(row.make_model(head, "gqa")).generate(**options)
    if row is T5:  # Transformers ignores the prefix
        upstream = row.make_upstream_model(head)
        plain = upstream.generate(**options).logits
        with pytest.warns(FutureWarning, match="Both `past_key_values` and `cache` are set"):
            actual = tuned(upstream).generate(**options).logits
        torch.testing.assert_close(torch.stack(actual), torch.stack(plain))


def test_prefix_needs_no_sizes_for_regular_head_sizes():
    model = T5.make_model("T5ForConditionalGeneration", "gqa", d_model=48, d_kv=4)
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3))
    assert tuned.get_prompt(batch_size=2).self_attention_cache.layers[1].values.shape == (2, 4, 3, 4)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
def test_lora_finds_its_target_modules(architecture):
    model = architecture.make_model(next(iter(architecture.heads)), "gqa_talking")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2))
    expected = {"q", "v"} if architecture is T5 else {"query", "value"}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in get_trainable_names(adapted)} == expected
    assert len(get_trainable_names(adapted)) == 2 * 2 * len(list(model.named_attention_modules()))


@pytest.mark.parametrize("config_class", ["IA3Config", "AdaLoraConfig", "LoHaConfig", "VeraConfig"])
@pytest.mark.parametrize("architecture", [BERT, T5], ids=lambda row: row.name)
def test_peft_methods_adapt_the_same_modules_as_in_transformers(architecture, config_class):
    head = next(iter(architecture.heads))
    settings = {"total_step": 10} if config_class == "AdaLoraConfig" else {}
    adapted, upstream_adapted = (
        peft.get_peft_model(model, getattr(peft, config_class)(**settings))
        for model in (architecture.make_model(head, "mha"), architecture.make_upstream_model(head))
    )
    assert get_trainable_names(adapted) == get_trainable_names(upstream_adapted) != []


@FOR_BOTH
def test_transformers_adapters_find_their_target_modules():
    model = ALBERT.make_model("AlbertModel", "gqa")
    model.add_adapter(peft.LoraConfig(r=2))
    assert any("lora_" in name for name in get_trainable_names(model))


def get_trainable_names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
