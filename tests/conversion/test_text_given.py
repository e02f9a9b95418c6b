"""Check the text that users pass to a conversion: its types, missing text, options and warnings."""

import json
import logging
import re
import shutil

import pytest
import torch
from fixtures.named_checkpoints import CheckpointShelf, write_text
from transformers import AutoTokenizer, BartConfig, BartForCausalLM, BertConfig, BertLMHeadModel

from hf_attn_variants import convert
from hf_attn_variants.commands import convert as command
from hf_attn_variants.conversion import Calibration, ConversionReport, read_calibration
from hf_attn_variants.conversion.calibration import examples as files
from hf_attn_variants.conversion.calibration_settings import FIT_DEFAULTS
from hf_attn_variants.conversion.checkpoint import models
from hf_attn_variants.conversion.checkpoint.source import list_learned_tokens
from hf_attn_variants.modeling.architectures.modeling_attn_variant_bert import AttnVariantBertModel


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return CheckpointShelf(tmp_path_factory.mktemp("shelf")).checkpoint("minilm", None, False)


@pytest.fixture(autouse=True)
def short_fits(monkeypatch):
    monkeypatch.setitem(FIT_DEFAULTS, "fit_steps", 5)


@pytest.fixture
def warnings_of(caplog):
    """A function that calls another function and returns the warnings of the conversion."""

    def call(function, *args, **options):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_attn_variants"):
            function(*args, **options)
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    return call


def test_conversion_without_text_warns_once_about_quality(encoder, tmp_path, warnings_of):
    model = AttnVariantBertModel.from_pretrained(encoder)
    for i, (source, options) in enumerate(((model, {}), (encoder, {}), (encoder, {"output_dir": tmp_path / "out"}))):
        (printed,) = warnings_of(convert, source, 4, **options)
        assert "BLEU 36.8 to 1.6" in printed and "`calibration`" in printed and "--calibration_file" in printed, i
        assert "\n" not in printed
    mean = {"num_key_value_heads": 4, "method": "mean"}
    for options in (mean, {"talking_heads": "both"}):
        assert warnings_of(convert, model, **options) == []
    assert warnings_of(convert, tmp_path / "out", 12) == []  # expanding loses nothing


def test_warning_gives_the_reason_if_calibration_is_impossible(encoder, warnings_of):
    model = AttnVariantBertModel.from_pretrained(encoder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 48}
    decoder = BertLMHeadModel(BertConfig(vocab_size=60, is_decoder=True, add_cross_attention=True, **sizes))
    for source, reason in (
        (convert(model, talking_heads="both"), "talking heads ('both')"),
        (decoder, "cannot fit a decoder-only model's cross-attention"),
    ):
        (printed,) = warnings_of(convert, source, 4)
        assert "BLEU 36.8 to 1.6" in printed and reason in printed and "--calibration_file" not in printed
        calibration = Calibration(["a text", "another"], tokenizer=AutoTokenizer.from_pretrained(encoder))
        with pytest.raises(ValueError, match=re.escape(reason)):
            convert(source, 4, calibration=calibration)


def test_decoder_only_models_are_calibrated_on_text(encoder):
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    decoder = BartForCausalLM(BartConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes))
    texts = [f"{word} text {i}" for word in ("the", "a", "good", "bad") for i in range(40)]
    calibration = Calibration(texts, tokenizer=tokenizer, fit_steps=0)
    converted = convert(decoder, kv_lora_rank=8, calibration=calibration)
    attention = converted.model.decoder.layers[0]
    assert attention.self_attn.kv_a_proj.weight.shape == (8, 32)
    assert attention.encoder_attn.k_proj.weight.equal(decoder.model.decoder.layers[0].encoder_attn.k_proj.weight)


@pytest.mark.thorough
def test_calibration_accepts_all_text_types(encoder, tmp_path):
    lines, table = tmp_path / "lines.txt", tmp_path / "pairs.jsonl"
    write_text(lines)
    write_text(table)
    rows = map(json.loads, table.read_text().splitlines())
    pairs = list(dict.fromkeys((row["question"], row["context"]) for row in rows))
    texts = list(dict.fromkeys(lines.read_text().splitlines()))  # repeated texts are dropped
    for argument, expected in (
        (texts, texts),
        (tuple(texts), texts),
        (pairs, pairs),
        ([list(pair) for pair in pairs], pairs),
        (lines, texts),
        (str(lines), texts),
        (read_calibration(table, columns=["question", "context"]), pairs),
        (read_calibration(table, columns="question"), list(dict.fromkeys(question for question, _ in pairs))),
        (Calibration(texts), texts),
    ):
        assert files.as_calibration(argument).texts == expected
    assert files.as_calibration(lines, seed=1).texts == read_calibration(lines, seed=1).texts
    assert len(read_calibration(lines, size=7).texts) == 7
    report = convert(encoder, 4, calibration=Calibration(texts, fit_steps=2), output_dir=tmp_path / "out")
    assert isinstance(report, ConversionReport) and report.method == "calibrated"
    assert report.calibration["count"] == len(texts) and report.mean_output_relative_error is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(encoder).get_vocab()


@pytest.mark.parametrize("texts", [[1, 2], [None, "a"], [("a", "b"), "c"], [("a", 2)], b"text"])
def test_other_text_types_raise_a_type_error(encoder, texts):
    with pytest.raises(TypeError, match=r"`texts`.*strings"):
        convert(encoder, 4, calibration=texts)


def test_in_memory_model_without_a_tokenizer_raises_before_copying(encoder, tmp_path, monkeypatch):
    model = AttnVariantBertModel.from_pretrained(encoder)
    write_text(tmp_path / "lines.txt")
    monkeypatch.setattr(models.ModelReader, "read", lambda self, name: pytest.fail("a tensor was read"))
    for texts in (["a text", "another"], tmp_path / "lines.txt", read_calibration(tmp_path / "lines.txt")):
        with pytest.raises(ValueError, match="`tokenizer`"):
            convert(model, 4, calibration=texts)


def test_missing_text_file_raises_an_error(encoder):
    with pytest.raises(FileNotFoundError, match="one sentence"):
        convert(encoder, 4, calibration="one sentence")


def test_method_options_are_checked_per_method(encoder, tmp_path):
    lines = tmp_path / "lines.txt"
    write_text(lines)
    flags = ["--model_name_or_path", str(encoder), "--output_dir", str(tmp_path / "out"), "--num_key_value_heads", "4"]

    def run(*more):
        command.main(command.parse_args([*flags, *map(str, more)]))

    for name, value in (("fit_steps", 77), ("fit_steps", 0), ("fit_learning_rate", 0.1), ("fit_batch_size", 8)):
        with pytest.raises(ValueError, match=rf"`{name}`.*'aligned'"):
            convert(encoder, 4, "aligned", calibration=Calibration(["a text", "another"], **{name: value}))
    with pytest.raises(ValueError, match="`fit_steps`"):
        run("--method", "aligned", "--fit_steps", 77, "--calibration_file", lines)
    for name in ("max_length", "fit_steps", "calibration_size"):
        with pytest.raises(ValueError, match=f"--{name} requires --calibration_file"):
            run("--method", "mean", f"--{name}", 8)
    with pytest.raises(ValueError, match="`method` 'mean' cannot be combined with `calibration`"):
        run("--method", "mean", "--calibration_file", lines)
    assert not (tmp_path / "out").exists()


def test_convert_command_reads_lines_targets_and_tables(tmp_path):
    def read(*flags):
        args = command.parse_args(["--model_name_or_path", "m", "--output_dir", "o", *map(str, flags)])
        result = command.read_calibration_from_args(args)
        return result.texts, result.target_texts

    lines, targets, table = (tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl"))
    lines.write_text("one\ntwo\n\n")
    targets.write_text("eins\nzwei\ndrei\n")
    rows = [{"text": f"t{i}", "question": f"q{i}", "de": f"d{i}"} for i in (1, 2, 3)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = "--calibration_file"
    assert read(file, lines) == (["one", "two"], None)
    assert read(file, lines, "--calibration_target_file", targets) == (["one", "two"], ["eins", "zwei"])
    assert read(file, table) == (["t1", "t2", "t3"], None)
    columns = ["--calibration_columns", "question", "text"]
    assert read(file, table, *columns) == ([("q1", "t1"), ("q2", "t2"), ("q3", "t3")], None)
    target = ["--calibration_target_column", "de"]
    assert read(file, table, *target) == (["t1", "t2", "t3"], ["d1", "d2", "d3"])
    calibration = read(file, table, *columns, *target, "--calibration_size", 2)
    expected = [([f"q{i}", f"q{j}"], [f"t{i}", f"t{j}"], [f"d{i}", f"d{j}"]) for i, j in ((1, 2), (1, 3), (2, 3))]
    assert (*map(list, zip(*calibration[0], strict=True)), calibration[1]) in expected
    for flags, message in (
        (columns, "--calibration_columns requires --calibration_file"),
        (["--fit_steps", 0], "--fit_steps requires --calibration_file"),
        ([file, lines, *columns], r"_columns\) is only supported for tables \(.csv, .tsv, .json, .jsonl\), got "),
        ([file, lines, *target], r"--calibration_target_column\) is not supported for .*a.txt"),
        ([file, table, "--calibration_target_file", targets], "`target_file`"),
        ([file, table, *columns, "de"], "must contain one or two columns, got 3"),
        ([file, table, "--calibration_columns", "wrong"], r"column 'wrong'.*--calibration_columns"),
    ):
        with pytest.raises(ValueError, match=message):
            read(*flags)


@pytest.mark.parametrize("names_its_class", [False, True])
def test_model_saved_without_a_tokenizer_loads_without_one(encoder, tmp_path, names_its_class):
    if names_its_class:  # in config.json, as in old repositories
        encoder = shutil.copytree(encoder, tmp_path / "named")
        config = json.loads((encoder / "config.json").read_text())
        (encoder / "config.json").write_text(json.dumps(config | {"tokenizer_class": "BertTokenizer"}))
    model = AttnVariantBertModel.from_pretrained(encoder)
    convert(encoder, 4, "mean", output_dir=tmp_path / "folder")
    folder = AttnVariantBertModel.from_pretrained(tmp_path / "folder")
    assert list_learned_tokens(AutoTokenizer.from_pretrained(tmp_path / "folder"))
    sources = {"model": model, "path": encoder, "folder's model": folder, "folder's path": tmp_path / "folder"}
    for name, source in sources.items():
        convert(source, 4, "mean").save_pretrained(tmp_path / name)
        with pytest.raises((ValueError, OSError)):
            AutoTokenizer.from_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / name)
        assert list_learned_tokens(AutoTokenizer.from_pretrained(tmp_path / name))
    model.save_pretrained(tmp_path / "bare")
    convert(tmp_path / "bare", 4, "mean", output_dir=tmp_path / "bare-4")
    with pytest.raises((ValueError, OSError)):
        AutoTokenizer.from_pretrained(tmp_path / "bare-4")
