"""Check checkpoints whose classes have other names than ours: those of mT5, and the former names of T5."""

import pytest
import torch
import transformers

from hf_attn_variants import convert
from hf_attn_variants.inspection.costs import compute_cost_table
from hf_attn_variants.inspection.speed import measure_speed
from hf_attn_variants.training.engine.models import get_saved_model_class

TINY = {"vocab_size": 60, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
SPECIAL = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
INPUTS = {
    "input_ids": torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
}
MT5_CLASSES = [
    "MT5EncoderModel",
    "MT5ForConditionalGeneration",
    "MT5ForQuestionAnswering",
    "MT5ForSequenceClassification",
    "MT5ForTokenClassification",
    "MT5Model",
]


def make_mt5(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(transformers.MT5Config(**TINY, **SPECIAL)).eval()


@torch.no_grad()
def run(model):
    needs_decoder = type(model).__name__.endswith(("T5Model", "ForConditionalGeneration"))
    inputs = INPUTS | ({"decoder_input_ids": INPUTS["input_ids"][:, :3]} if needs_decoder else {})
    if "SequenceClassification" in type(model).__name__:
        inputs = {"input_ids": INPUTS["input_ids"][:1]}  # rows must have equal numbers of end tokens
    return model(**inputs)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MT5_CLASSES)
def test_mt5_classes_convert_in_memory_and_from_a_folder(name, tmp_path):
    model = make_mt5(name)
    model.save_pretrained(tmp_path / "mt5")
    alone = name in ("MT5EncoderModel", "MT5ForTokenClassification")
    field = "encoder_num_key_value_heads" if alone else "num_key_value_heads"
    for source in (model, tmp_path / "mt5"):
        same = convert(source, **{field: 4}).eval()
        assert type(same).__name__ == f"AttnVariant{name.removeprefix('M')}"
        torch.testing.assert_close(run(same), run(model), atol=1e-5, rtol=0)
        assert convert(source, **{field: 1}).num_parameters() < model.num_parameters()
    convert(tmp_path / "mt5", output_dir=tmp_path / "out", **{field: 4})
    again = type(same).from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(run(again), run(model), atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_mt5_is_counted_and_timed_with_its_transformers_class():
    config = make_mt5("MT5ForConditionalGeneration").config.to_dict()
    rows = {row.name: row for row in compute_cost_table(config).rows}
    assert rows["MQA"].kv_cache_bytes < rows["MHA"].kv_cache_bytes
    table = measure_speed(config, batch_size=1, length=4, max_new_tokens=2, rounds=1, device="cpu")
    assert table.rows[0].name == "transformers"


def test_former_t5_class_name_is_known(tmp_path, edit_config):
    transformers.T5ForConditionalGeneration(transformers.T5Config(**TINY, **SPECIAL)).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["T5WithLMHeadModel"])
    assert type(convert(tmp_path, 2)).__name__ == "AttnVariantT5ForConditionalGeneration"
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert get_saved_model_class(str(tmp_path), config) is transformers.T5ForConditionalGeneration


def test_t5_encoder_model_uses_its_own_field(tmp_path):
    model = transformers.T5EncoderModel(transformers.T5Config(**TINY))
    for fields in ({}, {"encoder_num_key_value_heads": 2}):
        with pytest.raises(ValueError, match="`num_key_value_heads`"):
            convert(model, 2, **fields)
    rows = {
        row.name: row
        for row in compute_cost_table(model.config.to_dict() | {"architectures": ["T5EncoderModel"]}).rows
    }
    assert rows["MQA"].fields == {"encoder_num_key_value_heads": 1}
    assert rows["MQA"].parameters < rows["GQA-2"].parameters < rows["MHA"].parameters
    assert convert(model, encoder_num_key_value_heads=1).num_parameters() == rows["MQA"].parameters


def test_untied_t5_stays_untied(tmp_path):
    config = transformers.T5Config(**TINY, tie_word_embeddings=False)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert convert(model, 2).all_tied_weights_keys == model.all_tied_weights_keys
