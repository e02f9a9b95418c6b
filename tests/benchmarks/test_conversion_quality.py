"""Check the benchmark of conversion quality: sampling, scoring, resuming, tables and plot, on tiny models."""

import gzip
import json
import types

import pytest
import torch
import transformers
from fixtures.commands import run_command

from benchmarks.convert import conversion_quality, conversion_subjects


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny BERT as the only model of the benchmark, scored by its parameter count."""
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=20
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "source")
    evaluated = []

    class Tiny:
        name, heads, kv_heads, source = "tiny", 4, (2, 1), tmp_path / "source"
        reads = ()
        metrics = {"size": conversion_subjects.Metric("parameters", ".1f")}

        def __init__(self, data_dir):
            pass

        def evaluate(self, folder):
            evaluated.append(folder)
            return {"size": float(transformers.AutoModel.from_pretrained(folder).num_parameters())}

    monkeypatch.setattr(conversion_quality, "SUBJECTS", {"tiny": Tiny})
    return types.SimpleNamespace(evaluated=evaluated, subject=Tiny)


def write_gzip(path, lines):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return path


def test_lines_are_sampled_by_seed_from_every_file(tmp_path):
    shards = [
        write_gzip(tmp_path / f"{name}.gz", ["short", "", *(f"{name} line {i:03d} of some length" for i in range(50))])
        for name in ("a", "b")
    ]
    lines = conversion_subjects.sample_lines(shards, 11, seed=0, min_characters=20)
    assert lines == conversion_subjects.sample_lines(shards, 11, seed=0, min_characters=20)
    assert lines != conversion_subjects.sample_lines(shards, 11, seed=1, min_characters=20)
    assert len(set(lines)) == 11 and sorted(line[0] for line in lines) == ["a"] * 6 + ["b"] * 5
    with pytest.raises(ValueError, match=r"a\.gz has 50 lines of 20 characters; 51 are needed"):
        conversion_subjects.sample_lines(shards, 102, seed=0, min_characters=20)
    with pytest.raises(ValueError, match="no file"):
        conversion_subjects.sample_lines([], 1, seed=0)


def test_translation_scores_do_not_depend_on_the_batches():
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", "<unk>", *"abcdefgh"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(words), d_model=16, d_kv=4, d_ff=16, num_heads=4, num_layers=1, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    sources, targets = ["a b c d", "h", "e f", "g g a"], ["b", "a c d e f", "h h", "c"]
    together = conversion_subjects.compute_translation_loss(model, tokenizer, sources, targets)
    one_by_one = conversion_subjects.compute_translation_loss(model, tokenizer, sources, targets, batch_size=1)
    assert together == pytest.approx(one_by_one, rel=1e-5)
    # The expected value is the sum of the log-probabilities of all tokens, including the end tokens.
    total, tokens = 0.0, 0
    for source, target in zip(sources, targets, strict=True):
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        inputs = tokenizer(source, return_tensors="pt")["input_ids"]
        decoder_inputs = torch.cat([torch.zeros(1, 1, dtype=torch.long), labels[:, :-1]], dim=1)
        with torch.no_grad():
            logits = model(input_ids=inputs, decoder_input_ids=decoder_inputs).logits
        total -= logits.log_softmax(-1).gather(-1, labels[..., None]).sum().item()
        tokens += labels.numel()
    assert together == pytest.approx(total / tokens, rel=1e-5)
    translations = conversion_subjects.translate(model, tokenizer, sources, max_new_tokens=6)
    assert translations == conversion_subjects.translate(model, tokenizer, sources, batch_size=1, max_new_tokens=6)
    assert len(translations) == 4 and any(translations)


def test_existing_rows_are_not_measured_again(tiny, tmp_path, capsys):
    flags = ["--models", "tiny", "--seeds", "0", "1", "--output", str(tmp_path / "results" / "quality.json")]
    first = run_command(conversion_quality, *flags, "--methods", "mean")
    assert [(row["method"], row["num_key_value_heads"]) for row in first] == [
        (conversion_quality.MULTI_HEAD, 4),
        ("mean", 2),
        ("mean", 1),
    ]
    # The key and value projections, with weights [16, 16] and biases [16], shrink to a half and a quarter.
    sizes = [row["size"] for row in first]
    assert sizes[0] - sizes[1] == 2 * 8 * 17 and sizes[0] - sizes[2] == 2 * 12 * 17
    assert len(tiny.evaluated) == 3 and not tiny.evaluated[-1].exists()

    rows = run_command(conversion_quality, *flags, "--methods", "mean", "random")
    assert len(tiny.evaluated) == 3 + 4 and rows[:3] == first
    saved = json.loads((tmp_path / "results" / "quality.json").read_text())
    assert saved["rows"] == rows and len(saved["runs"]) == 2
    assert [row["run"] for row in rows] == [0, 0, 0, 1, 1, 1, 1]
    assert {"command", "machine", "versions"} <= set(saved["runs"][0])

    run_command(conversion_quality, *flags, "--methods", "mean", "random", "--table")
    assert len(tiny.evaluated) == 7
    run_command(conversion_quality, *flags, "--methods", "mean", "--overwrite")
    assert len(tiny.evaluated) == 10
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"quality.json", "quality.png"}
    assert (tmp_path / "results" / "quality.png").stat().st_size > 5_000
    assert "| mean | 0 | " in capsys.readouterr().out


def test_quality_table_shows_means_and_ranges(tiny):
    times = {"conversion_seconds": 2.0, "training_seconds": 1.0}
    rows = [
        dict(zip((*conversion_quality.KEY, "size"), ("tiny", *values), strict=True)) | times
        for values in (
            (conversion_quality.MULTI_HEAD, 4, 0, 0, 9.0),
            ("mean", 2, 0, 0, 5.0),
            ("random", 1, 0, 0, 1.0),
            ("random", 1, 0, 1, 2.0),
            ("random", 1, 100, 0, 4.0),
        )
    ]
    assert conversion_quality.format_tables(rows).splitlines() == [
        "tiny, parameters (multi-head 9.0):",
        "",
        "| method | uptraining steps | 2 KV heads | 1 KV heads | time |",
        "| --- | --- | --- | --- | --- |",
        "| mean | 0 | 5.0 |  | 3 s |",
        "| random | 0 |  | 1.5 (1.0 to 2.0) | 3 s |",
        "| random | 100 |  | 4.0 | 3 s |",
    ]
