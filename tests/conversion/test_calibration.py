"""Check conversions on calibration text: the closed form, the fitting steps, and the errors."""

import gc
import json
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fixtures.calibrations import WORDS, WordTokenizer, compute_error, make_bert, make_calibration, make_t5, make_texts
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from hf_attn_variants.conversion import Calibration, convert_checkpoint, convert_model
from hf_attn_variants.conversion.calibration.batches import make_batches
from hf_attn_variants.conversion.calibration.methods import Aligned, Calibrated
from hf_attn_variants.hub.card import generate_model_card

pytestmark = pytest.mark.cross_product


@pytest.mark.thorough
@pytest.mark.parametrize(("build", "kv_heads"), [(make_bert, 2), (make_bert, 1), (make_t5, 2), (make_t5, 1)])
def test_fitting_steps_have_smaller_error_than_closed_form_and_mean(build, kv_heads):
    model = build()
    by_mean = compute_error(convert_model(model, kv_heads), model)
    # Targets are given, because greedy outputs of random weights repeat one token and do not represent other text.
    targets = {"target_texts": make_texts(seed=1)} if model.config.is_encoder_decoder else {}
    closed = compute_error(convert_model(model, kv_heads, calibration=make_calibration(**targets)), model)
    calibration = make_calibration(fit_steps=60, **targets)
    assert compute_error(convert_model(model, kv_heads, calibration=calibration), model) < min(by_mean, closed)


def iterate_grouped_heads(model):
    """Yield the key and value parameters of four heads as [2, 2, 8, ...], so that heads can be tied."""
    for name, parameter in model.named_parameters():
        if name.rsplit(".", 2)[-2] in ("key", "value", "k", "v"):
            yield parameter.detach().view(2, 2, 8, *parameter.shape[1:])


@pytest.mark.thorough
@pytest.mark.parametrize("build", [make_bert, make_t5])
def test_identical_heads_convert_without_loss(build):
    model = build()
    for heads in iterate_grouped_heads(model):
        heads[:, 1] = heads[:, 0]
    assert compute_error(convert_model(model, 2, calibration=make_calibration(fit_steps=5)), model) < 1e-4


@pytest.mark.thorough
def test_similar_heads_are_grouped_at_any_position(tmp_path):
    model = make_bert()
    for heads in iterate_grouped_heads(model):
        heads[1] = heads[0]  # heads 0 and 2 are equal, and 1 and 3
    assert compute_error(convert_model(model, 2, calibration=make_calibration()), model) < 1e-4
    assert all(groups == [[0, 2], [1, 3]] for groups in get_head_groups(model, tmp_path).values())


@pytest.mark.thorough
def test_heads_with_a_position_bias_are_not_reordered(tmp_path):
    groups = get_head_groups(make_t5(), tmp_path)
    assert all(groups[name] == [[0, 1], [2, 3]] for name in groups if "SelfAttention" in name)
    assert any("SelfAttention" in name for name in groups)


def get_head_groups(model, folder):
    """Return which heads of each attention module share in a conversion to two key/value heads."""
    model.save_pretrained(folder / "source")
    report = convert_checkpoint(folder / "source", folder / "out", 2, calibration=make_calibration())
    return {layer.module: layer.details["head_groups"] for layer in report.layers if layer.change == "pool"}


def test_rotated_copies_of_a_head_convert_without_loss():
    model = make_bert()
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3)))[0]
    for heads in iterate_grouped_heads(model):
        heads[:, 1] = torch.einsum("de,ge...->gd...", turn, heads[:, 0])
    assert compute_error(convert_model(model, 2, "mean"), model) > 0.1
    calibration = Calibration(make_texts(), tokenizer=WordTokenizer())
    assert compute_error(convert_model(model, 2, "aligned", calibration=calibration), model) < 1e-3


class PairTokenizer(WordTokenizer):
    """A tokenizer that joins two texts and marks the tokens of the second one."""

    def __call__(self, first, second, **limit):
        ids = [super(PairTokenizer, self).__call__(part, **limit)["input_ids"] for part in (first, second)]
        return {
            "input_ids": [a + b for a, b in zip(*ids, strict=True)],
            "token_type_ids": [[0] * len(a) + [1] * len(b) for a, b in zip(*ids, strict=True)],
        }


@pytest.mark.thorough
@torch.no_grad()
def test_calibration_pairs_are_joined_by_the_tokenizer():
    model = make_bert()
    rows = PairTokenizer()(make_texts(64, seed=7), make_texts(64, seed=8))
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in value], batch_first=True)
        for name, value in (rows | {"attention_mask": [[1] * len(row) for row in rows["input_ids"]]}).items()
    }
    keep, expected = batch["attention_mask"].bool(), model(**batch).last_hidden_state
    texts = list(zip(make_texts(), make_texts(seed=1), strict=True))
    pairs = Calibration(texts, tokenizer=PairTokenizer(), fit_steps=0)
    errors = [
        float((convert_model(model, 2, calibration=c)(**batch).last_hidden_state - expected)[keep].norm())
        for c in (pairs, make_calibration())
    ]
    assert errors[0] < 0.9 * errors[1]
    with pytest.raises(TypeError, match="pairs of strings"):
        Calibration([("one", "two", "three")] * 2)


class Watched(Calibrated):
    """A method that records how many texts it is fitted to."""

    def __init__(self):
        self.seen = []

    def convert_module(self, tensors, heads, layer):
        self.seen.append(sum(len(batch.states) for batch in layer.inputs))
        return super().convert_module(tensors, heads, layer)


@pytest.mark.thorough
@pytest.mark.parametrize("fit_steps", [0, 20])
def test_report_contains_held_out_output_errors(tmp_path, fit_steps):
    make_bert().save_pretrained(tmp_path / "source")
    method, calibration = Watched(), make_calibration(fit_steps=fit_steps)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, method, calibration=calibration)
    assert method.seen == [384] * 2
    details = [layer.details for layer in report.layers]
    for row in details:
        assert 0 < row["output_relative_error"] < row["output_relative_error_averaged"]
        if fit_steps:
            assert row["output_relative_error"] == min(row["relative_error_closed_form"], row["relative_error_fitted"])
            assert row["fit_kept"] is (row["relative_error_fitted"] < row["relative_error_closed_form"])
    stored = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    expected = sum(row["output_relative_error"] for row in details) / 2
    assert stored["mean_output_relative_error"] == report.mean_output_relative_error == pytest.approx(expected)
    printed = report.summary(attention_errors=True)
    assert f"{expected:.1%} on held-out text (averaged heads: " in printed
    assert str(report) == report.summary() != printed
    assert "relative error of logits" not in printed and stored["mean_logits_relative_error"] > 0
    assert ("before fitting" in printed) is bool(fit_steps)


def test_report_names_modules_that_kept_the_closed_form(tmp_path):
    make_bert().save_pretrained(tmp_path / "source")
    calibration_data = make_calibration(fit_steps=3, fit_learning_rate=1e3)  # makes fitting diverge
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, calibration=calibration_data)
    for layer in report.layers:
        assert layer.details["output_relative_error"] == layer.details["relative_error_closed_form"]
        assert layer.details["fit_kept"] is False
    expected = "in 2 of 2 attention modules, where fitting is not better: encoder.layer.0.attention"
    assert expected in report.summary(True)


class Wrong(Calibrated):
    """A method that makes heads unrelated to the source."""

    def convert_module(self, tensors, heads, layer):
        result = super().convert_module(tensors, heads, layer)
        noise = torch.randn(result.value_weight.shape, generator=layer.generator)
        details = {name: value for name, value in result.details.items() if name != "output_relative_error"}
        return replace(result, value_weight=noise, details=details)


def test_averaged_heads_are_kept_if_their_error_is_smaller(tmp_path):
    model = make_bert()
    model.save_pretrained(tmp_path / "source")
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, Wrong(), calibration=make_calibration())
    for layer in report.layers:
        assert layer.details["averaged"] and "head_groups" not in layer.details
        assert layer.details["output_relative_error"] == layer.details["output_relative_error_averaged"]
    assert "in 2 attention modules, where they are better: encoder.layer.0.attention" in report.summary()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    averaged = convert_model(model, 2, "mean").state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in averaged.items() if name in stored)


@pytest.mark.thorough
def test_missing_targets_are_generated_without_changing_the_source():
    model = make_t5()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert_model(model, 2, calibration=make_calibration(max_length=12))
    convert_model(model, 2, calibration=make_calibration(target_texts=make_texts()[::-1]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_conversion_releases_the_source_model():
    model = make_bert()
    weight = weakref.ref(model.encoder.layer[0].attention.self.query.weight)
    converted = convert_model(model, 2, calibration=make_calibration(), copy=True)
    del model
    gc.collect()
    assert weight() is None and converted.config.num_key_value_heads == 2


@pytest.mark.thorough
def test_conversions_in_two_threads_are_independent():
    def work(model):
        return convert_model(model, 1, calibration=make_calibration())

    alone = work(make_bert())
    models = [make_bert() for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        for model in pool.map(work, models):
            assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_is_fitted_in_float32(dtype, tmp_path):
    model = make_bert().to(dtype)
    model.save_pretrained(tmp_path / "source")
    in_memory = convert_model(model, 2, calibration=make_calibration(fit_steps=20))
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, calibration=make_calibration(fit_steps=20))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert all(torch.equal(stored[name], tensor) for name, tensor in in_memory.state_dict().items() if name in stored)
    for layer in report.layers:
        assert 0 < layer.details["relative_error_closed_form"] < 1 and 0 < layer.details["relative_error_fitted"] < 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_report_and_card_describe_the_calibration_text(tmp_path):
    make_bert().save_pretrained(tmp_path / "source")
    result = {}
    long = make_calibration(max_length=100_000, passages=True)  # the model has 512 positions
    for name, calibration_data in (("text", make_calibration(max_length=48)), ("long", long), ("none", None)):
        convert_checkpoint(tmp_path / "source", tmp_path / name, 2, calibration=calibration_data)
        result[name] = json.loads((tmp_path / name / "conversion_report.json").read_text())
    assert result["long"]["calibration"]["max_length"] == result["long"]["calibration"]["passage_length"] == 512
    settings = result["text"]["calibration"]
    assert (settings["count"], settings["kind"], settings["targets"]) == (512, "texts", False)
    assert (settings["max_length"], settings["fit_steps"]) == (48, 0)
    assert "calibration used 512 texts of at most 48 tokens." in str(generate_model_card(tmp_path / "text", "me/x"))
    assert result["none"]["calibration"] is None
    assert "calibration used" not in str(generate_model_card(tmp_path / "none", "me/x"))
    assert settings["held_out"] == 128
    pairs = Calibration([("a", "b"), ("a", "c")], target_texts=["c", "d"]).get_report_settings(Aligned(), None)
    assert pairs["kind"] == "pairs" and pairs["targets"] and "fit_steps" not in pairs


@pytest.mark.thorough
def test_generation_settings_do_not_affect_the_calibration():
    expected = convert_model(make_t5(), 1, calibration=make_calibration(max_length=16))
    model = make_t5()
    model.generation_config.num_return_sequences, model.generation_config.return_dict_in_generate = 2, True
    model.generation_config.repetition_penalty = 9.0
    result = convert_model(model, 1, calibration=make_calibration(max_length=16))
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), result.parameters(), strict=True))
    assert model.generation_config.repetition_penalty == result.generation_config.repetition_penalty == 9.0


def test_missing_tokenizer_raises_an_error(tmp_path):
    make_bert().save_pretrained(tmp_path / "source")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer files.*`Calibration"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, calibration=Calibration(make_texts()))


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "num_held_out"), [(2, 1), (9, 2), (25, 6), (60, 15), (512, 128)])
def test_one_tenth_of_the_texts_is_held_out(count, num_held_out):
    texts = [word * 99 for word in make_texts(count)]
    calibration_data = Calibration(texts, tokenizer=WordTokenizer(), max_length=1200, passages=False, batch_size=4)
    model = convert_model(BertModel(BertConfig(vocab_size=WORDS, hidden_size=24, num_attention_heads=4)), 4)
    model.config.max_position_embeddings = 1200
    parts = make_batches(model, calibration_data.tokenizer, calibration_data, torch.Generator().manual_seed(0))
    rows = [
        [tuple(row[: int(sum(mask))].tolist()) for b in part for row, mask in zip(*b.values(), strict=True)]
        for part in parts
    ]
    assert calibration_data.num_held_out == len(rows[1]) == num_held_out
    assert sorted(rows[0] + rows[1]) == sorted(map(tuple, WordTokenizer()(texts, max_length=1200)["input_ids"]))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("texts", texts) for texts in ([], ["a long text " * 1200], [("a", "pair")], ["a text"] * 200)),
        *(("target_texts", texts) for texts in (["one"], "x" * 512)),
        *(("fit_learning_rate", rate) for rate in (0, -0.1, math.nan, math.inf)),
    ],
)
def test_errors_of_a_calibration(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        Calibration(**{"texts": make_texts(), "tokenizer": WordTokenizer(), argument: value})


def test_errors_of_a_model_and_its_calibration():
    unpadded = WordTokenizer()
    unpadded.pad_token_id = None
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16}
    for model, arguments, message in (
        (make_bert(), {"method": "calibrated"}, "`method`"),
        (make_bert(), {"method": "mean", "calibration": make_calibration()}, "`method`"),
        (make_bert(), {"calibration": make_calibration(tokenizer=None)}, "`tokenizer`"),
        (make_bert(), {"calibration": Calibration(["short", "text"], tokenizer=WordTokenizer())}, "tokens in 2 lines"),
        (BertModel(BertConfig(**sizes)), {"calibration": make_calibration(max_length=64)}, "`max_length`"),
        (make_bert(), {"calibration": make_calibration(tokenizer=unpadded)}, "padding token"),
        (convert_model(make_bert(), talking_heads="both"), {"calibration": make_calibration()}, "talking heads"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_model(model, 2, **arguments)
