"""Check conversions of EuroBERT and T5Gemma, whose Transformers classes support fewer key/value heads."""

import json
import subprocess
import sys

import pytest
import torch
from conversion.conftest import load_model, load_tensors
from fixtures.native_models import HEADS, make_eurobert, make_t5gemma
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from hf_attn_variants import convert
from hf_attn_variants.hub.card import generate_model_card
from hf_attn_variants.hub.push import plan_push
from hf_attn_variants.inspection.costs import compute_cost_table, read_checkpoint_config
from hf_attn_variants.inspection.frontier import list_default_variants
from hf_attn_variants.modeling.transformers_internals import get_cache_name
from hf_attn_variants.registration import get_variant_config_class

MODELS = {"eurobert": make_eurobert, "t5gemma": make_t5gemma}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
HEADS_BY_MODEL = {
    "eurobert": ("num_key_value_heads",),
    "t5gemma": ("num_key_value_heads", "encoder_num_key_value_heads"),
}


def halve(name, heads=HEADS // 2):
    return dict.fromkeys(HEADS_BY_MODEL[name], heads)


def make_inputs(name, length=12):
    ids = torch.randint(5, 99, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, length - 4 :] = 0
    decoder = {"decoder_input_ids": ids[:, :6]} if name == "t5gemma" else {}
    return {"input_ids": ids, "attention_mask": mask, **decoder}


@pytest.fixture
def save(tmp_path):
    """A function that saves a tiny model and returns the model and its folder."""

    def save_model(name, **fields):
        model = MODELS[name](**fields)
        model.save_pretrained(tmp_path / name)
        return model, tmp_path / name

    return save_model


ELSEWHERE = """
import json, sys
sys.modules["hf_attn_variants"] = None  # importing it raises ImportError
import torch, transformers
model = getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1]).eval()
inputs = {name: torch.tensor(values) for name, values in json.loads(sys.argv[3]).items()}
with torch.no_grad():
    torch.save((type(model).__module__, model(**inputs).logits), sys.argv[4])
"""


@EVERY_MODEL
def test_converted_checkpoint_is_loaded_by_transformers_without_this_package(save, tmp_path, name):
    _, source = save(name)
    convert(source, method="mean", output_dir=tmp_path / "out", **halve(name))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "auto_map" not in config and not list((tmp_path / "out").glob("*.py"))
    assert {*config} == {*json.loads((source / "config.json").read_text())}
    inputs, auto = make_inputs(name), "AutoModelForSeq2SeqLM" if name == "t5gemma" else "AutoModelForMaskedLM"
    values = json.dumps({key: tensor.tolist() for key, tensor in inputs.items()})
    arguments = [tmp_path / "out", auto, values, tmp_path / "logits.pt"]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *map(str, arguments)], check=True, cwd=tmp_path)
    module, logits = torch.load(tmp_path / "logits.pt")
    assert module == f"transformers.models.{name}.modeling_{name}"
    converted = convert(source, method="mean", **halve(name))
    with torch.no_grad():
        torch.testing.assert_close(logits, converted.eval()(**inputs).logits, rtol=0, atol=1e-6)


@EVERY_MODEL
def test_converted_heads_are_the_means_of_each_group(save, tmp_path, name):
    _, source = save(name)
    convert(source, method="mean", output_dir=tmp_path / "out", **halve(name))
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    for key, tensor in before.items():
        pooled = "k_proj" in key or "v_proj" in key
        expected = tensor.unflatten(0, (HEADS // 2, 2, -1)).mean(1).flatten(0, 1) if pooled else tensor
        torch.testing.assert_close(after[key], expected)


@EVERY_MODEL
def test_model_in_memory_keeps_its_class_and_saves_the_same_checkpoint(save, tmp_path, name):
    model, source = save(name)
    converted = convert(model, method="mean", **halve(name))
    assert type(converted) is type(model) and type(converted.config) is type(model.config)
    for path, module in converted.named_modules():
        assert {*vars(module)} <= {*vars(model.get_submodule(path))}
    converted.save_pretrained(tmp_path / "saved")
    convert(source, method="mean", output_dir=tmp_path / "out", **halve(name))
    config, saved = ((tmp_path / folder / "config.json").read_text() for folder in ("out", "saved"))
    assert json.loads(config) == json.loads(saved)
    assert type(convert(source, method="mean", **halve(name))) is type(model)


@EVERY_MODEL
def test_checkpoint_with_equal_heads_in_each_group_does_not_change(save, tmp_path, name):
    model, source = save(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "k_proj" in key or "v_proj" in key:
                parameter.copy_(parameter.unflatten(0, (HEADS, -1))[:1].expand(HEADS, -1, -1).flatten(0, 1))
    model.save_pretrained(source)
    inputs = make_inputs(name)
    for heads in (2, 1):  # 4 -> 2 -> 1
        convert(source, method="mean", output_dir=tmp_path / f"{heads}", **halve(name, heads))
        source = tmp_path / f"{heads}"
        auto_class = AutoModelForSeq2SeqLM if name == "t5gemma" else AutoModelForMaskedLM
        with torch.no_grad():
            outputs = load_model(auto_class, source)(**inputs).logits, model(**inputs).logits
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [EuroBertModel, EuroBertForSequenceClassification, EuroBertForTokenClassification])
def test_every_head_of_eurobert_is_converted(tmp_path, head):
    make_eurobert(model_class=head).save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", 1, method="mean", output_dir=tmp_path / "out")
    assert report.architecture == head.__name__ and report.heads["num_key_value_heads"] == (HEADS, 1)
    assert load_model(head, tmp_path / "out").config.num_key_value_heads == 1


def test_original_remote_code_of_eurobert_is_left_out(save, tmp_path, edit_config):
    _, source = save("eurobert")
    edit_config(source, auto_map={"AutoModel": "modeling_eurobert.EuroBertModel"})
    (source / "modeling_eurobert.py").write_text("raise RuntimeError('remote code was run')")
    report = convert(source, 2, method="mean", output_dir=tmp_path / "out")
    assert report.files_left_out == ["modeling_eurobert.py"]
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())
    assert type(AutoModel.from_pretrained(tmp_path / "out")) is EuroBertModel


def test_converted_t5gemma_generates_the_same_tokens_after_saving(save, tmp_path):
    model, source = save("t5gemma")
    converted = convert(source, method="mean", **halve("t5gemma"))
    converted.save_pretrained(tmp_path / "out")
    inputs = make_inputs("t5gemma")
    inputs.pop("decoder_input_ids")
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        options = options | {"max_new_tokens": 10, "do_sample": False}
        tokens = [
            candidate.generate(**inputs, **options)
            for candidate in (converted, load_model(AutoModelForSeq2SeqLM, tmp_path / "out"))
        ]
        assert tokens[0].equal(tokens[1]) and len(tokens[0].unique()) > 3
    assert not model.generate(**inputs, max_new_tokens=10, do_sample=False).equal(tokens[0])


def test_tied_t5gemma_stays_tied(tmp_path):
    parts = {part: make_t5gemma().config.to_dict()[part] for part in ("encoder", "decoder")}
    T5GemmaForConditionalGeneration(T5GemmaConfig(**parts, vocab_size=99)).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", 1, method="mean", output_dir=tmp_path / "out")
    assert {*load_tensors(tmp_path / "out")} == {*load_tensors(tmp_path / "source")}
    model = load_model(AutoModelForSeq2SeqLM, tmp_path / "out")
    assert model.lm_head.out_proj.weight is model.model.decoder.embed_tokens.weight
    assert (model.config.decoder.num_key_value_heads, model.config.encoder.num_key_value_heads) == (1, HEADS)


@EVERY_MODEL
@pytest.mark.parametrize("field", ["talking_heads", "attention_pattern", "per_layer_values"])
def test_field_that_the_transformers_class_lacks_is_named(name, field):
    value = {"talking_heads": "both", "attention_pattern": "sliding_window"}.get(
        field, {"num_key_value_heads": [4, 2]}
    )
    with pytest.raises(ValueError, match=rf"`{field}` is not supported for '{name}' models.* such as BERT and T5"):
        convert(MODELS[name](), method="mean", **{field: value})


@pytest.mark.parametrize(("name", "field"), [("eurobert", "kv_lora_rank"), ("t5gemma", "encoder_kv_lora_rank")])
def test_latent_in_attention_with_rotary_positions_is_an_error(name, field):
    with pytest.raises(ValueError, match=f"`{field}` must not be set in a model with rotary positions"):
        convert(MODELS[name](), method="mean", **{field: 8})


def test_misspelled_or_missing_field_of_eurobert_is_an_error():
    with pytest.raises(ValueError, match=r"`num_kv_heads` is not a field .* Did you mean `num_key_value_heads`"):
        convert(make_eurobert(), method="mean", num_kv_heads=2)
    with pytest.raises(ValueError, match="`num_key_value_heads` must divide `num_attention_heads`, got 3 for 8 heads"):
        convert(make_eurobert(), 3, method="mean")


@pytest.mark.parametrize(
    ("model_type", "cause"),
    [
        ("mpnet", "attention class does not call Transformers' attention interface"),
        ("deberta", "attention adds position terms to the scores"),
        ("deberta-v2", "attention adds position terms to the scores"),
        ("t5gemma2", "normalizes queries and keys after the projections"),
    ],
)
def test_unsupported_architecture_names_the_cause(tmp_path, edit_config, model_type, cause):
    make_eurobert().save_pretrained(tmp_path)
    edit_config(tmp_path, model_type=model_type, architectures=None)
    with pytest.raises(ValueError, match=f"Model type '{model_type}' is not supported because its .*{cause}"):
        convert(tmp_path, 2, method="mean")


def test_cost_table_lists_only_what_the_transformers_class_supports(save):
    _, source = save("eurobert")
    table = compute_cost_table(read_checkpoint_config(source))
    assert [row.name for row in table.rows] == ["MHA", "GQA-4", "GQA-2", "MQA"]
    assert table.current.parameters == sum(p.numel() for p in EuroBertForMaskedLM.from_pretrained(source).parameters())


def test_cost_table_counts_the_cache_of_t5gemma_as_transformers_stores_it(save):
    model, source = save("t5gemma")
    beams, length = 3, 20
    table = compute_cost_table(read_checkpoint_config(source), length=length, num_beams=beams)
    ids = torch.randint(5, 99, (1, length))
    encoded = model.model.encoder(ids.repeat(beams, 1))
    with torch.no_grad():
        outputs = model(encoder_outputs=encoded, decoder_input_ids=ids.repeat(beams, 1), use_cache=True)
    cache = outputs[get_cache_name()]
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    assert table.current.kv_cache_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@EVERY_MODEL
def test_frontier_tries_only_heads(name):
    config = get_variant_config_class(name).from_upstream(MODELS[name]().config)
    variants = list_default_variants(config, "num_key_value_heads", decodes=name == "t5gemma")
    assert variants == [{"num_key_value_heads": 2}, {"num_key_value_heads": 1}]
    with pytest.raises(ValueError, match=f"`talking_heads` is not supported for '{name}' models"):
        get_variant_config_class(name).from_upstream(config, talking_heads="both")


@EVERY_MODEL
def test_card_says_that_no_remote_code_is_needed(save, tmp_path, name):
    _, source = save(name)
    convert(source, method="mean", output_dir=tmp_path / "out", **halve(name))
    card = str(generate_model_card(tmp_path / "out", "user/model"))
    assert "It needs no remote code" in card and "trust_remote_code" not in card and "code files" not in card
    plan = plan_push(tmp_path / "out", "user/model")
    assert not any(file.endswith(".py") for file in plan.files) and "model.safetensors" in plan.files


def test_saved_configuration_is_that_of_transformers(tmp_path):
    config = get_variant_config_class("eurobert").from_upstream(EuroBertConfig(num_key_value_heads=2))
    config.save_pretrained(tmp_path)
    assert EuroBertConfig.from_pretrained(tmp_path).to_dict() == EuroBertConfig(num_key_value_heads=2).to_dict()
