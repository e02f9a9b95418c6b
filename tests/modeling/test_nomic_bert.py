"""Check NomicBERT: checkpoints in which one tensor contains three projections."""

import pytest
import torch
import transformers
from architectures import make_token_ids
from fixtures.rotary_pairs import make_rotary_batch
from relatives import NOMIC_BERT
from safetensors.torch import load_file

from hf_attn_variants import AttnVariantNomicBertForMaskedLM, convert
from hf_attn_variants.export.plain import export_transformers

HEAD = "NomicBertForMaskedLM"
HEADS, HEAD_DIM, LAYERS = 12, 4, 2
PROJECTIONS = [
    f"nomic_bert.layers.{layer}.self_attn.{name}.weight"
    for layer in range(LAYERS)
    for name in ("q_proj", "k_proj", "v_proj")
]


def make_plain(**fields):
    return NOMIC_BERT.make_upstream_model(HEAD, initializer_range=0.2, **fields)


@pytest.fixture
def source(tmp_path):
    make_plain().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("kv_heads", [HEADS, 4])
def test_saved_projections_are_separate_and_load_with_equal_weights(kv_heads, tmp_path):
    model = NOMIC_BERT.make_model(HEAD, num_key_value_heads=kv_heads)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        assert {*PROJECTIONS} <= load_file(folder / "model.safetensors").keys()
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        weights = model.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
        model = loaded
    assert model.nomic_bert.layers[1].self_attn.k_proj.weight.shape == (kv_heads * HEAD_DIM, 48)


def test_checkpoint_with_one_tensor_loads_and_is_saved_with_three(source, tmp_path):
    stored = load_file(source / "model.safetensors")
    assert sum("Wqkv" in name for name in stored) == LAYERS and not {*PROJECTIONS} & stored.keys()
    variant_model, info = AttnVariantNomicBertForMaskedLM.from_pretrained(source, output_loading_info=True)
    assert not any(info.values()), info
    weights = make_plain().state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in variant_model.state_dict().items())
    variant_model.save_pretrained(tmp_path / "saved")
    assert {*PROJECTIONS} <= load_file(tmp_path / "saved" / "model.safetensors").keys()


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_mean_pools_the_rows_of_the_stored_tensor(shards, tmp_path):
    plain, source, out = make_plain(), tmp_path / "source", tmp_path / "out"
    plain.save_pretrained(source, max_shard_size="20KB" if shards else "1GB")
    report = convert(source, 4, method="mean", output_dir=out)
    converted, info = AttnVariantNomicBertForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    weights = plain.state_dict()
    for name, value in converted.state_dict().items():
        expected = weights[name]
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            expected = expected.view(4, HEADS // 4, HEAD_DIM, -1).double().mean(1).flatten(0, 1).to(value)
        assert torch.equal(value, expected), name
    saved = LAYERS * 2 * (HEADS - 4) * HEAD_DIM * 48
    assert report.parameters["before"] - report.parameters["after"] == saved
    assert len(list(out.glob("*.safetensors"))) == len(list(source.glob("*.safetensors")))


def test_exported_model_equals_the_grouped_one_in_transformers(source, tmp_path):
    convert(source, 4, method="mean", output_dir=tmp_path / "out")
    export_transformers(tmp_path / "out", tmp_path / "plain")
    plain, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert type(plain) is transformers.NomicBertForMaskedLM and not any(info.values()), info
    grouped = AttnVariantNomicBertForMaskedLM.from_pretrained(tmp_path / "out")
    batch = make_rotary_batch()
    with torch.no_grad():
        torch.testing.assert_close(grouped(**batch).logits, plain(**batch).logits, atol=1e-5, rtol=0)


def test_identical_heads_are_pooled_without_changing_outputs_of_long_texts():
    """Check 2,304 tokens, because errors of rotary positions grow with the distance."""
    model = make_plain(max_position_embeddings=2304)
    with torch.no_grad():
        for layer in model.nomic_bert.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                groups = projection.weight.view(4, HEADS // 4, HEAD_DIM, -1)
                groups.copy_(groups[:, :1].clone().expand_as(groups))
        batch = {"input_ids": make_token_ids(1, 2304)}
        grouped = convert(model, 4, method="mean").eval()
        torch.testing.assert_close(grouped(**batch).logits, model(**batch).logits, atol=1e-5, rtol=0)


def test_latents_raise_an_error_with_the_reason():
    with pytest.raises(ValueError, match=r"`kv_lora_rank` .*rotary part of their own"):
        NOMIC_BERT.make_config(kv_lora_rank=16)
