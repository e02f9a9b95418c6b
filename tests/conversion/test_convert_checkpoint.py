"""Checkpoint folders in, checkpoint folders out."""

import json
import os
import shutil
import signal
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from architectures import HEAD_IDS, HEADS, T5
from fixtures.glue.tiny_bert import make_tiny_bert
from safetensors import safe_open
from safetensors.torch import load_file

import hf_attn_variants
from hf_attn_variants.conversion import convert as convert_function
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.checkpoint.source import resolve_source
from hf_attn_variants.conversion.methods.mean import mean_heads
from hf_attn_variants.conversion.plan import seeded_generator
from hf_attn_variants.files import REPORT_NAME, staged_folder
from hf_attn_variants.modeling.variant_mixins import projection_std

LAYER = "bert.encoder.layer.1.attention"
INPUTS = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]]),
}


def tensors_of(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def is_key_or_value(name):
    return ".self.key." in name or ".self.value." in name


def loaded(auto_class, folder):
    return auto_class.from_pretrained(folder).eval()


def logits(model):
    with torch.no_grad():
        return model(**INPUTS).logits


def snapshot(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("kv_heads", [1, 4, 6])
def test_keys_and_values_are_pooled_and_all_else_is_bit_equal(make_source, tmp_path, kv_heads):
    source = make_source()
    convert_checkpoint(source, tmp_path / "out", kv_heads)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert list(sorted(before)) == list(sorted(after))
    for name, tensor in before.items():
        expected = mean_heads(tensor, 12, kv_heads) if is_key_or_value(name) else tensor
        assert torch.equal(after[name], expected), name
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_heads_that_are_equal_in_each_group_convert_without_loss(make_source, edit_tensors, tmp_path):
    source = make_source()

    def tie_heads(tensors):
        for name in filter(is_key_or_value, list(tensors)):
            tensors[name] = mean_heads(tensors[name], 12, 4).unflatten(0, (4, 4)).repeat_interleave(3, 0).flatten(0, 1)

    edit_tensors(source, tie_heads)
    report = convert_checkpoint(source, tmp_path / "out", 4)
    assert [(row.logits_relative_error, row.value_relative_error) for row in report.layers] == [(0.0, 0.0)] * 2
    upstream = loaded(transformers.BertForMaskedLM, source)
    torch.testing.assert_close(
        logits(loaded(transformers.AutoModelForMaskedLM, tmp_path / "out")), logits(upstream), atol=1e-5, rtol=0
    )


def test_as_many_heads_as_before_is_the_identity(make_source, tmp_path):
    source = make_source()
    report = convert_checkpoint(source, tmp_path / "out", 12)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {row.change for row in report.layers} == {"same"} and report.mean_logits_relative_error == 0.0
    ours = loaded(transformers.AutoModelForMaskedLM, tmp_path / "out")
    torch.testing.assert_close(logits(ours), logits(loaded(transformers.BertForMaskedLM, source)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("middle, final", [(4, 12), (2, 4), (1, 12), (1, 1)])
def test_expanding_a_grouped_checkpoint_changes_no_output(make_source, tmp_path, middle, final):
    convert_checkpoint(make_source(), tmp_path / "grouped", middle)
    report = convert_checkpoint(tmp_path / "grouped", tmp_path / "expanded", final)
    grouped, expanded = (
        loaded(transformers.AutoModelForMaskedLM, tmp_path / name) for name in ("grouped", "expanded")
    )
    assert expanded.config.num_key_value_heads == final
    torch.testing.assert_close(logits(expanded), logits(grouped), atol=1e-6, rtol=0)
    assert report.mean_logits_relative_error == report.mean_value_relative_error == 0.0


def test_pooling_a_grouped_checkpoint_further(make_source, tmp_path):
    source = make_source()
    convert_checkpoint(source, tmp_path / "six", 6)
    convert_checkpoint(tmp_path / "six", tmp_path / "two", 2)
    convert_checkpoint(source, tmp_path / "direct", 2)
    direct, twice = tensors_of(tmp_path / "direct"), tensors_of(tmp_path / "two")
    for name, tensor in direct.items():
        torch.testing.assert_close(twice[name], tensor)
    assert json.loads((tmp_path / "two" / REPORT_NAME).read_text())["heads"]["num_key_value_heads"] == [6, 2]


@pytest.mark.parametrize("architecture, head", HEADS, ids=HEAD_IDS)
def test_every_head_loads_under_its_own_class(architecture, head, tmp_path):
    architecture.upstream_model(head).save_pretrained(tmp_path / "source")
    alone = head in ("T5EncoderModel", "T5ForTokenClassification")
    field = "encoder_num_key_value_heads" if alone else "num_key_value_heads"
    convert_checkpoint(tmp_path / "source", tmp_path / "out", **{field: 4})
    model_class = getattr(hf_attn_variants, f"AttnVariant{head}")
    model, info = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert getattr(model.config, field) == 4
    assert model.config.architectures == [f"AttnVariant{head}"]


def test_the_folder_carries_what_save_pretrained_would(make_source, tmp_path):
    convert_checkpoint(make_source(), tmp_path / "out", 4)
    loaded(transformers.AutoModelForMaskedLM, tmp_path / "out").save_pretrained(tmp_path / "saved")
    code = {path.name: path.read_text() for path in (tmp_path / "saved").glob("*.py")}
    assert code and code == {path.name: path.read_text() for path in (tmp_path / "out").glob("*.py")}
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "out")]
    assert configs[0]["auto_map"] == configs[1]["auto_map"] and configs[0]["model_type"] == configs[1]["model_type"]


def test_shards_stay_shards(make_source, tmp_path):
    source = make_source(shard_size="20KB")
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 3
    convert_checkpoint(source, tmp_path / "out", 2, talking_heads="both")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == shards
    old, new = (json.loads((path / "model.safetensors.index.json").read_text()) for path in (source, tmp_path / "out"))
    assert old["weight_map"].items() <= new["weight_map"].items()
    for name, file in new["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            assert name in shard.keys()
    stored = tensors_of(tmp_path / "out")
    assert new["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    whole = convert_function(source, 2, talking_heads="both")
    assert all(torch.equal(stored[name], tensor) for name, tensor in whole.state_dict().items() if name in stored)
    assert loaded(transformers.AutoModelForMaskedLM, tmp_path / "out").config.talking_heads == "both"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtype_is_changed_where_asked_and_kept_otherwise(make_source, tmp_path, dtype):
    source = make_source(dtype=torch.float32)
    report = convert_checkpoint(source, tmp_path / "cast", 4, dtype=dtype)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "cast").values()} == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == dtype == report.dtype
    convert_checkpoint(tmp_path / "cast", tmp_path / "kept", 2)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "kept").values()} == {getattr(torch, dtype)}
    assert loaded(transformers.AutoModelForMaskedLM, tmp_path / "kept").dtype == getattr(torch, dtype)


def test_integer_tensors_and_unknown_ones_pass_through(make_source, edit_tensors, tmp_path):
    source = make_source()
    extra = {"bert.embeddings.position_ids": torch.arange(32)[None], "something.else": torch.randn(3)}
    edit_tensors(source, lambda tensors: tensors.update(extra))
    convert_checkpoint(source, tmp_path / "out", 4, dtype="bfloat16")
    after = tensors_of(tmp_path / "out")
    assert torch.equal(after["bert.embeddings.position_ids"], extra["bert.embeddings.position_ids"])
    assert torch.equal(after["something.else"], extra["something.else"].bfloat16())


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_keys_with_and_without_the_base_models_prefix(make_source, edit_tensors, tmp_path, prefix):
    source = make_source("BertModel")

    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    edit_tensors(source, rename)
    convert_checkpoint(source, tmp_path / "out", 4)
    stored = tensors_of(tmp_path / "out")
    assert stored[f"{prefix}encoder.layer.0.attention.self.key.weight"].shape == (16, 48)
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_old_names_of_layer_norms_still_load(make_source, edit_tensors, tmp_path):
    source = make_source("BertModel")

    def rename(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    edit_tensors(source, rename)
    convert_checkpoint(source, tmp_path / "out", 12)
    for model in (transformers.AutoModel.from_pretrained(tmp_path / "out"), convert_function(source, 12)):
        with torch.no_grad():
            expected = loaded(transformers.BertModel, source)(**INPUTS).last_hidden_state
            torch.testing.assert_close(model.eval()(**INPUTS).last_hidden_state, expected, atol=1e-6, rtol=0)


def test_identity_talking_heads_change_no_output(make_source, tmp_path):
    source = make_source()
    report = convert_checkpoint(source, tmp_path / "out", talking_heads="both")
    assert report.talking_heads == {"logits_proj": (12, 12), "weights_proj": (12, 12)}
    assert torch.equal(tensors_of(tmp_path / "out")[f"{LAYER}.self.weights_proj"], torch.eye(12))
    ours = loaded(transformers.AutoModelForMaskedLM, tmp_path / "out")
    torch.testing.assert_close(logits(ours), logits(loaded(transformers.BertForMaskedLM, source)), atol=1e-5, rtol=0)


def test_random_and_dynamic_talking_heads(make_source, tmp_path):
    options = {
        "talking_heads": "both",
        "talking_heads_init": "random",
        "num_softmax_heads": 8,
        "talking_heads_dynamic": ["x2l", "m2w"],
    }
    source = make_source()
    report = convert_checkpoint(source, tmp_path / "out", 4, **options)
    shapes = {"logits_proj": (12, 8), "weights_proj": (8, 12), "x2l_proj": (48, 12, 8), "m2w_proj": (48, 8, 12)}
    assert report.talking_heads == shapes
    stored = tensors_of(tmp_path / "out")
    for name, shape in shapes.items():
        tensor = stored[f"{LAYER}.self.{name}"]
        assert tuple(tensor.shape) == shape
        assert tensor.std().item() == pytest.approx(projection_std(name, shape, "random"), rel=0.2)
    convert_checkpoint(source, tmp_path / "again", 4, **options)
    convert_checkpoint(source, tmp_path / "other", 4, seed=1, **options)
    name = f"{LAYER}.self.logits_proj"
    assert torch.equal(tensors_of(tmp_path / "again")[name], stored[name])
    assert not torch.equal(tensors_of(tmp_path / "other")[name], stored[name])
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and torch.equal(model.state_dict()[name], stored[name])


def test_talking_heads_of_the_source_are_kept(tmp_path):
    from architectures import ARCHITECTURES

    model = ARCHITECTURES[0].model("BertForMaskedLM", "gqa_talking", num_key_value_heads=12)
    model.save_pretrained(tmp_path / "source")
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2)
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert torch.equal(before[f"{LAYER}.self.logits_proj"], after[f"{LAYER}.self.logits_proj"])
    # Twelve key heads but eight value heads, each pooled by its own group size.
    assert report.layers[0].key_heads == (12, 2) and report.layers[0].value_heads == (8, 2)
    name = f"{LAYER}.self.value.weight"
    assert torch.equal(after[name], mean_heads(before[name], 8, 2))
    assert loaded(transformers.AutoModelForMaskedLM, tmp_path / "out").config.num_softmax_heads == 6
    with pytest.raises(ValueError, match=r"has talking heads already.*`talking_heads`"):
        convert_checkpoint(tmp_path / "source", tmp_path / "other", 2, talking_heads="logits")


def test_random_keys_are_reproducible_layer_by_layer(make_source, tmp_path):
    source = make_source()
    convert_checkpoint(source, tmp_path / "out", 4, "random", seed=3)
    drawn = torch.empty(16, 48).normal_(0.0, 0.02, generator=seeded_generator(3, LAYER.removeprefix("bert.")))
    stored = tensors_of(tmp_path / "out")
    assert torch.equal(stored[f"{LAYER}.self.key.weight"], drawn)
    assert not torch.equal(stored[f"{LAYER.replace('1', '0')}.self.key.weight"], drawn)
    assert stored[f"{LAYER}.self.value.bias"].abs().max() == 0


def test_report(make_source, tmp_path):
    source = make_source("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    report = convert_checkpoint(source, tmp_path / "out", 3, seed=7)
    written = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert written["parameters"] == {
        "before": sum(tensor.numel() for tensor in before.values()),
        "after": sum(tensor.numel() for tensor in after.values()),
    }
    # 2 layers x (12 -> 3 key and as many value heads) x 4 numbers a head x 4 bytes, in each kind of attention.
    cache = {"before": 2 * 2 * 12 * 4 * 4, "after": 2 * 2 * 3 * 4 * 4}
    assert written["kv_cache_bytes_per_token"] == {"self": cache, "cross": cache}
    assert [(row["module"], row["site"]) for row in written["layers"]] == [
        ("encoder.layer.0.attention", "self"),
        ("encoder.layer.0.crossattention", "cross"),
        ("encoder.layer.1.attention", "self"),
        ("encoder.layer.1.crossattention", "cross"),
    ]
    assert all(0.1 < row["logits_relative_error"] < 2 for row in written["layers"])
    assert written["seed"] == 7 and written["method"] == "mean" and written["versions"]["torch"] == torch.__version__
    assert written["architecture"] == "AttnVariantBertLMHeadModel"
    text = report.summary()
    assert "12 -> 3" in text and "KV cache" in text and str(tmp_path / "out") in text


@pytest.mark.parametrize("encoder, decoder", [(4, 2), (None, 2), (4, None)])
def test_t5s_encoder_and_decoder_are_converted_separately(tmp_path, encoder, decoder):
    model = T5.upstream_model("T5ForConditionalGeneration")
    model.save_pretrained(tmp_path / "source")
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", decoder, encoder_num_key_value_heads=encoder)
    counts = {"encoder": encoder or 12, "decoder": decoder or 12, "cross": decoder or 12}
    rows = [(row.module, row.site, row.key_heads, row.value_heads) for row in report.layers]
    paths = {
        "encoder": "encoder.block.{}.layer.0.SelfAttention",
        "decoder": "decoder.block.{}.layer.0.SelfAttention",
        "cross": "decoder.block.{}.layer.1.EncDecAttention",
    }
    expected_rows = [
        (paths[site].format(i), site, (12, count), (12, count)) for site, count in counts.items() for i in range(2)
    ]
    assert sorted(rows) == sorted(expected_rows)
    for row in report.layers:
        changed = counts[row.site] != 12
        assert (row.change == "pool") is changed and (row.logits_relative_error > 0) is changed
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    expected = dict(before)
    for module, site, *_ in rows:
        for name in (f"{module}.k.weight", f"{module}.v.weight"):
            expected[name] = mean_heads(before[name], 12, counts[site]) if counts[site] != 12 else before[name]
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
    ours, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert ours.config.num_key_value_heads == counts["decoder"]
    assert ours.config.encoder_num_key_value_heads == counts["encoder"]


def test_an_encoder_has_no_cache(make_source, tmp_path):
    assert convert_checkpoint(make_source(), tmp_path / "out", 4).kv_cache_bytes_per_token is None


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_a_tokenizer_that_names_no_class_is_found_again(tmp_path, file):
    # As in old repositories, bert-base-uncased's for example, where upstream's model_type alone says which it is.
    source, out = make_tiny_bert(tmp_path / "source"), tmp_path / "out"
    for path in source.glob("*token*"):
        if path.name != file:
            path.unlink()
    (source / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 64}')
    convert_checkpoint(source, out, 2)
    expected, found = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert type(found) is type(expected) and found.pad_token == "[PAD]" and found.model_max_length == 64
    texts = (["Two dogs run.", "a cat"], ["Outside.", "in the house"])
    assert found(*texts, padding=True) == expected(*texts, padding=True)
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"


def test_a_tokenizer_class_of_the_source_stays(edit_config, tmp_path):
    source = make_tiny_bert(tmp_path / "source")
    (source / "tokenizer_config.json").unlink()
    edit_config(source, tokenizer_class="BertJapaneseTokenizer")
    convert_checkpoint(source, tmp_path / "out", 2)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "BertJapaneseTokenizer"}


def test_a_t5_keeps_its_softmax_heads(tmp_path):
    T5.upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path / "source")
    fields = {"talking_heads": "both", "num_softmax_heads": 8, "num_value_heads": 12, "talking_heads_init": "random"}
    with pytest.raises(ValueError, match="keeps the softmax heads of a T5, whose position bias has a column for each"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_side_files(make_source, tmp_path):
    source = make_source()
    kept = {
        "tokenizer.json": "{}",
        "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
        "1_Pooling/config.json": "{}",
        "2_Dense/model.safetensors": "weights of another module",
        "README.md": "text",
        "1_Pooling/all_results.json": "{}",
        "vocab.txt": "a",
    }
    dropped = [
        "pytorch_model.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.onnx",
        "rust_model.ot",
        "optimizer.pt",
        "training_args.bin",
        "2_Dense/pytorch_model.bin",
        "backup/model.safetensors",
        "onnx/model.txt",
        "checkpoint-5/trainer_state.json",
        "all_results.json",
        "predictions_dev_STS-B.tsv",
        "predictions_nbest_dev.json",
        "runs/events.out.tfevents.1",
        "train_log.jsonl",
        "training_curves.png",
        REPORT_NAME,
    ]
    for name, content in (kept | dict.fromkeys(dropped, "x") | {".git/HEAD": "x"}).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    report = convert_checkpoint(source, tmp_path / "out", 4)
    assert {name: (tmp_path / "out" / name).read_text() for name in kept} == kept
    assert not any((tmp_path / "out" / name).exists() for name in [*dropped, ".git/HEAD"] if name != REPORT_NAME)
    folders = {"onnx/model.txt": "onnx/", "checkpoint-5/trainer_state.json": "checkpoint-5/"}
    folders["runs/events.out.tfevents.1"] = "runs/"
    assert report.files_left_out == sorted(folders.get(name, name) for name in dropped)
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text())["method"] == "mean"


def test_links_of_the_hubs_cache_are_followed(make_source, tmp_path):
    source = make_source()
    (source / "vocab.txt").write_text("words")
    cached = tmp_path / "cache"
    cached.mkdir()
    for path in source.iterdir():
        (cached / path.name).symlink_to(path)
    convert_checkpoint(cached, tmp_path / "out", 4)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"


def test_a_module_folder_that_is_a_link_travels(make_source, tmp_path):
    source, elsewhere = make_source(), tmp_path / "pooling"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    (source / "1_Pooling").symlink_to(elsewhere)
    (source / "circle").symlink_to(source)
    report = convert_checkpoint(source, tmp_path / "out", 4)
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    assert "1_Pooling/config.json" in report.files_copied and not (tmp_path / "out" / "circle").exists()


def test_how_an_old_checkpoint_generates_goes_along(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "plain", 2)
    (tmp_path / "source" / "generation_config.json").unlink()
    convert_checkpoint(tmp_path / "source", tmp_path / "without", 2)
    assert not (tmp_path / "without" / "generation_config.json").exists()
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_beams": 4, "length_penalty": 0.6}))
    convert_checkpoint(tmp_path / "source", tmp_path / "out", 2)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    for model in (loaded, convert_function(tmp_path / "source", 2)):
        assert (model.generation_config.num_beams, model.generation_config.length_penalty) == (4, 0.6)
        assert model.generation_config.decoder_start_token_id == 0


def test_a_decoder_without_a_cache_generates_without_one(tmp_path):
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    assert json.loads((tmp_path / "source/generation_config.json").read_text())["use_cache"]
    fields = {"talking_heads": "both", "talking_heads_dynamic": ["m2l"]}
    convert_checkpoint(tmp_path / "source", tmp_path / "out", **fields)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    for model in (loaded, convert_function(tmp_path / "source", **fields)):
        assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 4)


def test_a_hub_that_cannot_be_reached_leaves_the_cache(monkeypatch):
    class NetworkError(Exception):
        """Of the client's HTTP library: no OSError."""

    def fail(*args, **kwargs):
        raise NetworkError

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(OSError, match="it is not in the cache, and the Hub cannot be reached"):
        resolve_source("nobody/has-this-checkpoint")


def test_pickles_on_the_hub_are_refused_before_they_are_downloaded(monkeypatch):
    files = ["config.json", "pytorch_model.bin", "training_args.bin"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *args, **kwargs: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(
        ValueError, match=r"'nobody/old' on the Hub are pickles \(pytorch_model\.bin\).*--allow_pickle"
    ):
        resolve_source("nobody/old")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **arguments: arguments["allow_patterns"][0])
    assert resolve_source("nobody/old", weights=False) == Path("config.json")


def test_a_download_that_breaks_off_says_so(monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("connection lost")

    files = ["config.json", "model.safetensors", "modules.json", "2_Dense/pytorch_model.bin", "onnx/pytorch_model.bin"]
    files += ["3_Dense/pytorch_model.bin", "3_Dense/model.safetensors"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *args, **kwargs: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match=r"'nobody/one' broke off \(RuntimeError: connection lost\): repeat"):
        resolve_source("nobody/one")
    assert "the weights of 2_Dense are pickles" in caplog.text


def pickled(source, shards=1):
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, source / "pytorch_model.bin")
        return source
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: tensors[name] for name in names[i::shards]}, source / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return source


@pytest.mark.parametrize("shards", [1, 2])
def test_a_pickle_becomes_safetensors_when_allowed(make_source, tmp_path, shards):
    source = make_source()
    convert_checkpoint(source, tmp_path / "expected", 4)
    pickled(source, shards)
    with pytest.raises(ValueError, match="is a pickle"):
        convert_checkpoint(source, tmp_path / "out", 4)
    report = convert_checkpoint(source, tmp_path / "out", 4, allow_pickle=True)
    expected, stored = tensors_of(tmp_path / "expected"), tensors_of(tmp_path / "out")
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert not list((tmp_path / "out").glob("*.bin")) and report.files_left_out == []
    assert len(list((tmp_path / "out").glob("model*.safetensors"))) == shards
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")


IMPOSSIBLE = [
    ({"num_key_value_heads": 5}, "must divide `num_attention_heads`: got 5 for 12"),
    ({"num_key_value_heads": 0}, "at least 1; got 0"),
    ({"num_key_value_heads": 24}, "got 24 for 12"),
    (
        {"num_key_value_heads": 4, "method": "median"},
        "`method` must be one of mean, first, random, aligned, calibrated; got 'median'",
    ),
    (
        {"num_key_value_heads": 4, "encoder_num_key_value_heads": 2},
        "`encoder_num_key_value_heads` is not a field of 'bert'",
    ),
    ({"num_kv_heads": 4}, "`num_kv_heads` is not a field of 'bert' checkpoints: did you mean `num_key_value_heads`?"),
    ({"num_key_value_heads": 4, "dtype": "int8"}, "`dtype` must be one of float64, float32"),
    ({}, "nothing to convert"),
    ({"talking_heads": "all"}, "`talking_heads` must be"),
    ({"talking_heads": "both", "num_softmax_heads": 24}, "needs equal head counts"),
    (
        {"talking_heads": "weights", "num_value_heads": 6, "talking_heads_init": "random"},
        "keeps the value heads: the source has 12, the new config 6",
    ),
    ({"talking_heads_dynamic": ["x2l"]}, "does not have"),
    ({"num_key_value_heads": 4, "revision": "main"}, "`revision` is for Hub ids"),
]


@pytest.mark.parametrize(
    "options, message", IMPOSSIBLE, ids=lambda value: None if isinstance(value, dict) else value[:30]
)
def test_impossible_conversions_fail_before_any_work(make_source, tmp_path, options, message):
    source = make_source()
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_counts_of_which_neither_divides_the_other(make_source, tmp_path):
    convert_checkpoint(make_source(), tmp_path / "six", 6)
    with pytest.raises(ValueError, match="6 key/value heads cannot become 4"):
        convert_checkpoint(tmp_path / "six", tmp_path / "out", 4)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are bert"),
        ({"model_type": None}, "has no `model_type`"),
        (
            {"architectures": ["BertForEverything"]},
            "'BertForEverything' is not supported; supported are transformers' AlbertForMaskedLM",
        ),
        ({"num_attention_heads": 7}, "must divide `hidden_size`"),
        ({"num_attention_heads": 8, "hidden_size": 96}, r"has shape \[48, 48\]"),
        ({"num_hidden_layers": 3}, "no tensor 'encoder.layer.2.attention.self.query.weight'; it has"),
        ({"hidden_size": "wide"}, "configuration is wrong"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 2}}}, "per_layer_config"),
    ],
)
def test_sources_that_cannot_be_converted(make_source, edit_config, tmp_path, fields, message):
    source = make_source()
    edit_config(source, **fields)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


BAD_CONFIGS = [
    ({"hidden_act": "foo"}, r"is wrong \(.*config\.json\): KeyError: 'foo'"),
    ({"pad_token_id": 999}, r"is wrong \(.*config\.json\): AssertionError: Padding_idx"),
    ({"vocab_size": -3}, r"is wrong \(.*config\.json\): `vocab_size` must be a whole number, at least 1; got -3"),
    ({"type_vocab_size": -3}, r"is wrong \(.*config\.json\): RuntimeError: .*negative dimension -3"),
    ({"id2label": 3}, r"is wrong \(.*config\.json\): (AttributeError|.*'id2label')"),
    ({"dtype": "nonsense"}, r"is wrong \(.*config\.json\): .*nonsense"),
    ({"dtype": 5}, r"is wrong \(.*config\.json\): `dtype` must be the name of a torch dtype; got 5"),
    ({"dtype": "nn"}, r"is wrong \(.*config\.json\): `dtype` must be the name of a torch dtype; got 'nn'"),
    ({"talking_heads_dynamic": 7}, r"is wrong \(.*config\.json\): `talking_heads_dynamic` must be a list"),
    ({"talking_heads_dynamic": True}, r"is wrong \(.*config\.json\): `talking_heads_dynamic` must be a list"),
    ({"talking_heads_dynamic": [["x2l"]]}, r"is wrong \(.*config\.json\): `talking_heads_dynamic` must be distinct"),
    ({"architectures": [5]}, r"config\.json: `architectures` must be a list of class names; got \[5\]"),
    ({"architectures": 5}, r"config\.json: `architectures` must be a list of class names; got 5"),
    ({"architectures": "BertForMaskedLM"}, r"config\.json: `architectures` must be a list .* got 'BertForMaskedLM'"),
]


@pytest.mark.parametrize("fields, message", BAD_CONFIGS, ids=lambda value: json.dumps(value)[:40])
@pytest.mark.parametrize("to_folder", [True, False])
def test_a_wrong_value_in_the_config_is_a_value_error_that_names_the_file(
    make_source, edit_config, tmp_path, to_folder, fields, message
):
    source = make_source()
    edit_config(source, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        convert_function(source, 4, output_dir=tmp_path / "out" if to_folder else None)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "head, fields, edit, name",
    [
        ("BertForMaskedLM", {}, {"num_hidden_layers": 1}, r"bert\.encoder\.layer\.1\.attention"),
        ("BertModel", {}, {"num_hidden_layers": 1}, r"'encoder\.layer\.1\.attention"),
        (
            "BertLMHeadModel",
            {"is_decoder": True, "add_cross_attention": True},
            {"add_cross_attention": False},
            "crossattention",
        ),
    ],
)
def test_attention_that_the_config_does_not_mention(make_source, edit_config, tmp_path, head, fields, edit, name):
    source = make_source(head, **fields)
    edit_config(source, **edit)
    with pytest.raises(ValueError, match=rf"holds \d+ attention tensors .* does not have: .*{name}"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_missing_architecture_means_the_base_model(make_source, edit_config, tmp_path):
    source = make_source()
    edit_config(source, architectures=None)
    assert convert_checkpoint(source, tmp_path / "out", 4).architecture == "AttnVariantBertModel"
    ours = loaded(transformers.AutoModelForMaskedLM, tmp_path / "out")
    assert torch.equal(
        ours.bert.encoder.layer[1].output.dense.weight, tensors_of(source)["bert.encoder.layer.1.output.dense.weight"]
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_a_config_that_is_none(make_source, tmp_path, content):
    source = make_source()
    (source / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|has no `model_type`)"):
        convert_checkpoint(source, tmp_path / "out", 4)
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        convert_checkpoint(source, tmp_path / "out", 4)


def test_a_tensor_is_missing(make_source, edit_tensors, tmp_path):
    source = make_source()
    edit_tensors(source, lambda tensors: tensors.pop(f"{LAYER}.self.value.bias"))
    with pytest.raises(ValueError, match=rf"has no tensor '{LAYER}\.self\.value\.bias'"):
        convert_checkpoint(source, tmp_path / "out", 4)


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_truncated_file_fails_before_any_work(make_source, tmp_path, shard_size):
    source = make_source(shard_size=shard_size)
    last = sorted(source.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(OSError, match=f"{last.name} is truncated"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_no_such_source(tmp_path):
    for name in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            convert_checkpoint(name, tmp_path / "out", 4)
    with pytest.raises(OSError, match="not in the cache, and the Hub cannot be reached"):
        convert_checkpoint("someone/nothing-of-the-kind", tmp_path / "out", 4)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="give the checkpoint's folder"):
        convert_checkpoint(tmp_path / "file", tmp_path / "out", 4)


def test_the_output_must_be_new_or_empty(make_source, tmp_path):
    source = make_source()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty"):
        convert_checkpoint(source, tmp_path / "full", 4)
    with pytest.raises(NotADirectoryError, match="is a file"):
        convert_checkpoint(source, tmp_path / "full" / "mine", 4)
    with pytest.raises(NotADirectoryError, match="which is a file"):
        convert_checkpoint(source, tmp_path / "full" / "mine" / "deeper", 4)
    with pytest.raises(ValueError, match="lies inside the source"):
        convert_checkpoint(source, source / "inside", 4)
    (tmp_path / "empty").mkdir()
    convert_checkpoint(source, tmp_path / "empty", 4)
    convert_checkpoint(source, tmp_path / "not" / "yet" / "there", 4)
    expected = {*os.listdir(tmp_path / "empty")}
    assert expected == {*os.listdir(tmp_path / "not" / "yet" / "there")} and "config.json" in expected


def test_the_working_directory(make_source, tmp_path, monkeypatch):
    source = make_source()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inode = os.stat(".").st_ino
    report = convert_checkpoint("../source", ".", 4)
    assert report.output_dir == "." and os.stat(tmp_path / "here").st_ino == inode
    convert_checkpoint(source, tmp_path / "new", 4)
    assert sorted(os.listdir(".")) == sorted(os.listdir(tmp_path / "new"))
    assert loaded(transformers.AutoModelForMaskedLM, tmp_path / "here").config.num_key_value_heads == 4
    with pytest.raises(FileExistsError, match="is not empty"):
        convert_checkpoint(source, ".", 4)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_an_empty_or_a_missing_folder(make_source, tmp_path, exists):
    source = make_source()
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert_checkpoint(source, tmp_path / "link", 4)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "source"]


def test_a_link_to_itself(make_source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="is a link to itself"):
        convert_checkpoint(make_source(), tmp_path / "loop", 4)


def test_an_empty_mount_point(make_source, tmp_path, monkeypatch):
    # What the kernel does with one: it cannot be removed, and nothing can be renamed into or out of it.
    mount = tmp_path / "mount"
    mount.mkdir()
    rename, rmdir = os.rename, Path.rmdir

    def checked_rename(old, new):
        if (mount in Path(old).parents) != (mount in Path(new).parents):
            raise OSError(18, "Invalid cross-device link")
        rename(old, new)

    def checked_rmdir(folder):
        if folder == mount:
            raise OSError(16, "Device or resource busy")
        rmdir(folder)

    monkeypatch.setattr(os, "rename", checked_rename)
    monkeypatch.setattr(Path, "rmdir", checked_rmdir)
    convert_checkpoint(make_source(), mount, 4)
    assert (mount / "config.json").is_file() and not list(mount.glob(".*"))


def test_an_existing_folder_gets_all_or_nothing_and_its_config_last(tmp_path, monkeypatch):
    names = ["config.json", "a.txt", "z.safetensors"]
    moved, rename = [], os.rename

    def failing_rename(old, new):
        if Path(new).parent == tmp_path:
            moved.append(Path(new).name)
            if len(moved) == len(names):
                raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing_rename)
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path) as stage:
        for name in names:
            (stage / name).write_text("x")
    assert moved == ["a.txt", "z.safetensors", "config.json"] and list(tmp_path.iterdir()) == []


def test_what_came_into_the_folder_in_the_meantime_is_not_lost(tmp_path):
    with pytest.raises(FileExistsError, match="in the meantime"), staged_folder(tmp_path) as stage:
        (stage / "config.json").write_text("ours")
        (tmp_path / "config.json").write_text("theirs")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "theirs")]


def test_sigterm_leaves_no_half_written_folder(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, staged_folder(tmp_path / "out") as stage:
        (stage / "model.safetensors").write_text("x")
        os.kill(os.getpid(), signal.SIGTERM)
        (stage / "config.json").write_text("never reached")
    assert stopped.value.code == 143 and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_link_that_leads_nowhere_is_named(make_source, tmp_path):
    source = make_source()
    (source / "vocab.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"vocab.txt is a link to a file that is not there"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch, make_source):
    monkeypatch.chdir(make_source())
    with pytest.raises(FileNotFoundError, match="empty name"):
        convert_checkpoint("", tmp_path / "out", 4)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(make_source, tmp_path):
    source = make_source()
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="is not writable"):
        convert_checkpoint(source, tmp_path / "locked" / "out", 4)


def test_a_full_disk_is_noticed_before_any_work(make_source, tmp_path, monkeypatch):
    source = make_source()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match="not enough disk space"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


class FailsInTheSecondLayer:
    name = "fails"

    def __init__(self, error):
        self.error = error

    def pool(self, tensors, heads, layer):
        if "layer.1." in layer.module:
            raise self.error
        return hf_attn_variants.conversion.METHODS["mean"]().pool(tensors, heads, layer)


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyboardInterrupt(), OSError(28, "No space left on device")]
)
def test_a_failure_in_the_middle_leaves_nothing(make_source, tmp_path, error):
    source = make_source()
    before = snapshot(tmp_path)
    with pytest.raises(type(error)):
        convert_checkpoint(source, tmp_path / "new" / "out", 4, FailsInTheSecondLayer(error))
    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(type(error)):
        convert_checkpoint(source, tmp_path / "empty", 4, FailsInTheSecondLayer(error))
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_method_of_ones_own(make_source, tmp_path):
    class Wrong:
        name = "wrong"

        def pool(self, tensors, heads, layer):
            return tensors

    with pytest.raises(ValueError, match=r"method 'wrong' gave key_weight of shape \[48, 48\].*not \[16, 48\]"):
        convert_checkpoint(make_source(), tmp_path / "out", 4, Wrong())


def test_the_source_is_left_as_it_was(make_source, tmp_path):
    source = make_source()
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert_checkpoint(source, tmp_path / "out", 4)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
