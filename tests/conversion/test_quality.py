"""Check the quality of converted models on held-out examples: the measure, its interval, and `strict`."""

import dataclasses
import json
import math

import pytest
import torch
from architectures import BERT, T5
from fixtures.calibrations import WORDS, WordTokenizer, make_bert, make_calibration, make_t5, make_texts
from fixtures.golden_sources import make_tokenizer
from relatives import RELATIVES
from transformers import BertConfig, BertModel

from hf_attn_variants.cli import main
from hf_attn_variants.commands import convert as convert_command
from hf_attn_variants.conversion import convert, convert_checkpoint
from hf_attn_variants.conversion.calibration.batches import make_untruncated_batches, set_length_statistics
from hf_attn_variants.conversion.calibration.source_outputs import SourceOutputs, _compute_difference_terms
from hf_attn_variants.conversion.calibration.source_outputs import _count_runaway_generations as runaway
from hf_attn_variants.conversion.report import (
    TOLERANCES,
    OutsideToleranceError,
    Quality,
    check_within_tolerance,
    compute_edit_distance,
    compute_ratio_confidence_interval,
)


class MaskingTokenizer(WordTokenizer):
    mask_token_id = 1


def make_source_outputs(model, **changes):
    calibration_data = make_calibration(**changes)
    has_encoder = model.config.is_encoder_decoder or "Encoder" in type(model).__name__
    field = f"{'encoder_' if has_encoder else ''}num_key_value_heads"
    model = convert(model, **{field: 4}).eval()  # a class of this package with all heads
    return model, compute_source_outputs(model, calibration_data)


def make_texts_with_equal_tokens(text, count):
    """Return different texts for which `WordTokenizer` returns the same tokens."""
    return ["".join(chr(ord(letter) + (WORDS - 2) * i) for letter in text) for i in range(count)]


def compute_source_outputs(model, calibration_data):
    calibration_data = set_length_statistics(calibration_data, calibration_data.tokenizer, model.config)
    held_out = make_untruncated_batches(
        model, calibration_data.tokenizer, calibration_data, torch.Generator().manual_seed(0)
    )
    return SourceOutputs(model, calibration_data.tokenizer, calibration_data, held_out)


SEVERAL_LABELS = {"num_labels": 3, "problem_type": "multi_label_classification"}
CASES = [
    ("BertModel", {}, "embeddings", 1.0),
    ("BertForMaskedLM", {"tokenizer": MaskingTokenizer()}, "loss", 0.0),
    ("BertForMaskedLM", {}, "embeddings", 1.0),  # the tokenizer has no mask token
    ("BertForPreTraining", {"tokenizer": MaskingTokenizer()}, "loss", 0.0),
    ("BertForSequenceClassification", {}, "predictions", 0.0),
    ("BertForSequenceClassification", {"num_labels": 1}, "scores", 0.0),
    ("BertForSequenceClassification", SEVERAL_LABELS, "predictions", 0.0),
    ("BertForTokenClassification", {}, "predictions", 0.0),
    ("BertForQuestionAnswering", {}, "predictions", 0.0),
    ("BertForMultipleChoice", {}, "scores", 0.0),
    ("T5ForConditionalGeneration", {}, "tokens", 0.0),
    ("T5ForConditionalGeneration", {"target_texts": make_texts(seed=1)}, "tokens", 0.0),
    ("T5Model", {"target_texts": make_texts(seed=1)}, "embeddings", 1.0),
    ("T5EncoderModel", {}, "embeddings", 1.0),
    ("BartForConditionalGeneration", {"max_length": 10}, "tokens", 0.0),
    ("BartForSequenceClassification", {}, "embeddings", 1.0),  # it needs an end token, which these texts lack
]


@pytest.mark.thorough
@pytest.mark.parametrize(("head", "changes", "measure", "same"), CASES)
def test_every_head_has_a_measure_that_is_perfect_for_the_source(head, changes, measure, same):
    family = next(item for item in (BERT, T5, *RELATIVES) if head in item.heads)
    fields = {name: value for name, value in changes.items() if name in SEVERAL_LABELS}
    calibration_options = {name: value for name, value in changes.items() if name not in fields}
    upstream = family.make_upstream_model(head, vocab_size=WORDS, **fields)
    if measure == "tokens" and family is T5:
        upstream.generation_config.suppress_tokens = [0, 1]  # otherwise, random weights generate only these
    model, outputs = make_source_outputs(upstream, **calibration_options)
    result = outputs.compare_with(model)
    assert result.measure == measure and result.examples == 128
    assert result.value == pytest.approx(same, abs=1e-5) and result.is_within_tolerance
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "shared" not in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    other = outputs.compare_with(model)
    assert (other.value < 0.9) if measure == "embeddings" else (other.value != 0)


def test_nan_outputs_are_outside_tolerance():
    model, outputs = make_source_outputs(make_bert())
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.fill_(torch.nan)
    result = outputs.compare_with(model)
    assert result.value is None and not result.is_within_tolerance and "not finite" in str(result)


def test_endless_texts_are_counted_separately_from_changed_words():
    """Check that the summary reports one repeating text of ten, which causes most of the difference."""
    source = [list(range(10, 50)), [1, 2, 3]]
    assert runaway(source, [list(range(10, 50)), [1, 2, 3, 4, 5, 6, 7]]) == 0  # a few words are not a loop
    assert runaway(source, [list(range(10, 50)) * 2, [1, 2, 3]]) == 0
    assert runaway(source, [[*range(10, 50), *[7] * 60], [1] * 17]) == 2
    result = Quality("tokens", 0.6, TOLERANCES["tokens"], 10, runaway=1)
    assert "60.0% of its generated tokens" in str(result) and "for 1 of 10 examples" in str(result)
    assert Quality.from_dict(result.to_dict()) == result
    before = {name: value for name, value in result.to_dict().items() if name != "runaway"}  # reports of 0.1.0 lack it
    assert Quality.from_dict(before).runaway == 0


@pytest.mark.thorough
def test_generation_without_an_end_is_counted():
    model, outputs = make_source_outputs(make_t5(), max_length=40)
    assert outputs.compare_with(model).runaway == 0
    outputs._generation.suppress_tokens = [0, model.config.eos_token_id]
    assert outputs.compare_with(model).runaway == 128


def test_identical_examples_are_inconclusive():
    model, calibration_data = convert(make_bert(), num_key_value_heads=4).eval(), make_calibration()
    texts = make_texts_with_equal_tokens(calibration_data.texts[0], 40)
    calibration_data = dataclasses.replace(calibration_data, texts=texts)
    result = compute_source_outputs(model, calibration_data).compare_with(model)
    assert result.alike and result.value is None and result.verdict == "inconclusive"
    assert str(result) == "the original model gives all examples the same embedding, so the models cannot be compared"
    assert str(Quality.from_dict(result.to_dict())) == str(result)


def test_text_unknown_to_the_source_is_inconclusive(caplog):
    """Check a T5 that does not predict its targets, as if sources and targets were swapped."""
    model = T5.make_upstream_model("T5ForConditionalGeneration", vocab_size=WORDS)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.generation_config.suppress_tokens = [0, 1]  # otherwise, random weights generate only these
    model, outputs = make_source_outputs(model, target_texts=make_texts(seed=1))
    result = outputs.compare_with(model)
    assert result.value == pytest.approx(0, abs=1e-5) and result.losses[0] > 1.05 * math.log(WORDS)
    assert result.unknown and not result.is_within_tolerance and result.verdict == "inconclusive"
    check_within_tolerance(result, strict=False)
    assert "The conversion is inconclusive: the original model has a loss of" in caplog.text
    with pytest.raises(OutsideToleranceError, match="more than that of a random guess"):
        check_within_tolerance(result, strict=True)
    assert Quality.from_dict(result.to_dict()).verdict == "inconclusive"


def make_quality(measure, value, interval=None, examples=100):
    return Quality(measure, value, TOLERANCES[measure], examples, interval=interval)


@pytest.mark.parametrize(
    ("measure", "value", "interval", "verdict"),
    [
        ("predictions", 0.02, (0.01, 0.05), "within tolerance"),
        ("predictions", 0.08, (0.05, 0.13), "inconclusive"),
        ("predictions", 0.12, (0.07, 0.19), "inconclusive"),
        ("predictions", 0.30, (0.22, 0.39), "outside tolerance"),
        ("loss", 0.2, (0.15, 0.25), "within tolerance"),
        ("embeddings", 0.9, (0.88, 0.92), "within tolerance"),
        ("embeddings", 0.81, (0.79, 0.83), "inconclusive"),
        ("embeddings", 0.7, (0.6, 0.79), "outside tolerance"),
    ],
)
def test_interval_determines_the_verdict(measure, value, interval, verdict):
    result = make_quality(measure, value, interval)
    assert result.verdict == Quality.from_dict(json.loads(json.dumps(result.to_dict()))).verdict == verdict
    assert result.is_within_tolerance is (verdict == "within tolerance")
    assert "(95 % interval " in str(result)
    assert make_quality(measure, value, examples=1).verdict == "inconclusive"


def test_wilson_and_clustered_intervals_equal_their_formulas():
    counts = torch.ones(38)
    assert compute_ratio_confidence_interval(counts * 0, counts, True) == pytest.approx((0, 0.0918), abs=1e-4)
    result, tokens = torch.zeros(38), torch.full((38,), 20.0)
    result[:4] = 1
    tabulated = pytest.approx((0.0417, 0.2413), abs=3e-3)  # the interval for 4 of 38
    assert compute_ratio_confidence_interval(result, counts, True) == tabulated
    # Four complete texts are not 80 independent tokens.
    assert compute_ratio_confidence_interval(result * 20, tokens, True) == tabulated
    low, high = compute_ratio_confidence_interval(torch.full((38,), 2.0), tokens, True)
    assert high - low < 0.05  # two tokens in each text vary like independent ones
    assert compute_ratio_confidence_interval(torch.tensor([1.0]), torch.tensor([1.0]), True) is None


def test_intervals_have_their_nominal_coverage():
    generator, hits = torch.Generator().manual_seed(0), {"share": 0, "mean": 0}
    for _ in range(400):
        counts = torch.randint(5, 30, (60,), generator=generator).double()
        chance = 0.06 * torch.rand(60, generator=generator) * 2  # the rate differs between texts
        changed = torch.binomial(counts, chance.double(), generator=generator)
        low, high = compute_ratio_confidence_interval(changed, counts, True)
        hits["share"] += low <= 0.06 <= high
        differences = 0.2 * counts + torch.randn(60, generator=generator) * 3
        low, high = compute_ratio_confidence_interval(differences, counts, False)
        hits["mean"] += low <= 0.2 <= high
    assert 370 <= min(hits.values())


def make_classifier(head, rare_words, **fields):
    """Return a model that assigns class 1 by words, and a copy that always assigns class 0."""
    model = BERT.make_upstream_model(head, vocab_size=WORDS, num_labels=2, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            if name.endswith("LayerNorm.weight"):
                parameter.fill_(1.0)
        model.bert.embeddings.word_embeddings.weight[:, 0] = -1.0
        model.bert.embeddings.word_embeddings.weight[rare_words, 0] = 1.0
        model.bert.embeddings.word_embeddings.weight[:, 1] = -model.bert.embeddings.word_embeddings.weight[:, 0]
        model.classifier.weight[1, 0] = 1.0
    return model


def test_tagger_without_tags_is_outside_tolerance():
    """Check a tagger that changes less than 10% of all tokens."""
    model, outputs = make_source_outputs(make_classifier("BertForTokenClassification", [41]))
    same = outputs.compare_with(model)
    assert (same.value, same.verdict, same.is_rare) == (0.0, "within tolerance", True)
    tags = torch.cat(outputs._source_outputs["predictions"])
    assert 0 < tags.float().mean() < 0.1
    model.classifier.weight.data.zero_()
    result = outputs.compare_with(model)
    assert (result.value, result.verdict) == (1.0, "outside tolerance")
    assert "without the most frequent one" in str(result)


def test_majority_classifier_is_outside_tolerance():
    calibration_data = make_calibration()
    texts = [*make_texts_with_equal_tokens("b" * 12, 366), *make_texts_with_equal_tokens("k" * 12, 34)]
    rare = calibration_data.tokenizer(["k"], max_length=9)["input_ids"][0][0]
    upstream = BERT.make_upstream_model("BertForSequenceClassification", vocab_size=WORDS, num_labels=2)
    model = convert(upstream, num_key_value_heads=4).eval()
    outputs = compute_source_outputs(model, dataclasses.replace(calibration_data, texts=texts))
    is_rare = [bool((batch["input_ids"] == rare).any()) for batch in outputs._batches for _ in batch["input_ids"][:1]]
    assert any(is_rare)
    outputs._source_outputs = {"predictions": [torch.tensor([int(i % 12 == 0)]) for i in range(100)]}
    outputs._compute_outputs = lambda model: {"predictions": [torch.tensor([0])] * 100}
    result = outputs.compare_with(model)
    assert (result.value, result.verdict, result.is_rare) == (1.0, "outside tolerance", True)
    outputs._source_outputs = {"predictions": [torch.tensor([i % 2]) for i in range(100)]}
    assert outputs.compare_with(model).value == 0.5  # no label is too frequent, so all examples count


def make_label_model(bias=0.0, **fields):
    """Return a classifier with several labels; a bias of 100 or -100 gives every text all labels or none."""
    fields = {"vocab_size": WORDS, **SEVERAL_LABELS, **fields}
    model = BERT.make_upstream_model("BertForSequenceClassification", **fields)
    torch.nn.init.constant_(model.classifier.bias, bias)
    return model


def compare_labels(source, converted):
    """Return a comparison of labels [b, labels]."""
    _, outputs = make_source_outputs(make_label_model())
    outputs._is_frequent = source.float().mean(0) > 0.5
    outputs._measure, outputs._source_outputs = "predictions", {"predictions": list(source)}
    result, counts = outputs._compare({"predictions": list(converted)})
    return float(result.sum() / counts.sum())


def test_only_labels_of_either_model_count():
    source = torch.tensor([[True, False, False], [False, True, False], [False, False, False]])
    converted = torch.tensor([[True, False, False], [False, False, True], [False, False, False]])
    assert compare_labels(source, converted) == pytest.approx(2 / 3)


def test_frequent_label_is_measured_on_texts_without_it():
    source = torch.tensor([[True]] * 9 + [[False]])
    assert compare_labels(source, torch.ones(10, 1, dtype=torch.bool)) == 1.0
    assert compare_labels(source, source) == 0.0


@pytest.mark.parametrize(("bias", "fields"), [(100.0, {"num_labels": 1}), (-100.0, {})], ids=["all", "none"])
def test_texts_with_all_or_no_labels_are_compared_by_scores(bias, fields):
    model, outputs = make_source_outputs(make_label_model(bias, **fields))
    result = outputs.compare_with(model)
    assert result.measure == "scores" and result.value == pytest.approx(0, abs=1e-5)


def test_score_error_is_a_share_of_the_variance():
    scores, others = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0], [4.0], [6.0]])
    result, counts = _compute_difference_terms("scores", scores, others)
    assert float(result.sum() / counts.sum()) == pytest.approx(4 / 14)
    text = str(Quality("scores", 4 / 14, 0.1, 3))
    assert text == "the error of its scores is 28.6% of the variance of the original's"
    assert "the same score, so" in str(Quality("scores", None, 0.1, 3, alike=True))


def test_confidence_bounds_equal_reference_values():
    assert all(Quality(name, tolerance, tolerance, 9).is_within_tolerance for name, tolerance in TOLERANCES.items())
    for name, value in (("tokens", 0.11), ("loss", 0.31), ("predictions", 0.11), ("embeddings", 0.79)):
        assert not Quality(name, value, TOLERANCES[name], 9).is_within_tolerance


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [([], [1], 1), ([1, 2, 3], [1, 3], 1), ([1, 2], [2, 1], 2), ([5], [5], 0), ([1, 2, 3], [4, 2], 2)],
)
def test_edit_distance_counts_changed_words(first, second, distance):
    assert compute_edit_distance(first, second) == compute_edit_distance(second, first) == distance


@pytest.mark.thorough
def test_destroyed_model_gives_a_warning_and_strict_raises(tmp_path, caplog):
    """Check a latent of rank 2, which loses nearly all information about keys and values of size 32."""
    make_bert().save_pretrained(tmp_path / "source")
    options = {"kv_lora_rank": 2, "calibration": make_calibration()}
    convert_checkpoint(tmp_path / "source", tmp_path / "out", **options)
    assert "The conversion is outside tolerance" in caplog.text and "--num_key_value_heads" in caplog.text
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert not report["quality"]["is_kept"]
    with pytest.raises(
        ValueError, match=r"is outside tolerance.*The report was written to .*strict\.conversion_report\.json"
    ):
        convert_checkpoint(tmp_path / "source", tmp_path / "strict", **options, strict=True)
    assert not (tmp_path / "strict").exists()
    left = json.loads((tmp_path / "strict.conversion_report.json").read_text())
    assert left["quality"] == report["quality"] and left["layers"]
    with pytest.raises(ValueError, match="is outside tolerance"):
        convert(make_bert(), **options, strict=True)
    with pytest.raises(ValueError, match="is outside tolerance"):
        convert(tmp_path / "source", **options, strict=True)


def test_strict_without_held_out_text_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"`strict` .*`calibration`"):
        convert(make_bert(), 2, method="mean", strict=True)


@pytest.mark.thorough
def test_measurement_restores_the_generation_settings():
    """Check that comparing greedy outputs keeps the generation settings of the user's model."""
    model = make_t5()
    model.generation_config.num_beams = 3
    converted = convert(model.train(), 2, calibration=make_calibration(max_length=12))
    assert converted.generation_config.num_beams == 3 and converted.training


@pytest.fixture
def bert_and_lines(tmp_path):
    """The folder of a BERT with a tokenizer, and a file with calibration text."""
    lines, source = tmp_path / "lines.txt", tmp_path / "source"
    lines.write_text("".join(f"{row}\n" for row in make_texts()))
    words = len(make_tokenizer("bert", lines.read_text(), source))
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=words, initializer_range=0.3, **sizes)).save_pretrained(source)
    return source, lines


def test_quick_conversion_reads_few_examples_and_skips_the_fit(bert_and_lines, tmp_path, monkeypatch, capsys):
    source, lines = bert_and_lines
    monkeypatch.setattr(convert_command, "QUICK_SIZE", 32)
    line = ["convert", str(source), "--num_key_value_heads", "2", "--quick", "--output_dir", str(tmp_path / "out")]
    assert main(line) == 2
    assert "--quick requires calibration. Set --calibration_file" in capsys.readouterr().err
    assert main([*line, "--calibration_file", str(lines)]) == 0
    report = json.loads((tmp_path / "out/conversion_report.json").read_text())["calibration"]
    assert (report["count"], report["fit_steps"]) == (32, 0)
    line[-1] = str(tmp_path / "other")
    assert main([*line, "--calibration_file", str(lines), "--calibration_size", "40", "--fit_steps", "1"]) == 0
    report = json.loads((tmp_path / "other/conversion_report.json").read_text())["calibration"]
    assert (report["count"], report["fit_steps"]) == (40, 1)


@pytest.mark.thorough
def test_convert_command_supports_strict_and_quiet(bert_and_lines, tmp_path, capsys):
    """Check status 1 without a folder, or a warning; attention errors appear only on request."""
    source, lines = bert_and_lines
    line = ["convert", str(source), "--kv_lora_rank", "1", "--calibration_file", str(lines), "--fit_steps", "0"]
    assert main([*line, "--strict", "--output_dir", str(tmp_path / "strict")]) == 1
    assert not (tmp_path / "strict").exists() and (tmp_path / "strict.conversion_report.json").is_file()
    assert "error: The conversion is outside tolerance" in capsys.readouterr().err
    assert main([*line, "--output_dir", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "held-out examples: outside tolerance (0.8)\n" in printed and "error of attention outputs" not in printed
    assert main([*line, "--attention_errors", "--output_dir", str(tmp_path / "errors")]) == 0
    assert "error of attention outputs" in capsys.readouterr().out
