"""Check the benchmark of forward passes: the timed models and the errors."""

import pytest
from architectures import ALBERT, BERT, T5
from relatives import RELATIVES, WHISPER

import hf_attn_variants
from benchmarks.speed.encode import measure_passes

MARIAN = next(architecture for architecture in RELATIVES if architecture.name == "marian")


def get_names_and_fields(table):
    return [row["name"] for row in table["rows"]], [row["fields"] for row in table["rows"]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "architecture, head, length",
    [
        (BERT, "BertModel", 8),
        (ALBERT, "AlbertModel", 8),
        (MARIAN, "MarianForCausalLM", 8),
        (WHISPER, "WhisperForAudioClassification", None),
        (WHISPER, "WhisperForCausalLM", 40),
    ],
)
def test_encode_times_transformers_and_every_variant(architecture, head, length):
    config = architecture.make_upstream_model(head).config.to_dict() | {"architectures": [head]}
    table = measure_passes(config, 2, length, 2)
    names, _ = get_names_and_fields(table)
    assert names[:2] == ["transformers", "MHA"] and "MQA" in names
    assert ("MHA + talking heads" in names) is (architecture in (BERT, ALBERT))
    assert table["architecture"] == f"AttnVariant{head}" and table["rows"][0]["speedup"] == 1.0
    for row in table["rows"]:
        assert len(row["all_milliseconds"]) == 2 and row["usage"]["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(2 * table["length"] / row["milliseconds"] * 1e3)


@pytest.mark.parametrize("stored", [True, False])
def test_t5_encoder_is_timed_with_encoder_fields(stored):
    config = T5.make_upstream_model("T5EncoderModel").config.to_dict()
    config |= {"architectures": ["T5EncoderModel"], "is_encoder_decoder": stored}
    names, fields = get_names_and_fields(measure_passes(config, 2, 8, 1, windows=[4]))
    assert names[0] == "transformers" and {"encoder_num_key_value_heads": 1} in fields
    assert {"encoder_attention_pattern": "sliding_window", "encoder_attention_window": 4} in fields
    assert not any("num_key_value_heads" in item for item in fields)


def test_model_with_other_outputs_raises_an_error(monkeypatch):
    model = hf_attn_variants.AttnVariantBertModel
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs | NO_MASK))
    with pytest.raises(ValueError, match="and BertModel with the same weights have different outputs"):
        measure_passes(BERT.make_upstream_model("BertModel").config.to_dict(), 2, 8, 1)


NO_MASK = {"attention_mask": None}
