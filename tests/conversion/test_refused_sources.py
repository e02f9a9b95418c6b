"""Check that impossible conversions and broken sources raise errors before any work."""

import json

import pytest
import torch
import transformers
from architectures import T5

from hf_attn_variants.conversion import convert as convert_function
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.checkpoint.models import convert_loading_errors

from .conftest import LAYER, load_model, load_tensors


def test_softmax_heads_of_t5_cannot_change(tmp_path):
    T5.make_upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path / "source")
    fields = {"talking_heads": "both", "num_softmax_heads": 8, "num_value_heads": 12, "talking_heads_init": "random"}
    with pytest.raises(ValueError, match="`num_softmax_heads`"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


IMPOSSIBLE = [
    ({"num_key_value_heads": 5}, "`num_attention_heads`"),
    ({"num_key_value_heads": 0}, "from 1 to 12, got 0"),
    ({"num_key_value_heads": 24}, "from 1 to 12, got 24"),
    ({"num_key_value_heads": 4, "method": "median"}, "`method`"),
    ({"num_key_value_heads": 4, "encoder_num_key_value_heads": 2}, "`encoder_num_key_value_heads`"),
    ({"calibration_file": "x.txt"}, "`calibration_file`"),
    ({"num_kv_heads": 4}, "`num_kv_heads`"),
    ({"num_key_value_heads": 4, "dtype": "int8"}, "`dtype`"),
    ({}, "`num_key_value_heads`"),
    ({"talking_heads": "all"}, "`talking_heads` must be"),
    ({"talking_heads": "both", "num_softmax_heads": 24}, "`talking_heads_init`"),
    ({"talking_heads": "weights", "num_value_heads": 6, "talking_heads_init": "random"}, "`num_value_heads`"),
    ({"talking_heads_dynamic": ["x2l"]}, "`talking_heads_dynamic`"),
    ({"num_key_value_heads": 4, "revision": "main"}, "`revision`"),
]


@pytest.mark.parametrize(
    "options, message", IMPOSSIBLE, ids=lambda value: None if isinstance(value, dict) else value[:30]
)
def test_impossible_conversions_fail_before_any_work(make_source, tmp_path, options, message):
    source = make_source()
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported. Use one of bert"),
        ({"model_type": None}, "must contain `model_type`"),
        ({"architectures": ["BertForNothing"]}, "'BertForNothing' is not supported. Use one of AlbertForMaskedLM"),
        ({"num_attention_heads": 7}, "must divide `hidden_size`"),
        ({"num_attention_heads": 8, "hidden_size": 96}, r"got \[48, 48\]"),
        ({"num_hidden_layers": 3}, "no tensor 'encoder.layer.2.attention.self.query.weight'. It contains"),
        ({"hidden_size": "wide"}, "original model's configuration is invalid"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "`quantization_config`"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 2}}}, r"must have shape \[8, 48\] .* got \[48, 48\]"),
    ],
)
def test_unsupported_sources_raise_an_error(make_source, edit_config, tmp_path, fields, message):
    source = make_source()
    edit_config(source, **fields)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


BAD_CONFIGS = [
    ({"hidden_act": "foo"}, r"config\.json\): KeyError: 'foo'"),
    ({"pad_token_id": 999}, r"config\.json\): AssertionError: Padding_idx"),
    ({"vocab_size": -3}, "`vocab_size`"),
    ({"type_vocab_size": -3}, r"config\.json\): RuntimeError: .*negative dimension -3"),
    ({"id2label": 3}, r"config\.json\): (.*AttributeError|.*'id2label')"),
    ({"dtype": "nonsense"}, r"config\.json\): .*nonsense"),
    ({"dtype": 5}, "`dtype`"),
    ({"dtype": "nn"}, "`dtype`"),
    ({"talking_heads_dynamic": 7}, "`talking_heads_dynamic`"),
    ({"talking_heads_dynamic": True}, "`talking_heads_dynamic`"),
    ({"talking_heads_dynamic": [["x2l"]]}, "`talking_heads_dynamic`"),
    ({"architectures": [5]}, "`architectures`"),
    ({"architectures": 5}, "`architectures`"),
    ({"architectures": "BertForMaskedLM"}, "`architectures`"),
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
    message = rf"contains \d+ attention tensors .* does not use with this config.json: .*{name}"
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_missing_architecture_loads_the_base_model(make_source, edit_config, tmp_path):
    source = make_source()
    edit_config(source, architectures=None)
    assert convert_checkpoint(source, tmp_path / "out", 4).architecture == "AttnVariantBertModel"
    converted = load_model(transformers.AutoModelForMaskedLM, tmp_path / "out")
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(converted.state_dict()[name], load_tensors(source)[name])


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_invalid_config_json_raises_an_error(make_source, tmp_path, content):
    source = make_source()
    (source / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json must"):
        convert_checkpoint(source, tmp_path / "out", 4)
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"must contain config\.json"):
        convert_checkpoint(source, tmp_path / "out", 4)


def test_missing_tensor_raises_an_error(make_source, edit_tensors, tmp_path):
    source = make_source()
    edit_tensors(source, lambda tensors: tensors.pop(f"{LAYER}.self.value.bias"))
    with pytest.raises(ValueError, match=rf"has no tensor '{LAYER}\.self\.value\.bias'"):
        convert_checkpoint(source, tmp_path / "out", 4)


def test_error_without_a_name_gets_the_checkpoint_name(tmp_path):
    """Check the message for a missing tokenizer, because that of Transformers reports a failed connection."""
    with pytest.raises(OSError, match="There is no folder 'nowhere', and as a Hub id: cannot connect"):
        with convert_loading_errors("nowhere"):
            raise OSError("cannot\nconnect")
    with pytest.raises(ValueError, match=f"^{tmp_path}: cannot be made$"), convert_loading_errors(tmp_path):
        raise ValueError("cannot be made")
    with pytest.raises(ValueError, match=f"^in {tmp_path}$"), convert_loading_errors(tmp_path):
        raise ValueError(f"in {tmp_path}")
