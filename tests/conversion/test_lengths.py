"""Check the length of calibration examples: for fitting, and for the final measurement."""

import json
import logging

import pytest
import torch
from architectures import BERT
from fixtures.calibrations import WORDS, WordTokenizer, make_bert, make_calibration, make_t5, make_texts

from hf_attn_variants.cli import main
from hf_attn_variants.conversion import Calibration, convert, convert_checkpoint
from hf_attn_variants.conversion.calibration import batches
from hf_attn_variants.conversion.calibration.batches import (
    make_batches,
    make_untruncated_batches,
    set_length_statistics,
)
from hf_attn_variants.conversion.calibration.source_outputs import SourceOutputs


class Masking(WordTokenizer):
    mask_token_id = 1


LONG = [row * 8 for row in make_texts(120)]  # 64 to 184 tokens


def get_longest(parts):
    return max(int(batch["attention_mask"].sum(1).max()) for batch in parts)


def make_bert_batches(make, calibration):
    """Return the result of `make_batches` or `make_untruncated_batches` for a tiny BERT."""
    return make(make_bert(), WordTokenizer(), calibration, torch.Generator().manual_seed(0))


def make_long_calibration(**changes):
    return Calibration(LONG, tokenizer=WordTokenizer(), fit_steps=0, **{"passages": False} | changes)


def test_long_examples_are_not_truncated(caplog):
    with caplog.at_level(logging.WARNING, "hf_attn_variants"):
        assert get_longest(make_bert_batches(make_batches, make_long_calibration())[0]) > 150
    assert "truncated" not in caplog.text


def test_max_length_truncates_only_the_fitted_examples(caplog):
    with caplog.at_level(logging.WARNING, "hf_attn_variants"):
        used, _ = make_bert_batches(make_batches, make_long_calibration(max_length=64))
    assert get_longest(used) <= 64
    truncated = sum(len(row) > 64 for row in LONG)
    assert f"{truncated} of {len(LONG)} calibration examples are truncated to 64 tokens (--max_length)" in caplog.text
    untruncated = make_bert_batches(make_untruncated_batches, make_long_calibration(max_length=64))
    assert get_longest(untruncated) > 150


def test_examples_are_truncated_to_the_positions_and_reported(tmp_path, caplog):
    model = make_bert()
    model.config.max_position_embeddings = 100
    model.embeddings.position_embeddings = torch.nn.Embedding(100, 32)
    model.embeddings.position_ids = torch.arange(100)[None]
    model.embeddings.token_type_ids = torch.zeros(1, 100, dtype=torch.long)
    model.save_pretrained(tmp_path / "source")
    with caplog.at_level(logging.WARNING, "hf_attn_variants"):
        report = convert_checkpoint(tmp_path / "source", tmp_path / "out", 2, calibration=make_long_calibration())
    assert report.calibration["max_length"] == 100
    assert report.calibration["cut_share"] == pytest.approx(sum(len(row) > 100 for row in LONG) / len(LONG), abs=0.01)
    assert "are truncated to 100 tokens (the model's maximum)" in caplog.text


def test_held_out_examples_are_not_joined():
    calibration = make_calibration(passages=True)
    assert get_longest(make_bert_batches(make_batches, calibration)[1]) > 100
    assert get_longest(make_bert_batches(make_untruncated_batches, calibration)) <= 24


def test_long_documents_are_fitted_to_the_same_number_of_tokens(monkeypatch):
    monkeypatch.setattr(batches, "FIT_TOKENS", 4000)
    used, held_out = make_bert_batches(make_batches, make_long_calibration())
    assert 3000 < sum(int(batch["attention_mask"].sum()) for part in (used, held_out) for batch in part) <= 4000
    chunks = batches.group_by_length(make_long_calibration(), [100] * 20 + [300] * 3, (list(range(23)), []), 500)
    assert [len(rows) for _, rows in chunks] == [5, 5, 5, 5, 1, 1, 1]


def test_targets_determine_the_text_length():
    model = make_t5()
    calibration = make_long_calibration(target_texts=[row * 12 for row in make_texts(120)], passages=None)
    result = set_length_statistics(calibration, WordTokenizer(), model.config)
    assert result.whole_length > 200
    short = set_length_statistics(make_calibration(), WordTokenizer(), model.config)
    assert (short.length, short.generated_length, short.passage_length) == (23, 64, 256)


def test_convert_command_pools_decoders_only_on_request(tmp_path, capsys):
    make_t5().save_pretrained(tmp_path / "t5")
    line = ["convert", str(tmp_path / "t5"), "--num_key_value_heads", "2", "--output_dir", str(tmp_path / "out")]
    assert main(line) == 2
    printed = capsys.readouterr().err
    assert "--calibration_file" in printed and "--method mean" in printed and not (tmp_path / "out").exists()
    assert main([*line, "--method", "mean"]) == 0
    make_bert().save_pretrained(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), *line[2:-1], str(tmp_path / "encoder")]) == 0
    assert json.loads((tmp_path / "encoder" / "config.json").read_text())["num_key_value_heads"] == 2


def test_loss_on_full_text_detects_errors_after_the_truncation():
    """Check heads that are wrong after the 64th token, which lines of 64 tokens cannot detect."""
    source = BERT.make_upstream_model("BertForMaskedLM", vocab_size=WORDS, max_position_embeddings=200)
    model = convert(source, num_key_value_heads=4).eval()
    cut = set_length_statistics(make_long_calibration(max_length=64), Masking(), model.config)
    measured = make_untruncated_batches(model, Masking(), cut, torch.Generator().manual_seed(0))
    outputs = SourceOutputs(model, Masking(), cut, measured)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight[64:, 0].add_(50)
    assert abs(outputs.compare_with(model).value) > 0.01
