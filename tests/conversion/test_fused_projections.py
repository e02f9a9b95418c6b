"""Check conversions of ModernBERT, whose queries, keys and values are ranges of rows in one tensor."""

import json

import pytest
import torch
import transformers
from architectures import LENGTH, make_token_ids
from fixtures.elsewhere import run_elsewhere
from hub.test_loading_elsewhere import ELSEWHERE
from relatives import MODERNBERT
from safetensors.torch import load_file, save_file

from hf_attn_variants import AttnVariantModernBertModel, convert
from hf_attn_variants.export.plain import export_transformers
from hf_attn_variants.hub.card import generate_model_card
from hf_attn_variants.inspection.costs import count_attention_parameters, count_flops_per_token
from hf_attn_variants.training.engine.trainable_parameters import add_lora

HEADS, HEAD_DIM, WIDTH, LAYERS = 12, 4, 48, 2
BATCH = MODERNBERT.make_batch("ModernBertForMaskedLM")


def make_plain(head="ModernBertForMaskedLM"):
    return MODERNBERT.make_upstream_model(head, attention_bias=True, initializer_range=0.2)


@pytest.fixture
def source(tmp_path):
    make_plain().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def pool_by_hand(rows, kv_heads):
    """Return the query rows of a fused tensor, and the means of the key and value rows of each group of heads."""
    query, key, value = rows.view(3, HEADS, HEAD_DIM, -1)
    means = (heads.view(kv_heads, HEADS // kv_heads, HEAD_DIM, -1).double().mean(1) for heads in (key, value))
    parts = [query.flatten(0, 1), *(mean.flatten(0, 1).to(rows) for mean in means)]
    return torch.cat(parts).reshape(-1, *rows.shape[1:])


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_mean_pools_the_rows_of_keys_and_values(source, tmp_path, kv_heads):
    report = convert(source, num_key_value_heads=kv_heads, method="mean", output_dir=tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        fused = ".Wqkv." in name
        assert torch.equal(tensor, pool_by_hand(before[name], kv_heads) if fused else before[name]), name
    saved = LAYERS * 2 * (HEADS - kv_heads) * HEAD_DIM * (WIDTH + 1)
    assert report.parameters["before"] - report.parameters["after"] == saved
    assert [(layer.key_heads, layer.value_heads) for layer in report.layers] == [((HEADS, kv_heads),) * 2] * LAYERS


def test_converted_model_equals_transformers_with_repeated_heads(source, tmp_path):
    grouped = convert(source, num_key_value_heads=4, method="mean").eval()
    convert(source, num_key_value_heads=4, method="mean", output_dir=tmp_path / "out")
    export_transformers(tmp_path / "out", tmp_path / "plain")
    plain = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "plain").eval()
    assert type(plain) is transformers.ModernBertForMaskedLM
    with torch.no_grad():
        expected = plain(**BATCH).logits
        torch.testing.assert_close(grouped(**BATCH).logits, expected, atol=1e-5, rtol=0)
    again = convert(grouped, num_key_value_heads=12)
    weights = plain.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())


def test_identical_heads_are_pooled_without_changing_outputs_of_long_texts(source):
    """Check 2,304 tokens, because errors of rotary positions grow with the distance."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(source).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for rows in layer.attn.Wqkv.parameters():
                groups = rows.view(3, 4, HEADS // 4, HEAD_DIM, -1)
                groups[1:] = groups[1:, :, :1].clone()
        batch = {"input_ids": make_token_ids(1, 2304)}
        expected = model(**batch).logits
        grouped = convert(model, num_key_value_heads=4, method="mean").eval()
        assert grouped.model.layers[0].attn.Wqkv.weight.shape == ((HEADS + 2 * 4) * HEAD_DIM, WIDTH)
        torch.testing.assert_close(grouped(**batch).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"talking_heads": "both"},
        {"attention_pattern": "sliding_window", "attention_window": 2 * LENGTH},
    ],
    ids=str,
)
def test_fields_that_change_nothing_yet_keep_the_outputs(source, fields):
    """Check talking heads that start as the identity, and windows that are longer than the text."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(source).eval()
    converted = convert(source, method="mean", **fields).eval()
    real = BATCH["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(converted(**BATCH).logits[real], model(**BATCH).logits[real], atol=1e-5, rtol=0)


def test_kernel_is_added_to_the_global_layers(source, tmp_path):
    convert(source, method="mean", num_key_value_heads=4, attention_kernel="hedgehog", output_dir=tmp_path / "out")
    names = {name for name in load_file(tmp_path / "out" / "model.safetensors") if "kernel" in name}
    assert names and all(".layers.0.attn." in name for name in names)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert model(**BATCH).logits.isfinite().all()


@pytest.mark.thorough
def test_converted_model_loads_without_this_package(tmp_path):
    make_plain("ModernBertModel").save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", num_key_value_heads=4, method="mean", output_dir=tmp_path / "repo")
    model = AttnVariantModernBertModel.from_pretrained(tmp_path / "repo").eval()
    with torch.no_grad():
        expected = model(**BATCH).last_hidden_state
    inputs = {f"input.{name}": value for name, value in BATCH.items()}
    save_file({"expected": expected} | inputs, tmp_path / "tensors.safetensors")
    paths = (tmp_path / "repo", tmp_path / "tensors.safetensors", tmp_path / "resaved")
    printed = run_elsewhere("-c", ELSEWHERE, *paths, cwd=tmp_path)
    assert json.loads(printed.splitlines()[-1]) == [model.config.auto_classes]


def test_model_card_states_that_remote_code_is_required(source, tmp_path):
    convert(source, num_key_value_heads=4, method="mean", output_dir=tmp_path / "out")
    card = str(generate_model_card(tmp_path / "out", "user/out"))
    assert "trust_remote_code=True" in card and "not part of Transformers" in card


def test_dtype_of_the_fused_tensor_is_converted(source):
    half = convert(source, num_key_value_heads=4, method="mean", dtype="bfloat16")
    converted = convert(source, num_key_value_heads=4, method="mean").to(torch.bfloat16)
    assert all(torch.equal(value, converted.state_dict()[name]) for name, value in half.state_dict().items())


def test_fused_tensor_of_another_size_raises_an_error(source):
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.attn.Wqkv.weight"
    tensors[name] = tensors[name][:-HEAD_DIM].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name}.* \[144, 48\] .* \[140, 48\]"):
        convert(source, num_key_value_heads=4, method="mean")


def test_costs_count_the_rows_of_a_fused_layer(source):
    model = convert(source, num_key_value_heads=4, method="mean")
    rows = (HEADS + 2 * 4) * HEAD_DIM
    assert count_attention_parameters(model) == LAYERS * (rows + WIDTH) * (WIDTH + 1)
    others = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".attn." not in name
    )
    # The local layer attends to two tokens on each side and to the token itself.
    attention = 2 * 2 * (100 + 5) * HEADS * HEAD_DIM
    assert count_flops_per_token(model, 100, 100) == {
        "encoder": 2 * (LAYERS * (rows + WIDTH) * WIDTH + others) + attention
    }


def test_lora_adapts_the_fused_layer_of_both_models(source):
    grouped = convert(source, num_key_value_heads=4, method="mean")
    for model in (grouped, transformers.AutoModelForMaskedLM.from_pretrained(source)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        adapted = add_lora(model, rank=2, alpha=4)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        with torch.no_grad():
            expected = adapted.eval()(**BATCH).logits
            merged = adapted.merge_and_unload()
            torch.testing.assert_close(merged(**BATCH).logits, expected, atol=1e-4, rtol=0)
        changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {f"model.layers.{i}.attn.{name}.weight" for i in range(LAYERS) for name in ("Wqkv", "Wo")}
