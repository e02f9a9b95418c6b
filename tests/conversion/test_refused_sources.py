"""Check that impossible conversions and broken sources raise errors before any work."""

import json
import os

import pytest
import torch
import transformers
from architectures import T5

from hf_attn_variants.conversion import convert as convert_function
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.checkpoint.models import reading_checkpoint

from .conftest import LAYER, loaded, tensors_of


def test_softmax_heads_of_t5_cannot_change(tmp_path):
    T5.upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path / "source")
    fields = {"talking_heads": "both", "num_softmax_heads": 8, "num_value_heads": 12, "talking_heads_init": "random"}
    with pytest.raises(ValueError, match="`num_softmax_heads` must stay 12 in a T5"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


IMPOSSIBLE = [
    ({"num_key_value_heads": 5}, "must divide `num_attention_heads`, got 5 for 12"),
    ({"num_key_value_heads": 0}, "at least 1, got 0"),
    ({"num_key_value_heads": 24}, "got 24 for 12"),
    (
        {"num_key_value_heads": 4, "method": "median"},
        "`method` must be one of mean, first, random, aligned, calibrated, got 'median'",
    ),
    (
        {"num_key_value_heads": 4, "encoder_num_key_value_heads": 2},
        "`encoder_num_key_value_heads` must be a field of 'bert'",
    ),
    ({"calibration_file": "x.txt"}, "`calibration_file` must be a field of 'bert'"),
    ({"num_kv_heads": 4}, "`num_kv_heads` must be a field of 'bert' models. Did you mean `num_key_value_heads`?"),
    ({"num_key_value_heads": 4, "dtype": "int8"}, "`dtype` must be one of float64, float32"),
    (
        {},
        "nothing to convert. Give one of `num_key_value_heads`, `kv_lora_rank`, `talking_heads`, "
        "`cross_talking_heads`, `attention_pattern`, `attention_kernel`, `per_layer_values`.",
    ),
    ({"attention_window": 4}, "`attention_window` has no effect without `attention_pattern`"),
    ({"per_layer_values": {"kv_lora_rank": [None, None]}}, "`per_layer_values` must contain a value"),
    ({"talking_heads": "all"}, "`talking_heads` must be"),
    ({"talking_heads": "both", "num_softmax_heads": 24}, "`talking_heads_init`"),
    (
        {"talking_heads": "weights", "num_value_heads": 6, "talking_heads_init": "random"},
        "`num_value_heads` must stay 12.* got 6",
    ),
    ({"talking_heads_dynamic": ["x2l"]}, "`talking_heads_dynamic`"),
    ({"num_key_value_heads": 4, "revision": "main"}, "`revision` must only be given for a Hub id"),
]


@pytest.mark.parametrize(
    "options, message", IMPOSSIBLE, ids=lambda value: None if isinstance(value, dict) else value[:30]
)
def test_impossible_conversions_fail_before_any_work(make_source, tmp_path, options, message):
    source = make_source()
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_head_counts_that_do_not_divide_raise_an_error(make_source, tmp_path):
    convert_checkpoint(make_source(), tmp_path / "six", 6)
    with pytest.raises(ValueError, match="6 key/value heads cannot become 4"):
        convert_checkpoint(tmp_path / "six", tmp_path / "out", 4)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported. Use one of bert"),
        ({"model_type": None}, "must contain `model_type`"),
        (
            {"architectures": ["BertForEverything"]},
            "'BertForEverything' is not supported. Use one of AlbertForMaskedLM",
        ),
        ({"num_attention_heads": 7}, "must divide `hidden_size`"),
        ({"num_attention_heads": 8, "hidden_size": 96}, r"got \[48, 48\]"),
        ({"num_hidden_layers": 3}, "no tensor 'encoder.layer.2.attention.self.query.weight'. It has"),
        ({"hidden_size": "wide"}, "configuration of the original model is wrong"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "`quantization_config`"),
        (
            {"per_layer_config": {"0": {"num_key_value_heads": 2}}},
            r"must have shape \[8, 48\] .* got \[48, 48\]",
        ),
    ],
)
def test_unsupported_sources_raise_an_error(make_source, edit_config, tmp_path, fields, message):
    source = make_source()
    edit_config(source, **fields)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


BAD_CONFIGS = [
    ({"hidden_act": "foo"}, r"is wrong \(.*config\.json\): KeyError: 'foo'"),
    ({"pad_token_id": 999}, r"is wrong \(.*config\.json\): AssertionError: Padding_idx"),
    ({"vocab_size": -3}, r"is wrong \(.*config\.json\): `vocab_size` must be a whole number of at least 1, got -3"),
    ({"type_vocab_size": -3}, r"is wrong \(.*config\.json\): RuntimeError: .*negative dimension -3"),
    ({"id2label": 3}, r"is wrong \(.*config\.json\): (.*AttributeError|.*'id2label')"),
    ({"dtype": "nonsense"}, r"is wrong \(.*config\.json\): .*nonsense"),
    ({"dtype": 5}, r"is wrong \(.*config\.json\): `dtype` must be the name of a torch dtype, got 5"),
    ({"dtype": "nn"}, r"is wrong \(.*config\.json\): `dtype` must be the name of a torch dtype, got 'nn'"),
    ({"talking_heads_dynamic": 7}, r"is wrong \(.*config\.json\): `talking_heads_dynamic`"),
    ({"talking_heads_dynamic": True}, r"is wrong \(.*config\.json\): `talking_heads_dynamic`"),
    ({"talking_heads_dynamic": [["x2l"]]}, r"is wrong \(.*config\.json\): `talking_heads_dynamic`"),
    ({"architectures": [5]}, r"config\.json: `architectures` must be a list of class names, got \[5\]"),
    ({"architectures": 5}, r"config\.json: `architectures` must be a list of class names, got 5"),
    ({"architectures": "BertForMaskedLM"}, r"config\.json: `architectures` must be a list .* got 'BertForMaskedLM'"),
]


@pytest.mark.parametrize("fields, message", BAD_CONFIGS, ids=lambda value: json.dumps(value)[:40])
@pytest.mark.parametrize("to_folder", [True, False])
def test_invalid_config_value_error_names_the_file(make_source, edit_config, tmp_path, to_folder, fields, message):
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
def test_attention_tensors_without_their_field_raise_an_error(
    make_source, edit_config, tmp_path, head, fields, edit, name
):
    source = make_source(head, **fields)
    edit_config(source, **edit)
    with pytest.raises(ValueError, match=rf"has \d+ attention tensors .* does not have: .*{name}"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_missing_architecture_loads_the_base_model(make_source, edit_config, tmp_path):
    source = make_source()
    edit_config(source, architectures=None)
    assert convert_checkpoint(source, tmp_path / "out", 4).architecture == "AttnVariantBertModel"
    ours = loaded(transformers.AutoModelForMaskedLM, tmp_path / "out")
    assert torch.equal(
        ours.bert.encoder.layer[1].output.dense.weight, tensors_of(source)["bert.encoder.layer.1.output.dense.weight"]
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_invalid_config_json_raises_an_error(make_source, tmp_path, content):
    source = make_source()
    (source / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json (must be a JSON file|must contain `model_type`)"):
        convert_checkpoint(source, tmp_path / "out", 4)
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"must contain config\.json"):
        convert_checkpoint(source, tmp_path / "out", 4)


def test_missing_tensor_raises_an_error(make_source, edit_tensors, tmp_path):
    source = make_source()
    edit_tensors(source, lambda tensors: tensors.pop(f"{LAYER}.self.value.bias"))
    with pytest.raises(ValueError, match=rf"has no tensor '{LAYER}\.self\.value\.bias'"):
        convert_checkpoint(source, tmp_path / "out", 4)


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_truncated_file_raises_before_any_work(make_source, tmp_path, shard_size):
    source = make_source(shard_size=shard_size)
    last = sorted(source.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(OSError, match=f"{last.name} is truncated"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_user_defined_method_is_supported(make_source, tmp_path):
    class Wrong:
        name = "wrong"

        def pool(self, tensors, heads, layer):
            return tensors

    with pytest.raises(ValueError, match=r"'wrong' must return key_weight of shape \[16, 48\].* got \[48, 48\]"):
        convert_checkpoint(make_source(), tmp_path / "out", 4, Wrong())


def test_error_without_a_name_gets_the_checkpoint_name(tmp_path):
    """Check a missing tokenizer, for which Transformers only reports a failed connection."""
    with pytest.raises(OSError, match="There is no folder 'nowhere', and as a Hub id: cannot connect"):
        with reading_checkpoint("nowhere"):
            raise OSError("cannot\nconnect")
    with pytest.raises(ValueError, match=f"^{tmp_path}: cannot be made$"), reading_checkpoint(tmp_path):
        raise ValueError("cannot be made")
    with pytest.raises(ValueError, match=f"^in {tmp_path}$"), reading_checkpoint(tmp_path):
        raise ValueError(f"in {tmp_path}")
