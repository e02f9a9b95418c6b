"""`keep_matching_layers`: layers whose heads look for a word's other occurrences stay as they are."""

import json
import re

import pytest
import torch
from architectures import ALBERT, T5
from fixtures.calibrations import WordTokenizer, bert, calibration, t5
from fixtures.glue.tiny_bert import make_tiny_bert
from relatives import ENCODER_DECODERS, ENCODERS
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from hf_attn_variants import AttnVariantBertModel, cli
from hf_attn_variants.conversion import convert_checkpoint, convert_model
from hf_attn_variants.conversion.calibration.matching_layers import matching_shares


def small(**changes):
    """Texts of 8 to 23 letters, in which most come twice."""
    return calibration(**changes)


def finder(layers=3, layer=1, **fields):
    """A BERT of random weights whose heads in one layer are near nothing but the same word."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": layers}
    model = BertModel(BertConfig(vocab_size=60, initializer_range=0.3, **sizes, **fields)).eval()
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.mul_(0.0)
        for other in range(layer):  # what is before it leaves the words as they are
            model.encoder.layer[other].attention.output.dense.weight.mul_(0.01)
            model.encoder.layer[other].output.dense.weight.mul_(0.01)
        attention = model.encoder.layer[layer].attention.self
        attention.key.weight.copy_(attention.query.weight.mul_(2.0))
    return model


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_share_is_what_its_formula_says(is_decoder):
    """Loops over texts, words and heads, without padding, on the first texts alone."""
    model = finder(is_decoder=is_decoder)
    texts = [*small().texts[:40], "zz"]
    ours = convert_model(model, 2, method="mean", copy=True)  # any variant model; its own shares are asked for
    found = matching_shares(ours, WordTokenizer(), calibration_of(texts))
    sums, count = torch.zeros(3, 4), 0
    for text in texts:
        ids = WordTokenizer()([text])["input_ids"][0]
        with torch.no_grad():
            weights = torch.stack(ours(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
        for t, word in enumerate(ids):
            others = [u for u, other in enumerate(ids) if other == word and (u < t if is_decoder else u != t)]
            count += bool(others)
            sums += weights[:, :, t, others].sum(-1)
    assert found == pytest.approx((sums / count).amax(1).tolist(), abs=1e-4)


def calibration_of(texts):
    return calibration().__class__(texts, tokenizer=WordTokenizer(), passages=False, fit_steps=0, batch_size=16)


@pytest.mark.parametrize("fields", [{"num_key_value_heads": 2}, {"attention_kernel": "elu"}, {"kv_lora_rank": 8}])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_that_finds_words_stays(layer, fields, tmp_path, capsys):
    finder(layer=layer).save_pretrained(tmp_path / "source")
    report = convert_checkpoint(
        tmp_path / "source", tmp_path / "made", keep_matching_layers=1, calibration=small(), **fields
    )
    assert max(range(3), key=report.matching_shares.__getitem__) == layer
    assert [row.change == "same" for row in report.layers] == [each == layer for each in range(3)]
    (name, value), old = next(iter(fields.items())), {"num_key_value_heads": 4}
    config = json.loads((tmp_path / "made/config.json").read_text())
    expected = [old.get(name) if each == layer else value for each in range(3)]
    assert config["per_layer_values"] == {name: expected}
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "made"))
    own = [each for each in before if each.startswith(f"encoder.layer.{layer}.")]
    assert own and all(after[each].equal(before[each]) for each in own)
    shown = ", ".join(f"{share:.2f}" for share in report.matching_shares)
    assert f"attention to the same word  {shown} by layer" in report.summary()
    assert json.loads((tmp_path / "made/conversion_report.json").read_text())["matching_shares"]


def test_several_fields_and_layers_at_once():
    model = convert_model(finder(4, 2), 2, attention_kernel="elu", keep_matching_layers=2, calibration=small())
    heads, kernels = (model.config.per_layer_values[name] for name in ("num_key_value_heads", "attention_kernel"))
    assert heads[2] == 4 and kernels[2] is None and heads.count(4) == 2
    assert [each is None for each in kernels] == [each == 4 for each in heads]


@pytest.mark.parametrize("architecture", [T5, ENCODER_DECODERS[0]], ids=lambda each: each.name)
def test_an_encoder_of_two_stacks(architecture):
    """Its own fields; the decoder is converted in all layers."""
    head = next(name for name in architecture.heads if name.endswith("ForConditionalGeneration"))
    model = architecture.upstream_model(head)
    options = {"target_texts": list(small().texts), "tokenizer": WordTokenizer()}
    made = convert_model(model, 1, encoder_num_key_value_heads=1, keep_matching_layers=1, calibration=small(**options))
    values = made.config.per_layer_values["encoder_num_key_value_heads"]
    assert sorted(values) == [1, made.config.query_heads("encoder_num_key_value_heads")]
    assert made.config.num_key_value_heads == 1


@pytest.mark.parametrize("architecture", ENCODERS, ids=lambda each: each.name)
def test_every_encoder(architecture):
    model = architecture.upstream_model(next(iter(architecture.heads)))
    made = convert_model(model, 1, keep_matching_layers=1, calibration=small())
    assert sorted(made.config.per_layer_values["num_key_value_heads"])[0] == 1


def test_pairs_of_texts():
    texts = small().texts
    pairs = calibration_of(list(zip(texts[::2], texts[1::2], strict=True)))
    tokenizer = PairTokenizer()
    object.__setattr__(pairs, "tokenizer", tokenizer)
    ours = AttnVariantBertModel.from_pretrained(None, config=convert_model(bert(), 4).config, state_dict={})
    assert len(matching_shares(ours.float(), tokenizer, pairs)) == 2


class PairTokenizer(WordTokenizer):
    def __call__(self, texts=None, others=None, **options):
        joined = super().__call__([f"{a}{b}" for a, b in zip(texts, others, strict=True)], **options)
        return joined | {"token_type_ids": [[0] * len(row) for row in joined["input_ids"]]}


@pytest.mark.parametrize(
    "model, options, message",
    [
        (bert, {"keep_matching_layers": 0}, "must be a number of layers, from 1; got 0"),
        (bert, {"keep_matching_layers": True}, "must be a number of layers, from 1; got True"),
        (bert, {"keep_matching_layers": 2}, "must leave a layer to convert: there are 2; got 2"),
        (bert, {"keep_matching_layers": 1, "calibration": None}, "finds layers by text"),
        (bert, {"num_key_value_heads": None, "keep_matching_layers": 1}, "nothing to convert"),
        (
            bert,
            {"num_key_value_heads": None, "per_layer_values": {"num_key_value_heads": [2, 4]}}
            | {"keep_matching_layers": 1},
            "give one for all layers",
        ),
        (t5, {"keep_matching_layers": 1}, r"an encoder's .* \(`encoder_num_key_value_heads`"),
        (lambda: ALBERT.upstream_model("AlbertModel"), {"keep_matching_layers": 1}, "those of the source share them"),
    ],
)
def test_what_cannot_be_done_is_refused(model, options, message):
    options = {"num_key_value_heads": 2, "calibration": small()} | options
    with pytest.raises(ValueError, match=message):
        convert_model(model(), **options)


def test_text_without_a_word_that_comes_twice():
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(4)) for i in range(400)]
    with pytest.raises(ValueError, match="no word occurs twice in a text of the calibration"):
        convert_model(bert(), 2, keep_matching_layers=1, calibration=calibration_of(texts))


def test_the_command(tmp_path, capsys):
    folder, lines = make_tiny_bert(tmp_path / "source"), tmp_path / "lines.txt"
    lines.write_text("a cat sees a cat and the dog sees the dog\n" * 200)
    command = ["convert", str(folder), "--num_key_value_heads", "2", "--keep_matching_layers", "1"]
    command += ["--calibration_file", str(lines), "--fit_steps", "0", "--output_dir", str(tmp_path / "made")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"num_key_value_heads +4 -> \[(2, 4|4, 2)\]", printed)
    assert "attention to the same word" in printed
