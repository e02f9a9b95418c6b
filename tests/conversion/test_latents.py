"""Check conversions to latents: lossless cases, from weights only, on text, and together with other heads."""

import json
from dataclasses import replace

import pytest
import torch
from architectures import ALBERT, T5
from fixtures.attention_tensors import make_attention_tensors, make_head_counts
from fixtures.calibrations import compute_error, make_bert, make_calibration, make_inputs, make_t5, make_texts
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSeq2SeqLM

from hf_attn_variants.conversion import convert_checkpoint, convert_model, load_converted
from hf_attn_variants.conversion.attention_tensors import (
    AttentionInputs,
    QuadraticErrorForm,
    compute_error_forms_from_weights,
    compute_preserved_energy_share,
    find_best_latent,
    get_latent_change,
    project_onto_latent,
)
from hf_attn_variants.conversion.calibration.methods import compute_error_forms
from hf_attn_variants.conversion.calibration.recording import compute_attention, compute_attention_weights
from hf_attn_variants.conversion.report import compute_attention_errors

pytestmark = pytest.mark.cross_product

MAPS = ("key", "value", "k", "v")


def make_low_rank(model, rank: int):
    """Let the key and value projections of all attention modules depend on only `rank` directions of their input."""
    directions = torch.randn(rank, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.rsplit(".", 2)[-2] in MAPS and weight.ndim == 2:
                weight.copy_(weight @ torch.linalg.pinv(directions) @ directions)
    return model


def make_text_calibration(**changes):
    """Return a calibration whose targets are given, because greedy outputs of random weights repeat one token."""
    return make_calibration(**{"target_texts": make_texts(seed=1)} | changes)


RANKS = {"kv_lora_rank": 32, "encoder_kv_lora_rank": 32, "cross_kv_lora_rank": 32}


@pytest.mark.parametrize(("build", "fields"), [(make_bert, {"kv_lora_rank": 32}), (make_t5, RANKS)])
def test_full_width_latent_equals_the_input(build, fields):
    model = build()
    converted = convert_model(model, **fields)
    assert {name: getattr(converted.config, name) for name in fields} == fields
    stored = model.state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in converted.state_dict().items())
    assert compute_error(converted, model) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "rank", "fields"),
    [
        (make_bert, 8, {"kv_lora_rank": 8}),
        (make_t5, 8, {"cross_kv_lora_rank": 8}),
        (make_t5, 8, {"kv_lora_rank": 8, "encoder_kv_lora_rank": 8, "cross_kv_lora_rank": 8}),
    ],
)
@pytest.mark.parametrize("knows_text", [False, True])
def test_latent_with_the_rank_of_the_projections_is_lossless(build, rank, fields, knows_text):
    model = make_low_rank(build(), rank)
    calibration_data = None
    if knows_text:
        calibration_data = make_text_calibration() if model.config.is_encoder_decoder else make_calibration()
    assert compute_error(convert_model(model, calibration=calibration_data, **fields), model) < 1e-4
    fewer = {name: value - 2 for name, value in fields.items()}
    assert compute_error(convert_model(model, calibration=calibration_data, **fewer), model) > 1e-2


@torch.no_grad()
def test_layers_with_a_shared_attention_share_its_latent():
    model = make_low_rank(ALBERT.make_upstream_model("AlbertModel"), 6)
    converted = convert_model(model, kv_lora_rank=6)
    batch = ALBERT.make_batch("AlbertModel")
    names = [name for name in converted.state_dict() if "kv_a_proj" in name]
    assert len(names) == 1 and names[0].endswith("attention.kv_a_proj.weight")
    torch.testing.assert_close(converted(**batch)[0], model(**batch)[0], atol=1e-5, rtol=0)


def test_heads_are_pooled_before_the_latent_is_computed():
    model = make_t5()
    fields = {"kv_lora_rank": 8, "cross_kv_lora_rank": 12}
    at_once = convert_model(model, 2, "mean", **fields)
    in_turn = convert_model(convert_model(model, 2, "mean"), method="mean", **fields)
    for name, tensor in in_turn.state_dict().items():
        torch.testing.assert_close(at_once.state_dict()[name], tensor, msg=name)
    shapes = {name: tuple(tensor.shape) for name, tensor in at_once.state_dict().items()}
    assert shapes["decoder.block.1.layer.0.SelfAttention.k.weight"] == (16, 8)
    assert shapes["decoder.block.0.layer.1.EncDecAttention.v.weight"] == (16, 12)
    assert shapes["decoder.cross_kv_a_proj.weight"] == (12, 32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "rank"), [(make_bert, "kv_lora_rank"), (make_t5, "cross_kv_lora_rank"), (make_t5, "kv_lora_rank")]
)
def test_latent_error_decreases_from_weights_to_closed_form_to_fit(build, rank):
    model = build()
    calibration_data = make_text_calibration if model.config.is_encoder_decoder else make_calibration
    errors = [
        compute_error(convert_model(model, calibration=text, **{rank: 8}), model)
        for text in (None, calibration_data(fit_steps=0), calibration_data(fit_steps=100))
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.97 * errors[0]


def test_fit_does_not_change_the_shared_latent():
    model = make_t5()
    closed, fitted = (
        convert_model(model, cross_kv_lora_rank=8, calibration=make_text_calibration(fit_steps=steps)).state_dict()
        for steps in (0, 20)
    )
    assert torch.equal(closed["decoder.cross_kv_a_proj.weight"], fitted["decoder.cross_kv_a_proj.weight"])
    assert not torch.equal(*(item["decoder.block.1.layer.1.EncDecAttention.k.weight"] for item in (closed, fitted)))
    rows = closed["decoder.cross_kv_a_proj.weight"]
    torch.testing.assert_close(rows @ rows.T, torch.eye(8), atol=1e-5, rtol=0)


def test_latent_of_a_single_attention_is_fitted():
    model = make_bert()
    closed, fitted = (
        convert_model(model, kv_lora_rank=8, calibration=make_calibration(fit_steps=steps)).state_dict()
        for steps in (0, 100)
    )
    name = "encoder.layer.1.attention.self.kv_a_proj.weight"
    assert closed[name].shape == (8, 32) and not torch.equal(closed[name], fitted[name])


@pytest.mark.thorough
def test_recording_in_several_chunks_changes_no_result(monkeypatch):
    from hf_attn_variants.conversion.calibration import recording

    fields = {"cross_kv_lora_rank": 8, "kv_lora_rank": 8, "calibration": make_text_calibration(fit_steps=3)}
    expected = convert_model(make_t5(), 2, **fields).state_dict()
    monkeypatch.setattr(recording, "MAX_RECORDED_BYTES", 1)
    actual = convert_model(make_t5(), 2, **fields).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(None, 4, "compress"), (4, 2, "compress"), (4, 4, "same"), (4, None, "expand")],
)
def test_rank_changes_are_checked(before, after, expected):
    assert get_latent_change(before, after) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "shards"), [(torch.float32, "12KB"), (torch.bfloat16, "1GB")])
def test_latent_folder_conversion_equals_the_in_memory_conversion(tmp_path, dtype, shards):
    model = make_t5().to(dtype)
    model.save_pretrained(tmp_path / "source", max_shard_size=shards)
    fields = {"kv_lora_rank": 8, "cross_kv_lora_rank": 12, "calibration": make_text_calibration(fit_steps=3)}
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, **fields)
    stored = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(path)
    in_memory = convert_model(model, 2, **fields).state_dict()
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert {name for name in stored if "kv_a_proj" in name} == {
        "decoder.cross_kv_a_proj.weight",
        *(f"decoder.block.{layer}.layer.0.SelfAttention.kv_a_proj.weight" for layer in range(2)),
    }
    assert all(torch.equal(tensor, in_memory[name]) for name, tensor in stored.items())
    again = load_converted(tmp_path / "source", 2, **fields).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in stored.items())
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype=dtype).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in stored.items())
    assert report.parameters["after"] == sum(tensor.numel() for tensor in stored.values())


def test_report_contains_ranks_cache_errors_and_retained_energy(tmp_path):
    make_t5().save_pretrained(tmp_path / "source")
    fields = {"kv_lora_rank": 32, "cross_kv_lora_rank": 8, "calibration": make_text_calibration()}
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", **fields)
    stored = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert stored["heads"]["cross_kv_lora_rank"] == [None, 8] and stored["heads"]["kv_lora_rank"] == [None, 32]
    assert "encoder_kv_lora_rank" not in stored["heads"]
    assert "cross_kv_lora_rank          none -> 8" in report.summary()
    # Before: 4 key heads and 4 value heads of size 8 in two layers. After: the input of each layer in self-attention,
    # and one latent for all layers in cross-attention.
    before = 2 * 2 * 4 * 8 * 4
    assert stored["kv_cache_bytes_per_token"] == {
        "decoder": {"before": before, "after": 2 * 32 * 4},
        "cross": {"before": before, "after": 8 * 4},
    }
    by_site = {row["site"]: row for row in stored["layers"]}
    assert (by_site["cross"]["change"], by_site["cross"]["rank"]) == ("compress", [None, 8])
    assert by_site["decoder"]["change"] == "same" and by_site["decoder"]["logits_relative_error"] == 0.0
    details = by_site["cross"]["details"]
    assert 0 < details["latent_key_energy"] < 1 and 0 < details["latent_value_energy"] < 1
    assert 0 < details["output_relative_error"] < 1 and "output_relative_error_averaged" not in details
    assert 0 < by_site["cross"]["logits_relative_error"] < 1
    assert "averaged" not in report.summary() and report.is_reduced()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cross_kv_lora_rank": 33}, "33"),
        ({"cross_kv_lora_rank": 0}, "0"),
        ({"cross_kv_lora_rnk": 4}, "`cross_kv_lora_rank`"),
        (
            {"cross_kv_lora_rank": 8, "talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2l", "m2w"]},
            "`cross_kv_lora_rank`",
        ),
    ],
)
def test_invalid_latent_conversions_raise_an_error(fields, message):
    with pytest.raises(ValueError, match=message):
        convert_model(make_t5(), **fields)


def test_key_side_terms_keep_the_latent_of_the_encoder_outputs(tmp_path):
    fields = {"talking_heads": "both", "talking_heads_dynamic": ["m2l"]}
    source = convert_model(make_t5(), **fields)
    with pytest.raises(ValueError, match="`cross_kv_lora_rank`"):
        convert_model(source, cross_kv_lora_rank=8)
    assert convert_model(source, kv_lora_rank=8, method="mean").config.kv_lora_rank == 8


@torch.no_grad()
def test_talking_heads_get_latents_only_from_weights():
    source = T5.make_model("T5ForConditionalGeneration", "gqa_talking")
    converted = convert_model(source, kv_lora_rank=40, cross_kv_lora_rank=39, method="mean")
    batch = T5.make_batch("T5ForConditionalGeneration")
    expected, actual = source(**batch).logits, converted(**batch).logits
    assert float((actual - expected).norm() / expected.norm()) < 0.1
    with pytest.raises(ValueError, match="original model's talking heads"):
        convert_model(source, cross_kv_lora_rank=8, calibration=make_text_calibration())


def test_latent_tensor_without_its_field_raises_an_error(tmp_path):
    convert_model(make_t5(), kv_lora_rank=8, cross_kv_lora_rank=8, method="mean").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    for field in ("cross_kv_lora_rank", "kv_lora_rank"):
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {field: None}))
        with pytest.raises(ValueError, match=r"must have shape .* got \[32, 8\]"):
            convert_checkpoint(tmp_path / "source", tmp_path / "out", 2)
        path.write_text(json.dumps(config))


def test_ranks_can_differ_between_layers(tmp_path):
    model = make_bert()
    model.save_pretrained(tmp_path / "source")
    values = {"kv_lora_rank": [8, None], "num_key_value_heads": [4, 2]}
    report = convert_checkpoint(tmp_path / "source", tmp_path / "mixed", per_layer_values=values, method="mean")
    assert [row.change for row in report.layers] == ["compress", "pool"]
    assert report.heads["kv_lora_rank"] == (None, [8, None]) and report.heads["num_key_value_heads"] == (4, [4, 2])
    stored = load_file(tmp_path / "mixed" / "model.safetensors")
    assert stored["encoder.layer.0.attention.self.key.weight"].shape == (32, 8)
    assert stored["encoder.layer.1.attention.self.key.weight"].shape == (16, 32)
    mixed = AutoModel.from_pretrained(tmp_path / "mixed").eval()
    again = convert_checkpoint(tmp_path / "mixed", tmp_path / "again", 1, method="mean")
    assert again.heads["num_key_value_heads"] == ([4, 2], 1)
    assert [row.rank for row in again.layers] == [(8, 8), (None, None)]
    assert AutoModel.from_pretrained(tmp_path / "again").config.num_key_value_heads == 1
    with torch.no_grad():
        assert mixed(**make_inputs()).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("build", [make_bert, make_t5])
@pytest.mark.parametrize("num_key_value_heads", [4, 2])
def test_per_layer_heads_convert_with_latents(build, num_key_value_heads):
    model = build() if num_key_value_heads == 4 else convert_model(build(), num_key_value_heads, "mean")
    values = {"num_key_value_heads": [2, 1]}
    converted = convert_model(model, method="mean", per_layer_values=values)
    assert converted.config.per_layer_values == values and converted.config.num_key_value_heads == 2


def make_attention(heads=4, kv_heads=4, bias=False):
    tensors = make_attention_tensors(heads, kv_heads, 3, 10, ("query", "key", "value", "output") if bias else ())
    return tensors, make_head_counts(heads, kv_heads, kv_heads, 3)


def make_attention_inputs():
    states = torch.randn(64, 7, 10, generator=torch.Generator().manual_seed(1))
    return [AttentionInputs(states, states, None, None, torch.ones(64, 7, dtype=torch.bool), 0.3)]


def test_best_latent_equals_the_truncated_svd():
    generator = torch.Generator().manual_seed(0)
    gram, metric = (torch.randn(8, 20, generator=generator).double() for _ in range(2))
    form = QuadraticErrorForm(gram @ gram.T, metric @ metric.T)
    latent = find_best_latent([form], 3)
    torch.testing.assert_close(latent @ latent.T, torch.eye(3).double())
    singular = torch.linalg.svdvals(gram.T @ metric).square()
    assert compute_preserved_energy_share(form, latent) == pytest.approx(float(singular[:3].sum() / singular.sum()))


def test_quadratic_form_without_text_equals_the_error_of_weight_products():
    tensors, heads = make_attention(kv_heads=2)
    forms = compute_error_forms_from_weights(tensors, heads)
    new = project_onto_latent(tensors, find_best_latent([forms.key, forms.value], 6), forms)
    logits, values = compute_attention_errors(tensors, new.fold_latent(), heads)
    assert logits**2 == pytest.approx(1 - new.details["latent_key_energy"], abs=2e-4)
    assert values**2 == pytest.approx(1 - new.details["latent_value_energy"], abs=2e-4)


def test_dropped_value_directions_change_outputs_by_their_energy():
    tensors, heads = make_attention(heads=1, kv_heads=1)
    text = make_attention_inputs()
    forms = compute_error_forms(tensors, heads, text, torch.Generator().manual_seed(0))
    form = forms.value
    latent = find_best_latent([form], 2)
    new = project_onto_latent(tensors, latent, forms)
    changed = replace(tensors, value_weight=new.fold_latent(torch.float32).value_weight)
    difference = compute_attention(changed, text[0], 1)[0] - compute_attention(tensors, text[0], 1)[0]
    expected = (1 - compute_preserved_energy_share(form, latent)) * form.energy
    # The tolerance covers the share of directions that the form has in addition to those in the text.
    assert float(difference.square().sum(-1).mean()) == pytest.approx(float(expected), rel=0.02)


def test_dropped_key_directions_change_outputs_by_their_energy_to_first_order():
    tensors, heads = make_attention(heads=1, kv_heads=1)
    # All texts have the same query, so it is correct to treat queries and keys as independent.
    states = torch.randn(400, 1, 10, generator=torch.Generator().manual_seed(2))[:1].expand(400, 1, 10)
    memory = torch.randn(400, 7, 10, generator=torch.Generator().manual_seed(3))
    text = [AttentionInputs(states, memory, None, None, torch.ones(400, 1, dtype=torch.bool), 0.3)]
    form = compute_error_forms(tensors, heads, text * 20, torch.Generator().manual_seed(0)).key
    lost = 1e-3 * torch.randn(10, 10, generator=torch.Generator().manual_seed(4)).double()
    weight = (tensors.key_weight.double() @ (torch.eye(10).double() - lost)).float()
    changed = replace(tensors, key_weight=weight)
    difference = compute_attention(changed, text[0], 1)[0] - compute_attention(tensors, text[0], 1)[0]
    expected = ((form.gram @ lost @ form.metric) * lost).sum()
    assert float(difference.double().square().sum(-1).mean()) == pytest.approx(float(expected), rel=0.1)


def test_mean_of_dropped_value_directions_is_in_the_bias():
    tensors, heads = make_attention(kv_heads=2, bias=True)
    states = make_attention_inputs()[0].states + 5.0
    text = [AttentionInputs(states, states, None, None, make_attention_inputs()[0].valid, 0.0)]
    forms = compute_error_forms(tensors, heads, text, torch.Generator().manual_seed(0))
    new = project_onto_latent(tensors, find_best_latent([forms.value], 2), forms)
    outputs = [compute_attention(which, text[0], 4)[0].mean((0, 1)) for which in (tensors, new)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
    assert compute_attention_weights(new, text[0], 4).sum(-1).allclose(torch.ones(()))


def make_latent_t5(model=None):
    """Return a model with latents, which can change to a smaller rank, to the full width, or to no latent."""
    return convert_model(model or make_t5(), method="mean", kv_lora_rank=12, cross_kv_lora_rank=16)


def test_full_width_rank_of_a_model_with_latents_is_lossless(tmp_path):
    source = make_latent_t5()
    source.save_pretrained(tmp_path / "source")
    converted = convert_checkpoint(tmp_path / "source", tmp_path / "out", kv_lora_rank=32, cross_kv_lora_rank=32)
    assert {row.change for row in converted.layers} == {"same", "expand"}
    assert converted.mean_logits_relative_error < 1e-6
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("kv_a_proj" in name for name in stored)
    assert compute_error(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval(), source) < 1e-5


@pytest.mark.parametrize("knows_text", [False, True])
@pytest.mark.thorough
def test_smaller_rank_is_lossless_for_projections_of_that_rank(knows_text):
    model = make_low_rank(make_t5(), 8)
    calibration = make_text_calibration(fit_steps=3) if knows_text else None
    smaller = convert_model(make_latent_t5(model), kv_lora_rank=8, cross_kv_lora_rank=8, calibration=calibration)
    assert smaller.config.kv_lora_rank == 8
    assert smaller.state_dict()["decoder.cross_kv_a_proj.weight"].shape == (8, 32)
    assert compute_error(smaller, model) < 1e-4


def test_heads_of_a_model_with_latents_change_with_the_same_latent():
    source = make_latent_t5()
    grouped = convert_model(source, 2, calibration=make_text_calibration())
    latent = "decoder.cross_kv_a_proj.weight"
    assert torch.equal(grouped.state_dict()[latent], source.state_dict()[latent])
    assert compute_error(grouped, source) < compute_error(convert_model(source, 2, "mean"), source)


def test_larger_rank_raises_an_error():
    with pytest.raises(ValueError, match=r"`kv_lora_rank`: A latent of rank 12 cannot be converted to rank 20"):
        convert_model(make_latent_t5(), kv_lora_rank=20)
