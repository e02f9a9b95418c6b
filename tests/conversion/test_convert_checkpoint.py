"""Check the conversion of checkpoint folders: the weights and the report."""

import json

import pytest
import torch
import transformers
from architectures import BERT, T5
from safetensors import safe_open

from hf_attn_variants.conversion import convert as convert_function
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.attention_tensors import average_heads, repeat_heads
from hf_attn_variants.files import REPORT_NAME
from hf_attn_variants.modeling.mechanisms.talking_heads import get_talking_heads_init_std

from .conftest import LAYER, load_model, load_tensors

INPUTS = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]]),
}


def is_key_or_value(name):
    return ".self.key." in name or ".self.value." in name


def compute_logits(model):
    with torch.no_grad():
        return model(**INPUTS).logits


def assert_same_logits(folder, source, atol):
    """Compare a converted folder with another one, or with the model of Transformers in it."""
    models = (load_model(transformers.AutoModelForMaskedLM, item) for item in (folder, source))
    actual, expected = map(compute_logits, models)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 4, 6])
def test_only_keys_and_values_change_in_a_conversion(make_source, tmp_path, kv_heads):
    source = make_source()
    convert_checkpoint(source, tmp_path / "out", kv_heads)
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    assert list(sorted(before)) == list(sorted(after))
    for name, tensor in before.items():
        expected = average_heads(tensor, 12, kv_heads) if is_key_or_value(name) else tensor
        assert torch.equal(after[name], expected), name
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_remote_code_of_a_checkpoint_gives_a_warning_and_is_not_run(make_source, tmp_path, caplog):
    source = make_source()
    config = json.loads((source / "config.json").read_text())
    auto_map = {"AutoModel": "modeling_x.XModel", "AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    (source / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    for name in ("modeling_x.py", "tokenization_x.py"):
        (source / name).write_text("raise SystemExit\n")
    convert_checkpoint(source, tmp_path / "out", 4)
    assert "The checkpoint's remote code (modeling_x.XModel) is not run" in caplog.text
    caplog.clear()
    convert_checkpoint(tmp_path / "out", tmp_path / "again", 2)  # the code of this package
    assert "remote code" not in caplog.text


def test_equal_heads_per_group_convert_without_loss(make_source, edit_tensors, tmp_path):
    source = make_source()

    def tie_heads(tensors):
        for name in filter(is_key_or_value, list(tensors)):
            tensors[name] = repeat_heads(average_heads(tensors[name], 12, 4), 4, 12)

    edit_tensors(source, tie_heads)
    report = convert_checkpoint(source, tmp_path / "out", 4)
    assert [(row.logits_relative_error, row.value_relative_error) for row in report.layers] == [(0.0, 0.0)] * 2
    assert_same_logits(tmp_path / "out", source, 1e-5)


def test_conversion_to_the_same_head_count_changes_nothing(make_source, tmp_path):
    source = make_source()
    report = convert_checkpoint(source, tmp_path / "out", 12)
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {row.change for row in report.layers} == {"same"} and report.mean_logits_relative_error == 0.0
    assert "relative error of logits" not in report.summary()  # equal weights can still give other outputs
    assert_same_logits(tmp_path / "out", source, 1e-6)


@pytest.mark.parametrize("middle, final", [(4, 12), (2, 4), (1, 12), (1, 1)])
def test_expanding_grouped_heads_changes_no_output(make_source, tmp_path, middle, final):
    convert_checkpoint(make_source(), tmp_path / "grouped", middle)
    report = convert_checkpoint(tmp_path / "grouped", tmp_path / "expanded", final)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "expanded").num_key_value_heads == final
    assert_same_logits(tmp_path / "expanded", tmp_path / "grouped", 1e-6)
    assert report.mean_logits_relative_error == report.mean_value_relative_error == 0.0


def test_grouped_checkpoint_can_be_pooled_further(make_source, tmp_path):
    source = make_source()
    convert_checkpoint(source, tmp_path / "six", 6)
    convert_checkpoint(tmp_path / "six", tmp_path / "two", 2)
    convert_checkpoint(source, tmp_path / "direct", 2)
    direct, twice = load_tensors(tmp_path / "direct"), load_tensors(tmp_path / "two")
    for name, tensor in direct.items():
        torch.testing.assert_close(twice[name], tensor)
    assert json.loads((tmp_path / "two" / REPORT_NAME).read_text())["heads"]["num_key_value_heads"] == [6, 2]


def test_output_folder_has_the_files_of_save_pretrained(make_source, tmp_path):
    convert_checkpoint(make_source(), tmp_path / "out", 4)
    load_model(transformers.AutoModelForMaskedLM, tmp_path / "out").save_pretrained(tmp_path / "saved")
    code = {path.name: path.read_text() for path in (tmp_path / "saved").glob("*.py")}
    assert code and code == {path.name: path.read_text() for path in (tmp_path / "out").glob("*.py")}
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "out")]
    assert configs[0]["auto_map"] == configs[1]["auto_map"] and configs[0]["model_type"] == configs[1]["model_type"]


def test_sharded_checkpoint_stays_sharded(make_source, tmp_path):
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
    stored = load_tensors(tmp_path / "out")
    assert new["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    converted = convert_function(source, 2, talking_heads="both")
    assert all(torch.equal(stored[name], tensor) for name, tensor in converted.state_dict().items() if name in stored)
    assert load_model(transformers.AutoModelForMaskedLM, tmp_path / "out").config.talking_heads == "both"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtype_changes_only_on_request(make_source, tmp_path, dtype):
    source = make_source(dtype=torch.float32)
    report = convert_checkpoint(source, tmp_path / "cast", 4, dtype=dtype)
    assert {tensor.dtype for tensor in load_tensors(tmp_path / "cast").values()} == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == dtype == report.dtype
    convert_checkpoint(tmp_path / "cast", tmp_path / "kept", 2)
    assert {tensor.dtype for tensor in load_tensors(tmp_path / "kept").values()} == {getattr(torch, dtype)}
    assert load_model(transformers.AutoModelForMaskedLM, tmp_path / "kept").dtype == getattr(torch, dtype)


def test_integer_and_unknown_tensors_are_copied(make_source, edit_tensors, tmp_path):
    source = make_source()
    extra = {"bert.embeddings.position_ids": torch.arange(32)[None], "something.else": torch.randn(3)}
    edit_tensors(source, lambda tensors: tensors.update(extra))
    convert_checkpoint(source, tmp_path / "out", 4, dtype="bfloat16")
    after = load_tensors(tmp_path / "out")
    assert torch.equal(after["bert.embeddings.position_ids"], extra["bert.embeddings.position_ids"])
    assert torch.equal(after["something.else"], extra["something.else"].bfloat16())


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_tensor_names_with_and_without_the_base_prefix_are_read(make_source, edit_tensors, tmp_path, prefix):
    source = make_source("BertModel")

    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    edit_tensors(source, rename)
    convert_checkpoint(source, tmp_path / "out", 4)
    stored = load_tensors(tmp_path / "out")
    assert stored[f"{prefix}encoder.layer.0.attention.self.key.weight"].shape == (16, 48)
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_identity_talking_heads_of_a_conversion_change_no_output(make_source, tmp_path):
    source = make_source()
    report = convert_checkpoint(source, tmp_path / "out", talking_heads="both")
    assert report.talking_heads == {"logits_proj": (12, 12), "weights_proj": (12, 12)}
    assert torch.equal(load_tensors(tmp_path / "out")[f"{LAYER}.self.weights_proj"], torch.eye(12))
    assert_same_logits(tmp_path / "out", source, 1e-5)


def test_random_and_dynamic_talking_heads_are_added(make_source, tmp_path):
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
    stored = load_tensors(tmp_path / "out")
    for name, shape in shapes.items():
        tensor = stored[f"{LAYER}.self.{name}"]
        assert tuple(tensor.shape) == shape
        assert tensor.std().item() == pytest.approx(get_talking_heads_init_std(name, shape, "random"), rel=0.2)
    convert_checkpoint(source, tmp_path / "again", 4, **options)
    convert_checkpoint(source, tmp_path / "other", 4, seed=1, **options)
    name = f"{LAYER}.self.logits_proj"
    assert torch.equal(load_tensors(tmp_path / "again")[name], stored[name])
    assert not torch.equal(load_tensors(tmp_path / "other")[name], stored[name])
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and torch.equal(model.state_dict()[name], stored[name])


def test_talking_heads_of_the_source_stay(tmp_path):
    model = BERT.make_model("BertForMaskedLM", "gqa_talking", num_key_value_heads=12)
    model.save_pretrained(tmp_path / "source")
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2)
    before, after = load_tensors(tmp_path / "source"), load_tensors(tmp_path / "out")
    assert torch.equal(before[f"{LAYER}.self.logits_proj"], after[f"{LAYER}.self.logits_proj"])
    # The 12 key heads and the 8 value heads are pooled in groups of different sizes.
    assert report.layers[0].key_heads == (12, 2) and report.layers[0].value_heads == (8, 2)
    name = f"{LAYER}.self.value.weight"
    assert torch.equal(after[name], average_heads(before[name], 8, 2))
    assert load_model(transformers.AutoModelForMaskedLM, tmp_path / "out").config.num_softmax_heads == 6
    with pytest.raises(ValueError, match="`talking_heads`"):
        convert_checkpoint(tmp_path / "source", tmp_path / "other", 2, talking_heads="logits")


def test_report_lists_errors_and_sizes(make_source, tmp_path):
    source = make_source("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    report = convert_checkpoint(source, tmp_path / "out", 3, seed=7)
    written = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    assert written["parameters"] == {
        "before": sum(tensor.numel() for tensor in before.values()),
        "after": sum(tensor.numel() for tensor in after.values()),
    }
    # For each kind of attention, 2 layers x (12 -> 3 key heads and as many value heads) x 4 numbers x 4 bytes.
    cache = {"before": 2 * 2 * 12 * 4 * 4, "after": 2 * 2 * 3 * 4 * 4}
    assert written["kv_cache_bytes_per_token"] == {"self": cache, "cross": cache}
    modules = [(row["module"].removeprefix("encoder.layer."), row["site"]) for row in written["layers"]]
    assert modules[:2] == [("0.attention", "self"), ("0.crossattention", "cross")]
    assert modules[2:] == [("1.attention", "self"), ("1.crossattention", "cross")]
    assert all(0.1 < row["logits_relative_error"] < 2 for row in written["layers"])
    assert written["seed"] == 7 and written["method"] == "mean" and written["versions"]["torch"] == torch.__version__
    assert written["architecture"] == "AttnVariantBertLMHeadModel"
    text = report.summary()
    assert "12 -> 3" in text and "cache per token" in text and str(tmp_path / "out") in text


@pytest.mark.parametrize("encoder, decoder", [(4, 2), (None, 2), (4, None)])
def test_encoder_and_decoder_of_t5_are_converted_separately(tmp_path, encoder, decoder):
    model = T5.make_upstream_model("T5ForConditionalGeneration")
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
    before, after = load_tensors(tmp_path / "source"), load_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    expected = dict(before)
    for module, site, *_ in rows:
        for name in (f"{module}.k.weight", f"{module}.v.weight"):
            expected[name] = average_heads(before[name], 12, counts[site]) if counts[site] != 12 else before[name]
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
    converted, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert converted.config.num_key_value_heads == counts["decoder"]
    assert converted.config.encoder_num_key_value_heads == counts["encoder"]


def test_encoder_report_has_no_cache(make_source, tmp_path):
    assert convert_checkpoint(make_source(), tmp_path / "out", 4).kv_cache_bytes_per_token is None
