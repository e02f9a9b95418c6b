"""Check conversions that add talking heads to some places of encoder-decoders: weights, reports, cards and errors."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from architectures import T5
from relatives import ENCODER_DECODERS

from hf_attn_variants import convert
from hf_attn_variants.cli import main
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.plan import get_calibration_blocker
from hf_attn_variants.hub.card import generate_model_card

BART = ENCODER_DECODERS[0]
HEAD = "T5ForConditionalGeneration"


@pytest.fixture
def source(tmp_path):
    T5.make_upstream_model(HEAD).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(**T5.make_batch(HEAD), use_cache=False).logits


def test_talking_heads_are_added_only_to_cross_attention(source, tmp_path, capsys):
    flags = ["--cross_talking_heads", "both", "--cross_talking_heads_dynamic", "m2l"]
    main(["convert", str(source), *flags, "--output_dir", str(tmp_path / "out")])
    printed = " ".join(capsys.readouterr().out.split())
    added = "cross logits_proj [12, 12], cross weights_proj [12, 12], cross m2l_proj [40, 12, 12]"
    assert f"talking heads added {added}" in printed
    model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    names = {name for name, _ in model.named_parameters() if name.endswith(("s_proj", "m2l_proj"))}
    assert len(names) == 6 and all(".EncDecAttention." in name for name in names)
    plain = transformers.T5ForConditionalGeneration.from_pretrained(source)
    torch.testing.assert_close(compute_logits(model), compute_logits(plain), atol=1e-5, rtol=0)
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["talking_heads"]["cross m2l_proj"] == [40, 12, 12]
    card = str(generate_model_card(tmp_path / "out", "me/model"))
    assert "talking heads before and after the softmax in cross-attention" in card
    assert "cross-attention: logits of 12 heads --P_l [12 x 12]-->" in card and "talking-heads-attention" in card
    # A conversion in memory gives the same weights.
    live = convert(plain, cross_talking_heads="both", cross_talking_heads_dynamic=["m2l"])
    for name, tensor in live.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_existing_talking_heads_stay_and_others_are_added(source, tmp_path):
    random = {"cross_talking_heads_init": "random"}
    convert_checkpoint(source, tmp_path / "one", cross_talking_heads="logits", **random)
    fields = {"encoder_talking_heads": "weights", "num_key_value_heads": 4}
    report = convert_checkpoint(tmp_path / "one", tmp_path / "two", **fields)
    assert report.talking_heads == {"encoder weights_proj": (12, 12)}
    one, two = (transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    name = "decoder.block.1.layer.1.EncDecAttention.logits_proj"
    assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], torch.eye(12))
    kinds = [two.config.get_talking_heads(prefix, 0).kind for prefix in ("", "encoder_", "cross_")]
    assert kinds == [None, "weights", "logits"]
    for kind in ("none", "both", "logits"):
        with pytest.raises(ValueError, match="`cross_talking_heads`"):
            convert_checkpoint(tmp_path / "one", tmp_path / "other", num_key_value_heads=4, cross_talking_heads=kind)
    why = get_calibration_blocker(SimpleNamespace(source_config=two.config))
    assert "talking heads ('logits')" in why


RANDOM_ENCODER = {"encoder_talking_heads": "both", "encoder_talking_heads_init": "random"}
INVALID = {
    "cross_talking_heads_init": {"cross_talking_heads_init": "random"},
    "cross_num_value_heads": {
        "cross_talking_heads": "weights",
        "cross_talking_heads_init": "random",
        "cross_num_value_heads": 6,
    },
    "encoder_num_softmax_heads": RANDOM_ENCODER | {"encoder_num_softmax_heads": 6, "encoder_num_value_heads": 12},
    "cross_kv_lora_rank": {
        "cross_kv_lora_rank": 8,
        "cross_talking_heads": "both",
        "cross_talking_heads_dynamic": ["m2l"],
    },
}


@pytest.mark.parametrize("argument", INVALID)
def test_invalid_places_raise_before_any_work(argument, source, tmp_path):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        convert_checkpoint(source, tmp_path / "out", **INVALID[argument])
    assert not (tmp_path / "out").exists()


def test_softmax_heads_of_cross_attention_can_change():
    """Check cross-attention, which has no position bias."""
    fields = {"cross_talking_heads": "both", "cross_talking_heads_init": "random", "cross_num_softmax_heads": 6}
    model = convert(T5.make_upstream_model(HEAD), **fields, cross_num_value_heads=12)
    assert model.decoder.block[0].layer[1].EncDecAttention.logits_proj.shape == (12, 6)


def test_unequal_heads_allow_talking_heads_in_one_place():
    upstream = BART.make_upstream_model("BartModel")
    with pytest.raises(ValueError, match="`encoder_talking_heads`"):
        convert(upstream, talking_heads="both")
    model = convert(upstream, encoder_talking_heads="both", cross_talking_heads="logits")
    assert model.encoder.layers[0].self_attn.logits_proj.shape == (4, 4)
    assert model.decoder.layers[0].encoder_attn.logits_proj.shape == (12, 12)
    batch = BART.make_batch("BartModel")
    with torch.no_grad():
        actual, expected = (item.eval()(**batch, use_cache=False)[0] for item in (model, upstream))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
