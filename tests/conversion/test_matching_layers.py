"""Check `keep_matching_layers`: token-matching layers stay unchanged in a conversion."""

import json

import pytest
import torch
from architectures import ALBERT, T5
from fixtures.calibrations import WordTokenizer, make_bert, make_calibration, make_t5
from relatives import ENCODER_DECODERS, ENCODERS, WHISPER
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from hf_attn_variants.conversion import Calibration, convert_checkpoint, convert_model
from hf_attn_variants.conversion.checkpoint.models import ModelReader
from hf_attn_variants.conversion.conversions import resolve_method
from hf_attn_variants.conversion.layer_choice import compute_matching_shares
from hf_attn_variants.conversion.plan import make_plan


def make_matching_bert(layers=3, layer=1, **fields):
    """Return a random BERT whose heads in one layer attend only to the same word."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": layers}
    model = BertModel(BertConfig(vocab_size=60, initializer_range=0.3, **sizes, **fields)).eval()
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.mul_(0.0)
        for other in range(layer):  # earlier layers hardly change the words
            model.encoder.layer[other].attention.output.dense.weight.mul_(0.01)
            model.encoder.layer[other].output.dense.weight.mul_(0.01)
        attention = model.encoder.layer[layer].attention.self
        attention.key.weight.copy_(attention.query.weight.mul_(2.0))
    return model


class MarkedTokenizer(WordTokenizer):
    """A tokenizer with a token before a text and after each text, which are not words; pairs have segments."""

    all_special_ids = [0, 1]

    def __call__(self, *columns, truncation=True, max_length=64, return_token_type_ids=None, **options):
        rows, types = [], []
        for texts in zip(*columns, strict=True):
            row, text_numbers = [1], [0]
            for number, text in enumerate(texts):
                ids = [*super().__call__([text], max_length=max_length)["input_ids"][0], 1]
                row, text_numbers = row + ids, text_numbers + [number] * len(ids)
            rows.append(row[:max_length])
            types.append(text_numbers[:max_length])
        return {"input_ids": rows, "token_type_ids": types}


def shares_of(model, calibration):
    """Return the matching shares of a model, computed as in a conversion, and the model as a variant."""
    converted = convert_model(model, 4, method="mean", copy=True)
    config = model.config.to_dict() | {"architectures": ["BertModel"]}
    plan = make_plan(config, ModelReader(model).entries, resolve_method("mean", None), {"num_key_value_heads": 2})
    return compute_matching_shares(plan, converted, calibration.tokenizer, calibration), converted


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("are_pairs", [False, True])
def test_matching_share_equals_the_formula(are_pairs, is_decoder):
    """Compare with loops over texts, words and heads; special tokens and padding are not words."""
    texts = [*make_calibration().texts[:40], "zz"]
    texts = list(zip(texts[:20], texts[20:40], strict=True)) if are_pairs else texts
    model, tokenizer = make_matching_bert(is_decoder=is_decoder), MarkedTokenizer()
    with torch.no_grad():
        model.embeddings.token_type_embeddings.weight.mul_(3.0)
    result, converted = shares_of(model, make_matching_calibration(texts, tokenizer))
    sums, count = torch.zeros(3, 4), 0
    for text in texts:
        batch = tokenizer(*([item] for item in (text if are_pairs else [text])))
        (ids,), arguments = batch["input_ids"], {name: torch.tensor(rows) for name, rows in batch.items()}
        with torch.no_grad():
            weights = torch.stack(converted(**arguments, output_attentions=True).attentions)[:, 0]
        for t, word in enumerate(ids):
            if word == 1:
                continue
            others = [u for u, other in enumerate(ids) if other == word and (u < t if is_decoder else u != t)]
            count += bool(others)
            sums += weights[:, :, t, others].sum(-1)
    assert result == pytest.approx((sums / count).amax(1).tolist(), abs=1e-4)


def make_matching_calibration(texts, tokenizer=None):
    return Calibration(texts, tokenizer=tokenizer or WordTokenizer(), passages=False, fit_steps=0, batch_size=16)


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [{"num_key_value_heads": 2}, {"attention_kernel": "elu"}, {"kv_lora_rank": 8}])
@pytest.mark.parametrize("layer", [0, 2])
def test_token_matching_layer_stays_unchanged(layer, fields, tmp_path, capsys):
    make_matching_bert(layer=layer).save_pretrained(tmp_path / "source")
    report = convert_checkpoint(
        tmp_path / "source", tmp_path / "made", keep_matching_layers=1, calibration=make_calibration(), **fields
    )
    assert max(range(3), key=report.matching_shares.__getitem__) == layer
    assert [row.change == "same" for row in report.layers] == [item == layer for item in range(3)]
    (name, value), old = next(iter(fields.items())), {"num_key_value_heads": 4}
    config = json.loads((tmp_path / "made/config.json").read_text())
    expected = [old.get(name) if item == layer else value for item in range(3)]
    assert config["per_layer_values"] == {name: expected}
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "made"))
    layer_names = [item for item in before if item.startswith(f"encoder.layer.{layer}.")]
    assert layer_names and all(after[item].equal(before[item]) for item in layer_names)
    shown = ", ".join(f"{share:.2f}" for share in report.matching_shares)
    assert f"attention to the same word  {shown} by layer" in report.summary()
    assert json.loads((tmp_path / "made/conversion_report.json").read_text())["matching_shares"]


def test_several_fields_and_layers_stay_unchanged():
    model = convert_model(
        make_matching_bert(4, 2),
        2,
        attention_kernel="elu",
        keep_matching_layers=2,
        calibration=make_calibration(),
    )
    heads, kernels = (model.config.per_layer_values[name] for name in ("num_key_value_heads", "attention_kernel"))
    assert heads[2] == 4 and kernels[2] is None and heads.count(4) == 2
    assert [item is None for item in kernels] == [item == 4 for item in heads]


@pytest.mark.thorough
def test_second_conversion_keeps_other_per_layer_values():
    """Check that lists of other fields stay, also with `per_layer_values` or a cache size."""
    model = convert_model(make_matching_bert(layer=2), 2, keep_matching_layers=1, calibration=make_calibration())
    assert model.config.per_layer_values == {"num_key_value_heads": [2, 2, 4]}
    for options in (
        {"attention_kernel": "elu", "keep_matching_layers": 1, "calibration": make_calibration()},
        {"per_layer_values": {"attention_kernel": ["elu", "elu", None]}, "method": "mean"},
    ):
        again = convert_model(model, **options)
        assert again.config.per_layer_values == {
            "num_key_value_heads": [2, 2, 4],
            "attention_kernel": ["elu", "elu", None],
        }
    heads = {"per_layer_values": {"num_key_value_heads": [1, 1, 2]}}
    fewer = convert_model(again, **heads, method="mean")
    assert fewer.config.per_layer_values["attention_kernel"] == ["elu", "elu", None]
    latent = convert_model(
        make_matching_bert(layer=2), per_layer_values={"kv_lora_rank": [None, 16, None]}, method="mean"
    )
    both = convert_model(latent, 2, keep_matching_layers=1, calibration=make_calibration())
    ranks = both.config.per_layer_values["kv_lora_rank"]
    assert ranks == [None, 16, None] and both.config.per_layer_values["num_key_value_heads"] == [2, 2, 4]


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", [T5, ENCODER_DECODERS[0]], ids=lambda item: item.name)
def test_token_matching_layers_of_an_encoder_decoder_stay(architecture):
    """Check that encoder layers are kept by the encoder fields, and that all decoder layers are converted."""
    head = next(name for name in architecture.heads if name.endswith("ForConditionalGeneration"))
    model = architecture.make_upstream_model(head)
    options = {"target_texts": list(make_calibration().texts), "tokenizer": WordTokenizer()}
    converted = convert_model(
        model, 1, encoder_num_key_value_heads=1, keep_matching_layers=1, calibration=make_calibration(**options)
    )
    values = converted.config.per_layer_values["encoder_num_key_value_heads"]
    assert sorted(values) == [1, converted.config.get_query_heads("encoder_num_key_value_heads")]
    assert converted.config.num_key_value_heads == 1


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ENCODERS, ids=lambda item: item.name)
def test_every_encoder_supports_keep_matching_layers(architecture):
    model = architecture.make_upstream_model(next(iter(architecture.heads)))
    converted = convert_model(model, 1, keep_matching_layers=1, calibration=make_calibration())
    assert sorted(converted.config.per_layer_values["num_key_value_heads"])[0] == 1


@pytest.mark.parametrize(
    "model, options, message",
    [
        (make_bert, {"keep_matching_layers": 0}, "`keep_matching_layers`"),
        (make_bert, {"keep_matching_layers": 2}, "between 1 and 1, got 2"),
        (make_bert, {"keep_matching_layers": 1, "calibration": None}, "`keep_matching_layers`"),
        (make_bert, {"num_key_value_heads": None, "keep_matching_layers": 1}, "nothing to convert"),
        (
            make_bert,
            {"num_key_value_heads": None, "attention_pattern": "sliding_window", "attention_window": 4}
            | {"keep_matching_layers": 1},
            "`num_key_value_heads`",
        ),
        (make_t5, {"keep_matching_layers": 1}, "`encoder_num_key_value_heads`"),
        (
            lambda: ENCODER_DECODERS[0].make_upstream_model("BartForCausalLM"),
            {"keep_matching_layers": 1},
            "not for AttnVariantBartForCausalLM",
        ),
        (
            lambda: WHISPER.make_upstream_model("WhisperForConditionalGeneration"),
            {"num_key_value_heads": 4, "keep_matching_layers": 1, "calibration": None},
            "`keep_matching_layers`",
        ),
        (
            make_bert,
            {"per_layer_values": {"attention_kernel": ["elu", None]}, "keep_matching_layers": 1},
            "`per_layer_values`",
        ),
        (
            make_bert,
            {"attention_pattern": "sliding_window", "attention_window": 4, "keep_matching_layers": 1},
            "`attention_pattern`",
        ),
        (
            lambda: ALBERT.make_upstream_model("AlbertModel"),
            {"keep_matching_layers": 1},
            "layers can have different heads",
        ),
    ],
)
def test_invalid_keep_matching_layers_raises_an_error(model, options, message):
    options = {"num_key_value_heads": 2, "calibration": make_calibration()} | options
    with pytest.raises(ValueError, match=message):
        convert_model(model(), **options)


def test_text_without_repeated_words_raises_an_error():
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(4)) for i in range(400)]
    with pytest.raises(ValueError, match="contain a word twice"):
        convert_model(make_bert(), 2, keep_matching_layers=1, calibration=make_matching_calibration(texts))


def test_repeated_words_after_the_truncation_are_used():
    """Check texts like reactions, whose atoms occur again in the product, after 64 tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [(letters[i % 26 :] + letters[: i % 26])[:16] * 2 for i in range(64)]
    cut = Calibration(texts, tokenizer=WordTokenizer(), passages=False, max_length=16)
    shares, _ = shares_of(make_matching_bert(layer=2), cut)
    assert max(range(3), key=shares.__getitem__) == 2 and shares[2] > 5 * shares[1]
