"""Check conversions of incomplete checkpoints, whose missing parts `from_pretrained` would initialize at random."""

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from conversion.conftest import load_model
from relatives import RELATIVES

from hf_attn_variants.conversion import convert, convert_checkpoint

ALL_ARCHITECTURES = (*ARCHITECTURES, *RELATIVES)
# Classes that contain only the encoder of an encoder-decoder.
ENCODERS = {f"{name}{end}" for name in ("T5", "UMT5") for end in ("EncoderModel", "ForTokenClassification")}
ENCODERS |= {"WhisperForAudioClassification"}


@pytest.mark.parametrize(
    "name", ["intermediate.dense.weight", "layer.1.output.LayerNorm.bias", "word_embeddings.weight"]
)
def test_missing_part_of_the_model_raises_an_error(make_source, edit_tensors, tmp_path, name):
    source = make_source("BertForMaskedLM")

    def without(tensors):
        for item in [item for item in tensors if item.endswith(name)]:
            del tensors[item]

    edit_tensors(source, without)
    with pytest.raises(ValueError, match=rf"no tensor 'bert\.\S*{name}'.* would initialize missing tensors randomly"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_missing_head_gives_a_warning(make_source, edit_tensors, tmp_path, caplog):
    source = make_source("BertForSequenceClassification")
    edit_tensors(source, lambda tensors: tensors.pop("classifier.weight"))
    with caplog.at_level("WARNING", "hf_attn_variants"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert "no 'classifier.weight', which is part of AttnVariantBertForSequenceClassification" in caplog.text


def test_former_names_and_missing_optional_tensors_are_accepted(make_source, edit_tensors, tmp_path, caplog):
    source = make_source("BertModel")
    expected = load_model(transformers.BertModel, source)

    def as_in_2018(tensors):
        for name in list(tensors):
            if "pooler" in name:
                del tensors[name]
            elif "LayerNorm" in name:
                old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                tensors[f"bert.{old}"] = tensors.pop(name)
            else:
                tensors[f"bert.{name}"] = tensors.pop(name)

    edit_tensors(source, as_in_2018)
    convert_checkpoint(source, tmp_path / "out", 12)
    ids = torch.arange(5, 15)[None]
    for model in (load_model(transformers.AutoModel, tmp_path / "out"), convert(source, 12).eval()):
        actual = model(ids).last_hidden_state
        torch.testing.assert_close(actual, expected(ids).last_hidden_state, rtol=1e-4, atol=1e-5)
    assert "initializes it randomly" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES, ids=lambda row: row.name)
def test_complete_checkpoints_give_no_warning(architecture, tmp_path, caplog):
    for head in architecture.heads:
        architecture.make_upstream_model(head).save_pretrained(tmp_path / head)
        of_decoder, *of_encoder = architecture.config_class.get_kv_heads_fields()
        field = of_encoder[0] if of_encoder and head in ENCODERS else of_decoder
        convert_checkpoint(tmp_path / head, tmp_path / f"{head}-out", **{field: 1})
    assert "initializes it randomly" not in caplog.text
