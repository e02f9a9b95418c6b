"""Check longer learned positions: repeated or interpolated, the recorded lengths, and windows on longer text."""

import json

import pytest
import torch
import transformers
from architectures import ALBERT, BERT, T5, make_token_ids
from fixtures.glue.tiny_bert import make_tiny_bert
from relatives import ENCODER_DECODERS, ENCODERS

from hf_attn_variants.cli import main as run
from hf_attn_variants.conversion import convert as convert_function
from hf_attn_variants.conversion import convert_checkpoint

from .conftest import load_model, load_tensors

WINDOW = {"attention_pattern": "sliding_window", "attention_window": 8, "num_global_tokens": 1}


def load_positions(folder):
    return next(item for name, item in load_tensors(folder).items() if "position_embeddings" in name)


@pytest.mark.parametrize("architecture", [BERT, ALBERT, *ENCODERS], ids=lambda row: row.name)
def test_learned_positions_are_repeated(architecture, tmp_path):
    head = next(iter(architecture.heads))
    source = architecture.make_upstream_model(head).eval()
    source.save_pretrained(tmp_path / "source")
    # The first two positions of RoBERTa are not used for tokens.
    first = 2 if architecture.name == "roberta" else 0
    old = source.config.max_position_embeddings
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", max_position_embeddings=90, **WINDOW)
    before, after = load_positions(tmp_path / "source"), load_positions(tmp_path / "out")
    assert after.shape[0] == 90 and after[:old].equal(before)
    assert after[old:].equal(before[first:].repeat(3, 1)[: 90 - old])
    assert report.parameters["after"] - report.parameters["before"] == (90 - old) * before.shape[1]
    model = load_model(transformers.AutoModel, tmp_path / "out")
    assert model.config.max_position_embeddings == 90 and model.config.attention_window == 8
    with torch.no_grad():
        assert model(make_token_ids(2, 80)).last_hidden_state.isfinite().all()
        plain = convert_function(tmp_path / "source", max_position_embeddings=90).eval()  # without other changes
        ids = make_token_ids(2, 9)
        expected = source(ids).last_hidden_state
        torch.testing.assert_close(plain(ids).last_hidden_state, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", [BERT, ENCODERS[0]], ids=lambda row: row.name)
def test_learned_positions_are_interpolated(architecture, tmp_path):
    source = architecture.make_upstream_model(next(iter(architecture.heads)))
    source.save_pretrained(tmp_path / "source")
    first = 2 if architecture.name == "roberta" else 0
    before = load_positions(tmp_path / "source")
    old = before.shape[0] - first
    new = 3 * (old - 1) + 1  # every third position is an original one
    convert_checkpoint(
        tmp_path / "source", tmp_path / "out", max_position_embeddings=new + first, position_extension="interpolated"
    )
    after = load_positions(tmp_path / "out")
    assert after[:first].equal(before[:first])
    torch.testing.assert_close(after[first::3], before[first:])
    between = (2 * before[first:-1] + before[first + 1 :]) / 3
    torch.testing.assert_close(after[first + 1 :: 3], between)
    model = load_model(transformers.AutoModel, tmp_path / "out")
    assert model(make_token_ids(1, new)).last_hidden_state.isfinite().all()


def test_saved_files_state_the_new_length(tmp_path):
    source = make_tiny_bert(tmp_path / "source")
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    flags = "--attention_pattern sliding_window --attention_window 8 --max_position_embeddings 300 --dtype bfloat16"
    out = tmp_path / "out"
    arguments = ["convert", "--model_name_or_path", str(source), "--output_dir", str(out), *flags.split()]
    assert run(arguments) == 0
    assert transformers.AutoTokenizer.from_pretrained(out).model_max_length == 300
    settings = json.loads((out / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 300, "do_lower_case": False}
    assert load_positions(out).dtype == torch.bfloat16
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["attention_window"]) == (300, 8)


def test_position_buffers_of_old_checkpoints_are_dropped(make_source, edit_tensors, tmp_path):
    source = make_source()

    edit_tensors(source, lambda tensors: tensors.update({"bert.embeddings.position_ids": torch.arange(32)[None]}))
    convert_checkpoint(source, tmp_path / "out", max_position_embeddings=64)
    assert not [name for name in load_tensors(tmp_path / "out") if name.endswith("position_ids")]
    load_model(transformers.AutoModelForMaskedLM, tmp_path / "out")(make_token_ids(1, 64))


@pytest.mark.parametrize("architecture", [T5, ENCODER_DECODERS[0]], ids=lambda row: row.name)
def test_other_position_types_raise_an_error(architecture, tmp_path):
    architecture.make_upstream_model(next(iter(architecture.heads))).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="`max_position_embeddings`"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", max_position_embeddings=90)


def test_fewer_positions_and_in_memory_models_raise_an_error(make_source, tmp_path):
    for wrong in (32, 16, "64", True):
        with pytest.raises(ValueError, match="`max_position_embeddings`"):
            convert_checkpoint(make_source(), tmp_path / "out", max_position_embeddings=wrong)
    with pytest.raises(ValueError, match=r"`position_extension` .*one of tiled"):
        fields = {"max_position_embeddings": 64, "position_extension": "stretched"}
        convert_checkpoint(make_source(), tmp_path / "out", **fields)
    with pytest.raises(ValueError, match="is only supported for checkpoints"):
        convert_function(BERT.make_model("BertModel"), max_position_embeddings=64)
