"""Check `classify` on real data: Wikipedia sections with one label and with several labels per text."""

import random

import pytest
from fixtures.commands import run_command
from fixtures.data_files import write_csv, write_lines
from fixtures.wikipedia_sections import read_articles_by_headings, read_paragraphs_by_heading

from hf_attn_variants import convert
from hf_attn_variants.commands.training import classify as classify_command

pytestmark = pytest.mark.slow
QUIET = ["--cpu", "--disable_tqdm"]


def classify(*argv):
    return run_command(classify_command, *argv, *QUIET)


def divide_rows(rows, count):
    rows = sorted(rows)
    random.Random(0).shuffle(rows)
    return rows[:count], rows[count : count + count // 4]


def test_wikipedia_sections_are_classified(minilm, shared_data, tmp_path):
    train, dev = divide_rows(read_paragraphs_by_heading(shared_data / "wikipedia"), 1000)
    convert(minilm, 4, output_dir=tmp_path / "gqa4")
    files = [write_csv(tmp_path / f"{i}.csv", ("text", "topic"), rows) for i, rows in enumerate((train, dev))]
    results = classify(
        tmp_path / "gqa4", "--train_file", files[0], "--validation_file", files[1], "--output_dir", tmp_path / "out",
        "--max_length", 64, "--max_train_steps", 60, "--per_device_train_batch_size", 16, "--learning_rate", "2e-4",
        "--class_weights", "balanced", "--group_by_length",
    )  # fmt: skip
    assert results["labels"] == ["Climate", "Economy", "Education", "Etymology", "Religion"]
    frequent = max(sum(label == name for _, label in dev) for name in results["labels"]) / len(dev)
    print(len(train), len(dev), frequent, {k: v for k, v in results.items() if k.startswith("eval_")})
    assert results["eval_accuracy"] > frequent + 0.3 and results["eval_f1_macro"] > 0.6
    assert (tmp_path / "out/confusion_matrix.png").is_file()


def test_wikipedia_articles_get_their_section_labels(minilm, shared_data, tmp_path):
    train, dev = divide_rows(read_articles_by_headings(shared_data / "wikipedia"), 1600)
    files = []
    for name, rows in (("train", train), ("dev", dev)):
        files.append(tmp_path / f"{name}.jsonl")
        write_lines(files[-1], ({"text": t, "labels": labels} for t, labels in rows))
    results = classify(
        minilm, "--train_file", files[0], "--validation_file", files[1], "--output_dir", tmp_path / "out",
        "--max_length", 64, "--max_train_steps", 100, "--per_device_train_batch_size", 16, "--learning_rate", "2e-4",
        "--class_weights", "balanced", "--group_by_length",
    )  # fmt: skip
    print(len(train), len(dev), {k: v for k, v in results.items() if k.startswith("eval_")})
    assert results["problem_type"] == "multi_label_classification" and len(results["labels"]) == 9
    assert results["eval_roc_auc"] > 0.75 and results["eval_f1_micro"] > 0.35
