"""Check `classify` on real data: GLUE's scores with MiniLM, Wikipedia sections, every architecture, two processes."""

import csv
import json
import random

import pytest
from fixtures.uptraining import make_t5
from fixtures.wikipedia_sections import read_articles_by_headings, read_paragraphs_by_heading
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoTokenizer,
    BartConfig,
    BartModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    MBartConfig,
    MBartModel,
    RobertaConfig,
    RobertaModel,
    UMT5Config,
    UMT5Model,
)

from hf_attn_variants import convert
from hf_attn_variants.commands.training import classify

main, parse_args = classify.main, classify.parse_args

pytestmark = pytest.mark.slow
QUIET = ["--cpu", "--disable_tqdm"]
NLI = ["--labels", "entailment", "neutral", "contradiction"]


def write_csv(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def call(command, *argv):
    return command.main(command.parse_args([str(item) for item in [*argv, *QUIET]]))


def classify(*argv):
    return main(parse_args([str(item) for item in [*argv, *QUIET]]))


TABLES = [("sst2", "SST-2", []), ("stsb", "STS-B", []), ("mnli", "MNLI", NLI)]


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
        files[-1].write_text("".join(json.dumps({"text": t, "labels": labels}) + "\n" for t, labels in rows))
    results = classify(
        minilm, "--train_file", files[0], "--validation_file", files[1], "--output_dir", tmp_path / "out",
        "--max_length", 64, "--max_train_steps", 100, "--per_device_train_batch_size", 16, "--learning_rate", "2e-4",
        "--class_weights", "balanced", "--group_by_length",
    )  # fmt: skip
    print(len(train), len(dev), {k: v for k, v in results.items() if k.startswith("eval_")})
    assert results["problem_type"] == "multi_label_classification" and len(results["labels"]) == 9
    assert results["eval_roc_auc"] > 0.75 and results["eval_f1_micro"] > 0.35


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
BART |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0, "decoder_start_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1}
T5 |= {"decoder_start_token_id": 0}
MODELS = {
    "bert": None,
    "t5": None,
    "albert": lambda size: AlbertForMaskedLM(AlbertConfig(**SIZES, vocab_size=size, embedding_size=16)),
    "roberta": lambda size: RobertaModel(
        RobertaConfig(**SIZES, vocab_size=size, pad_token_id=0, type_vocab_size=1, max_position_embeddings=65)
    ),
    "electra": lambda size: ElectraModel(ElectraConfig(**SIZES, vocab_size=size, embedding_size=16)),
    "distilbert": lambda size: DistilBertModel(
        DistilBertConfig(vocab_size=size, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    ),
    "bart": lambda size: BartModel(BartConfig(vocab_size=size, **BART)),
    "mbart": lambda size: MBartModel(MBartConfig(vocab_size=size, **BART)),
    "umt5": lambda size: UMT5Model(UMT5Config(vocab_size=size, **T5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_classifies(tiny_bert, tmp_path, name):
    t5 = make_t5(tmp_path / "t5-like")
    folder = {"bert": tiny_bert, "t5": t5}.get(name, tmp_path / name)
    if MODELS[name] is not None:
        tokenizer = AutoTokenizer.from_pretrained(t5 if name in ("bart", "mbart", "umt5") else tiny_bert)
        MODELS[name](len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    convert(folder, 2, method="mean", output_dir=tmp_path / "converted")
    rows = [("the dog", "a cat", "x;y"), ("a man", "the house", ""), ("a cat", "a man", "y")] * 4
    table = write_csv(tmp_path / "t.csv", ("text1", "text2", "labels"), rows)
    for model, out in ((folder, "plain"), (tmp_path / "converted", "grouped")):
        flags = ["--label_separator", ";", "--max_train_steps", 2, "--max_length", 16, "--output_dir", tmp_path / out]
        results = classify(model, "--train_file", table, "--validation_file", table, *flags)
        assert results["steps"] == 2 and results["labels"] == ["x", "y"]
        again = classify(
            tmp_path / out, "--validation_file", table, "--label_separator", ";", "--num_train_epochs", 0,
            "--max_length", 16, "--output_dir", tmp_path / f"{out}-again",
        )  # fmt: skip
        assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
