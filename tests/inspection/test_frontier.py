"""Check `attn-variants frontier`: the tried variants, their measurements, and the command for each of them."""

import copy
import json
import math
import random
import shlex
from dataclasses import replace

import pytest
import torch
from architectures import BERT, T5
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.speech import make_feature_extractor, save_whisper_checkpoint, write_recordings
from fixtures.tiny_t5 import make_lines_of_words, make_tiny_t5
from relatives import RELATIVES
from torch import nn
from transformers import AutoTokenizer
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel, cli
from hf_attn_variants.conversion import Calibration, convert_model, read_audio_calibration
from hf_attn_variants.conversion.calibration.batches import IGNORE_INDEX, make_batches
from hf_attn_variants.conversion.calibration.examples import generate_audio_decoder_inputs, load_audio
from hf_attn_variants.conversion.plan import make_seeded_generator
from hf_attn_variants.inspection.frontier import (
    Frontier,
    FrontierRow,
    LazyConvertedAttention,
    _compute_mean_loss_difference,
    _limit_lengths,
    _mark_frontier,
    list_default_variants,
    list_requested_variants,
    load_source_model,
    measure_frontier,
    select_held_out_examples,
    select_variants,
)
from hf_attn_variants.inspection.held_out import make_held_out_set


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A tiny T5's folder; tests do not write to it."""
    return make_tiny_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def source(t5):
    """The model of that folder, and calibration text with targets."""
    model, tokenizer = load_source_model(str(t5), Calibration(["a", "b"]))
    return model, Calibration(make_lines_of_words(160), make_lines_of_words(160, 1), tokenizer=tokenizer, fit_steps=0)


def get_architecture(head):
    """Return the architecture that has a head."""
    return next(architecture for architecture in (BERT, T5, *RELATIVES) if head in architecture.heads)


def has_same_tensors(first, second):
    first_tensors, second_tensors = first.state_dict(), second.state_dict()
    assert first_tensors.keys() == second_tensors.keys()
    return all(torch.equal(first_tensors[name], second_tensors[name]) for name in first_tensors)


@pytest.mark.thorough
def test_combined_conversions_equal_a_single_conversion(source):
    model, calibration = source
    pieces = LazyConvertedAttention(model, calibration)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    models_by_fields = {}
    both = {"cross_kv_lora_rank": 12, "kv_lora_rank": 8}
    for fields in ({"cross_kv_lora_rank": 12}, {"kv_lora_rank": 8}, {"kv_lora_rank": 4}, {"num_key_value_heads": 2}):
        assert not pieces.is_converted(fields)
        models_by_fields[str(fields)] = pieces.build_model(fields)
    by_layer = {"per_layer_values": {"kv_lora_rank": [8, 4]}}
    exact = {"cross_kv_lora_rank": 32, "kv_lora_rank": 4}
    for fields in (both, by_layer, exact):
        assert pieces.is_converted(fields)
        models_by_fields[str(fields)] = pieces.build_model(fields)
    for fields in ({"cross_kv_lora_rank": 12}, {"num_key_value_heads": 2}, both, by_layer, exact):
        at_once = convert_model(model, method="calibrated", calibration=calibration, **fields)
        assert has_same_tensors(models_by_fields[str(fields)], at_once), fields
        combined_config, single_config = (
            item.config.to_diff_dict() for item in (models_by_fields[str(fields)], at_once)
        )
        assert combined_config == {name: value for name, value in single_config.items() if name != "architectures"}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_cached_encoder_outputs_are_lossless_without_conversion(source):
    model, calibration = source
    pieces = LazyConvertedAttention(model, calibration)
    fields = {"cross_kv_lora_rank": model.config.d_model}
    assert pieces.is_converted(fields) and pieces.get_attention_error(fields) == 0
    text = make_held_out_set(model, calibration.tokenizer, calibration)
    above, error = _compute_mean_loss_difference(
        text.compute_losses(pieces.build_model(fields)), text.compute_losses(model)
    )
    assert abs(above) < 1e-6 and error < 1e-6


def test_target_loss_equals_the_loss_of_the_model(source):
    model, calibration = source
    losses = make_held_out_set(model, calibration.tokenizer, replace(calibration, batch_size=7)).compute_losses(model)
    assert losses.shape == (160, 2)
    tokenizer, total = calibration.tokenizer, torch.zeros(2, dtype=torch.float64)
    for text, target in zip(calibration.texts[:5], calibration.target_texts[:5], strict=True):
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        with torch.no_grad():
            loss = model(tokenizer(text, return_tensors="pt").input_ids, labels=labels).loss
        total += torch.tensor([float(loss) * labels.numel(), labels.numel()])
    five = replace(calibration, texts=calibration.texts[:5], target_texts=calibration.target_texts[:5])
    assert make_held_out_set(model, tokenizer, five).compute_losses(model).sum(0).tolist() == pytest.approx(
        total.tolist(), rel=1e-5
    )


def test_missing_targets_are_generated_by_the_source(source):
    model, calibration = source
    few = replace(calibration, texts=calibration.texts[:4], target_texts=None, max_length=6)
    text = make_held_out_set(model, calibration.tokenizer, few)
    # The most probable token at each position is the target.
    for batch in text.batches:
        logits = model(**batch).logits
        assert torch.equal(
            logits.argmax(-1)[batch["labels"] != IGNORE_INDEX], batch["labels"][batch["labels"] != IGNORE_INDEX]
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_bert(tmp_path_factory.mktemp("bert")))


@pytest.mark.parametrize(
    "head, measure",
    [
        ("BertForMaskedLM", "masked words"),
        ("BertLMHeadModel", "next words"),
        ("RobertaForCausalLM", "next words"),
        ("BertForSequenceClassification", "predictions"),
        ("BertForTokenClassification", "predictions"),
        ("BertForQuestionAnswering", "predictions"),
        ("BertModel", "embeddings"),
    ],
)
def test_each_head_has_its_own_measure(head, measure, tokenizer):
    size, architecture = {"vocab_size": len(tokenizer)}, get_architecture(head)
    model = architecture.make_model(head, **size)
    text = make_held_out_set(model, tokenizer, Calibration(make_lines_of_words(12), batch_size=5))
    losses = text.compute_losses(model)
    assert text.measure == measure and losses.shape == (12, 2) and (losses[:, 1] > 0).all()
    if measure in ("predictions", "embeddings"):
        assert losses[:, 0].abs().max() < 1e-5
        assert text.compute_losses(architecture.make_model(head, seed=1, **size))[:, 0].min() > 1e-4
    if measure == "masked words":
        hidden = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in text.batches)
        shown = sum(int((batch["input_ids"] == tokenizer.mask_token_id).sum()) for batch in text.batches)
        assert losses[:, 1].sum() == hidden == shown and hidden >= 12
    if measure in ("masked words", "next words"):
        expected = sum(
            model(**batch).loss.item() * int((batch["labels"][:, measure == "next words" :] != IGNORE_INDEX).sum())
            for batch in text.batches
        )
        assert float(losses[:, 0].sum()) == pytest.approx(expected, rel=1e-5)


ONE_SCORE = {"num_labels": 1}
SEVERAL_LABELS = {"num_labels": 3, "problem_type": "multi_label_classification"}


@pytest.mark.parametrize("fields", [ONE_SCORE, SEVERAL_LABELS])
def test_regression_and_multilabel_heads_use_their_training_loss(fields, tokenizer):
    models = [
        BERT.make_model("BertForSequenceClassification", seed=seed, vocab_size=len(tokenizer), **fields)
        for seed in (0, 1)
    ]
    text = make_held_out_set(models[0], tokenizer, Calibration(make_lines_of_words(7), batch_size=4))
    source_logits, logits = (torch.cat([model(**batch).logits for batch in text.batches]).detach() for model in models)
    if fields is ONE_SCORE:
        expected = ((logits - source_logits).square() / source_logits.var(correction=0)).squeeze(1)
    else:
        p, q = source_logits.sigmoid(), logits.sigmoid()
        expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean(1)
    assert text.measure == ("scores" if fields is ONE_SCORE else "predictions")
    assert text.compute_losses(models[1])[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert text.compute_losses(models[0])[:, 0].abs().max() < 1e-5


def test_constant_scores_are_inconclusive(tokenizer):
    model = BERT.make_model("BertForSequenceClassification", vocab_size=len(tokenizer), **ONE_SCORE)
    nn.init.zeros_(model.classifier.weight)
    text = make_held_out_set(model, tokenizer, Calibration(make_lines_of_words(3)))
    with pytest.raises(ValueError, match="same score"):
        text.compute_losses(model)


def test_divergence_equals_kullback_leibler(tokenizer):
    models = [
        BERT.make_model("BertForSequenceClassification", seed=seed, vocab_size=len(tokenizer)) for seed in (0, 1)
    ]
    text = make_held_out_set(models[0], tokenizer, Calibration(make_lines_of_words(6)))
    [batch] = text.batches
    source_log_probs, log_probs = (model(**batch).logits.log_softmax(-1) for model in models)
    expected = nn.functional.kl_div(log_probs, source_log_probs, log_target=True, reduction="none").sum(-1)
    assert text.compute_losses(models[1])[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize("head", ["T5Model", "MarianModel", "BertForMultipleChoice", "ElectraForPreTraining"])
def test_unmeasurable_head_raises_an_error(head, tokenizer):
    with pytest.raises(ValueError, match=rf"AttnVariant{head}.*plain text"):
        make_held_out_set(get_architecture(head).make_model(head), tokenizer, Calibration(make_lines_of_words(4)))


@pytest.mark.parametrize("head", ["M2M100ForConditionalGeneration", "MarianMTModel"])
def test_bart_relative_is_measured_with_targets(head, tokenizer):
    model = get_architecture(head).make_model(head, vocab_size=len(tokenizer))
    text = make_held_out_set(model, tokenizer, Calibration(make_lines_of_words(4), make_lines_of_words(4, 1)))
    [batch] = text.batches
    losses = text.compute_losses(model).sum(0)
    assert text.measure == "targets" and losses[0] / losses[1] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_standard_error_is_computed_over_texts():
    # For texts of one word, this is the standard error of the mean.
    losses = torch.tensor([[1.0, 1], [2.0, 1], [4.0, 1]], dtype=torch.float64)
    mean, error = _compute_mean_loss_difference(losses, torch.zeros_like(losses))
    assert mean == pytest.approx(7 / 3) and error == pytest.approx(losses[:, 0].std().item() / math.sqrt(3))


def test_measured_text_is_never_fitted(source):
    model, calibration = source
    everything = Calibration(make_lines_of_words(400), make_lines_of_words(400, 1))
    subset = replace(calibration, texts=everything.texts[:160], target_texts=everything.target_texts[:160])
    held_out = select_held_out_examples(subset, everything, size=100)
    pairs = set(zip(held_out.texts, held_out.target_texts, strict=True))
    assert len(pairs) == 100 and not pairs & set(zip(subset.texts, subset.target_texts, strict=True))
    assert pairs <= set(zip(everything.texts, everything.target_texts, strict=True))
    # Without other text, the held-out examples of the conversion are used.
    held_out = select_held_out_examples(subset, subset, size=100)
    _, batches = make_batches(model, calibration.tokenizer, subset, make_seeded_generator(0, "held-out texts"))
    ids = {tuple(row[row != 0].tolist()) for batch in batches for row in batch["input_ids"]}
    assert ids == {tuple(calibration.tokenizer(text).input_ids) for text in held_out.texts} and len(ids) == 40


def make_row(name, size, loss, **others):
    return FrontierRow(name, {"kv_lora_rank": size}, loss, loss, 0.0, 0.1, 5, {}, size, 1.0, **others)


def test_frontier_contains_undominated_variants_and_the_cheapest_within_the_loss():
    sizes = {"source": (100, 0.0), "a": (50, 0.1), "beaten": (60, 0.2), "b": (10, 0.3), "twin": (10, 0.3)}
    rows = [make_row(name, *size) for name, size in {**sizes, "worse": (10, 0.4)}.items()]
    marked = _mark_frontier(rows)
    assert [item.name for item in marked if item.on_frontier] == ["source", "a", "b", "twin"]
    frontier = Frontier("x", "X", "targets", 3, {}, 1, 1, marked)
    smallest = [frontier.find_smallest_variant(loss) for loss in (0.05, 0.1, 0.3, 9.0)]
    assert [variant and variant.name for variant in smallest] == [None, "a", "b", "b"]


def test_default_variants_are_valid_for_the_model():
    config = T5.config_class(d_model=512, d_kv=64, num_heads=8)
    options = list_default_variants(config, "num_key_value_heads", decodes=True)
    assert options[0] == {"cross_kv_lora_rank": 512} and {"num_key_value_heads": 1} in options
    assert {"cross_kv_lora_rank": 256, "kv_lora_rank": 128} in options
    for fields in options:
        T5.config_class.from_upstream(config, **fields)
    # The variants of an encoder do not include a full-width latent, which would save nothing.
    encoder = list_default_variants(config, "encoder_num_key_value_heads", decodes=False)
    assert {item for fields in encoder for item in fields} == {"encoder_num_key_value_heads", "encoder_kv_lora_rank"}
    assert {"encoder_kv_lora_rank": 512} not in encoder
    heads = [fields["encoder_num_key_value_heads"] for fields in encoder if "encoder_num_key_value_heads" in fields]
    assert heads == [4, 2, 1]


@pytest.mark.parametrize(
    "fields", [{"num_key_value_heads": 4}, {"per_layer_values": {"num_key_value_heads": [4, 12]}}]
)
@pytest.mark.parametrize(("architecture", "head"), [(BERT, "BertForMaskedLM"), (T5, "T5ForConditionalGeneration")])
def test_grouped_heads_are_merged_in_whole_groups(architecture, head, fields):
    config = architecture.make_config(**fields)
    options = list_default_variants(config, "num_key_value_heads", decodes=config.is_encoder_decoder)
    counts = [option["num_key_value_heads"] for option in options if "num_key_value_heads" in option]
    assert counts == ([2, 1] if "num_key_value_heads" in fields else [4, 2, 1])  # of 12 query heads, not 3
    model = architecture.make_model(head, **fields)
    for count in counts:
        assert convert_model(model, count).config.get_layer_value("num_key_value_heads", 1) == count


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"talking_heads": "both"}, r"talking heads \('both'\)"),
        ({"attention_kernel": "elu"}, "calibration.*softmax.*kernel"),
        ({"attention_pattern": "memory_compressed", "attention_block_size": 2}, "pattern 'memory_compressed'"),
    ],
)
def test_unsupported_source_error_names_the_source(fields, message):
    model = BERT.make_model("BertForMaskedLM", **fields)
    calibration = Calibration(["a", "b"], tokenizer=object())
    with pytest.raises(ValueError, match=message):
        measure_frontier(model, [{"kv_lora_rank": 4}], calibration, calibration)


def test_lengths_do_not_exceed_the_positions(source):
    _, calibration = source
    assert _limit_lengths(BERT.make_config(max_position_embeddings=144), calibration, 512, None) == (144, 144)
    bart = next(item for item in RELATIVES if item.name == "bart").make_config(max_position_embeddings=144)
    assert _limit_lengths(bart, calibration, 512, 1024) == (144, 144)
    assert _limit_lengths(bart, calibration, 64, 32) == (64, 32)
    assert _limit_lengths(T5.make_config(), calibration, 512, 1024) == (512, 1024)


def test_tokenizer_without_a_mask_token_raises_an_error(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.mask_token = None
    with pytest.raises(ValueError, match="`mask_token`"):
        make_held_out_set(BERT.make_model("BertForMaskedLM"), bare, Calibration(["a b", "c d"], tokenizer=bare))


def test_source_with_empty_outputs_raises_an_error(source, monkeypatch):
    model, calibration = source
    silent = replace(calibration, target_texts=None)
    monkeypatch.setattr(type(model), "generate", lambda self, input_ids, **_: torch.full((len(input_ids), 2), 0))
    with pytest.raises(ValueError, match="held-out examples"):
        measure_frontier(model, [{"kv_lora_rank": 4}], silent, silent)


def test_given_values_are_combined_in_a_grid():
    values_by_field = {"num_key_value_heads": [2, 1], "kv_lora_rank": [8, 4], "cross_kv_lora_rank": [16]}
    values_by_field |= {"encoder_kv_lora_rank": None}
    assert list_requested_variants(values_by_field) == [
        {"kv_lora_rank": 8, "cross_kv_lora_rank": 16},
        {"kv_lora_rank": 4, "cross_kv_lora_rank": 16},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1},
    ]


def test_invalid_frontier_option_raises_before_any_work(source):
    model, calibration = source
    with pytest.raises(ValueError, match="`cross_kv_lora_rank`"):
        select_variants(BERT.make_model("BertModel"), {"cross_kv_lora_rank": [4], "kv_lora_rank": None})
    with pytest.raises(ValueError, match="must divide"):
        measure_frontier(model, [{"num_key_value_heads": 3}], calibration, calibration)


def run_frontier(folder, tmp_path, *flags):
    out = tmp_path / "frontier"
    argv = ["frontier", str(folder), "--calibration_file", str(tmp_path / "text.txt"), "--output_dir", str(out)]
    try:
        return cli.main([*argv, "--calibration_size", "160", "--length", "16", *flags]), out
    except SystemExit as stopped:  # argparse's
        return stopped.code, out


@pytest.mark.thorough
def test_printed_command_reproduces_the_measured_model(t5, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("\n".join(make_lines_of_words(300)) + "\n")
    (tmp_path / "targets.txt").write_text("\n".join(make_lines_of_words(300, 1)) + "\n")
    targets = ("--calibration_target_file", str(tmp_path / "targets.txt"), "--seed", "3")
    ranks = ("--cross_kv_lora_rank", "32", "12", "--kv_lora_rank", "8", "4", "--num_key_value_heads", "2")
    status, out = run_frontier(t5, tmp_path, *targets, *ranks, "--loss", "100")
    assert status == 0
    printed = capsys.readouterr().out
    assert (out / "frontier.png").stat().st_size > 10_000
    result = json.loads((out / "frontier.json").read_text())
    assert result["rows"][0]["fields"] == {} and len(result["rows"]) == 6
    assert result["chosen"]["name"] == "MHA + cross latent 12 + latent 4" and result["chosen"]["command"] in printed
    assert result["held_out_texts"] == 140
    monkeypatch.chdir(tmp_path)
    command = shlex.split(result["chosen"]["command"])
    assert command[:2] == ["attn-variants", "convert"] and cli.main(command[1:]) == 0
    converted, tokenizer = load_source_model(command[-1], Calibration(["a", "b"]))
    texts, answers = make_lines_of_words(300), make_lines_of_words(300, 1)
    everything = Calibration(texts, answers)
    indices = sorted(random.Random(3).sample(range(300), 160))
    used = Calibration([texts[i] for i in indices], [answers[i] for i in indices], tokenizer=tokenizer)
    model, _ = load_source_model(str(t5), Calibration(["a", "b"]))
    text = make_held_out_set(model, tokenizer, select_held_out_examples(used, everything, 512, seed=3))
    above, error = _compute_mean_loss_difference(text.compute_losses(converted), text.compute_losses(model))
    [measured] = [item for item in result["rows"] if item["name"] == result["chosen"]["name"]]
    assert measured["loss_above"] == pytest.approx(above, abs=1e-5) and measured["loss_above_error"] > 0
    assert measured["loss_above_error"] == pytest.approx(error, rel=1e-3)
    report = json.loads((tmp_path / command[-1] / "conversion_report.json").read_text())
    assert measured["attention_error"] == pytest.approx(report["mean_output_relative_error"], abs=1e-4)
    cache = {site: row["after"] for site, row in report["kv_cache_bytes_per_token"].items()}
    assert measured["kv_cache_bytes_per_token"] == cache


@pytest.mark.thorough
def test_encoder_frontier_uses_parameters(tmp_path, capsys):
    folder = make_tiny_bert(tmp_path / "bert")
    (tmp_path / "text.txt").write_text("\n".join(make_lines_of_words(160)) + "\n")
    status, out = run_frontier(folder, tmp_path, "--json", "--kv_lora_rank", "16", "--num_key_value_heads", "2")
    assert status == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "frontier.json").read_text())
    assert "cosine" in result["measure"] and result["chosen"] is None and result["held_out_texts"] == 40
    source, *others = result["rows"]
    assert source["kv_cache_bytes"] is None and {item["name"] for item in others} == {"MHA + latent 16", "GQA-2"}
    for item in others:
        assert 0 < item["loss_above"] < 1 and item["parameters"] < source["parameters"]
        config = AttnVariantBertConfig.from_pretrained(folder, **item["fields"])
        assert item["parameters"] == AttnVariantBertModel(config).num_parameters()


@pytest.mark.thorough
def test_evaluation_text_may_be_a_separate_file(tmp_path, capsys):
    folder = make_tiny_bert(tmp_path / "bert")
    (tmp_path / "text.txt").write_text("\n".join(make_lines_of_words(300)) + "\n")
    (tmp_path / "other.txt").write_text("\n".join(make_lines_of_words(9, seed=5)) + "\n")
    flags = ("--json", "--num_key_value_heads", "2", "--held_out_file", str(tmp_path / "other.txt"))
    status, _ = run_frontier(folder, tmp_path, *flags)
    result = json.loads(capsys.readouterr().out)
    assert status == 0 and result["held_out_texts"] == 9
    model, tokenizer = load_source_model(str(folder), Calibration(["a", "b"]))
    indices = sorted(random.Random(0).sample(range(300), 160))
    used = Calibration([make_lines_of_words(300)[i] for i in indices], tokenizer=tokenizer, fit_steps=0)
    text = make_held_out_set(model, tokenizer, Calibration(make_lines_of_words(9, seed=5)))
    converted = convert_model(model, 2, calibration=used)
    assert result["rows"][1]["loss"] == pytest.approx(float(text.compute_losses(converted)[:, 0].mean()), rel=1e-4)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--kv_lora_rank", "33"], "from 1 to 32"),
        (["--held_out_size", "1"], "`held_out_size`"),
        (["--encoder_num_key_value_heads", "2"], "`encoder_num_key_value_heads`"),
    ],
)
def test_invalid_frontier_flags_raise_before_any_work(flags, message, tmp_path, capsys):
    folder = make_tiny_bert(tmp_path / "bert")
    (tmp_path / "text.txt").write_text("\n".join(make_lines_of_words(160)) + "\n")
    status, out = run_frontier(folder, tmp_path, *flags)
    assert status and message in capsys.readouterr().err and not out.exists()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A tiny Whisper's folder, and a folder of recordings."""
    root = tmp_path_factory.mktemp("whisper")
    return save_whisper_checkpoint(root / "whisper", suppress_tokens=[1, 2]), write_recordings(
        root / "audio", 40, seconds=0.5
    )


@pytest.mark.thorough
def test_whisper_is_measured_on_its_own_transcripts(whisper, tmp_path, capsys, monkeypatch):
    checkpoint, audio = whisper
    out = tmp_path / "frontier"
    argv = ["frontier", str(checkpoint), "--calibration_audio_dir", str(audio), "--calibration_size", "28", "--json"]
    ranks = ["--cross_kv_lora_rank", "48", "8", "--encoder_num_key_value_heads", "2", "--loss", "100"]
    assert cli.main([*argv, *ranks, "--output_dir", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["held_out_texts"] == 12 and "transcripts" in result["measure"] and (out / "frontier.png").exists()
    rows = {json.dumps(row["fields"]): row for row in result["rows"]}
    exact, short = (rows[json.dumps({"cross_kv_lora_rank": rank})] for rank in (48, 8))
    assert abs(exact["loss_above"]) < 1e-5 < abs(short["loss_above"])
    assert result["source_length"] == 20 and result["length"] == 40
    assert rows[json.dumps({"encoder_num_key_value_heads": 2})]["name"] == "MHA + encoder GQA-2"
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(result["chosen"]["command"])[1:]) == 0
    # Compute the expected losses on files outside of the sample, with transcripts of the original model as targets.
    extractor = make_feature_extractor()
    calibration = read_audio_calibration(audio, size=28, feature_extractor=extractor)
    held_out = [path for path in sorted(audio.glob("*")) if path not in calibration.audio]
    source, _ = load_source_model(str(checkpoint), calibration)
    reloaded, _ = load_source_model(shlex.split(result["chosen"]["command"])[-1], calibration)
    losses = []
    for path in held_out:
        features = extractor(load_audio(path)[0], sampling_rate=16000, return_tensors="pt").input_features
        ids = generate_audio_decoder_inputs(source, {"input_features": features}, 224)["decoder_input_ids"]
        with torch.no_grad():
            logits = reloaded(input_features=features, decoder_input_ids=ids).logits[0, :-1]
        places = [i for i, token in enumerate(ids[0, 1:].tolist()) if token not in {2, 30, 31, 32, 39}]
        losses += nn.functional.cross_entropy(logits[places], ids[0, 1:][places], reduction="none").tolist()
    chosen = next(row for row in result["rows"] if row["name"] == result["chosen"]["name"])
    assert chosen["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.thorough
def test_unchanged_encoder_is_not_run_again(whisper, monkeypatch):
    checkpoint, audio = whisper
    calibration = read_audio_calibration(audio, feature_extractor=make_feature_extractor(), fit_steps=0)
    source, _ = load_source_model(str(checkpoint), calibration)
    pieces = LazyConvertedAttention(source, calibration)
    text = make_held_out_set(source, make_feature_extractor(), calibration)
    decoder, encoder = {"num_key_value_heads": 2}, {"encoder_num_key_value_heads": 2}
    models = [source, pieces.build_model(decoder), pieces.build_model(encoder)]
    before = [replace(text, encoder=None).compute_losses(model) for model in models]
    runs = []
    forward = WhisperEncoder.forward
    monkeypatch.setattr(WhisperEncoder, "forward", lambda *args, **kwargs: runs.append(1) or forward(*args, **kwargs))
    for model, expected, count in zip(models, before, (0, 0, len(text.batches)), strict=True):
        runs.clear()
        torch.testing.assert_close(text.compute_losses(model), expected)
        assert len(runs) == count
    # A second conversion does not run the encoder either, because it uses the recorded encoder outputs of the original
    # model.
    runs.clear()
    pieces.build_model({"num_key_value_heads": 4})
    assert not runs


def test_audio_and_text_inputs_cannot_be_swapped(whisper, t5, tmp_path, capsys):
    checkpoint, audio = whisper
    (tmp_path / "text.txt").write_text("\n".join(make_lines_of_words(160)) + "\n")
    for folder, flags, message in (
        (checkpoint, ["--calibration_file", str(tmp_path / "text.txt")], "--calibration_audio_dir"),
        (t5, ["--calibration_audio_dir", str(audio)], "--calibration_file"),
        (t5, [], "--calibration_file"),
        (checkpoint, ["--held_out_audio_dir", str(audio)], "required"),
    ):
        try:
            status = cli.main(["frontier", str(folder), *flags, "--output_dir", str(tmp_path / "out")])
        except SystemExit as stopped:
            status = stopped.code
        assert status and message in capsys.readouterr().err and not (tmp_path / "out").exists()
