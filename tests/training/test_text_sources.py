"""Check a `datasets` folder as text: one shard per file, detected changes, and errors that name file and row."""

import gzip
import json

import pytest

from hf_attn_variants.training.pretraining import MaskedLMSettings, text_stream
from hf_attn_variants.training.pretraining.task import Pretraining

ROWS = [f"row {i}" for i in range(40)]


def as_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def open_folder(tmp_path):
    def call(files, **flags):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        flags |= {"model_type": "bert", "tokenizer_name": "bert", "output_dir": "out", "max_train_steps": 1}
        return Pretraining.open_text(MaskedLMSettings(dataset_name=str(tmp_path), **flags))

    return call


def test_each_dataset_file_is_a_separate_shard(open_folder, tmp_path):
    files = {"train-0.jsonl": ROWS[:30], "train-1.jsonl.gz": ROWS[30:], "validation.jsonl": ["x"]}
    text = open_folder(
        {name: (gzip.compress if ".gz" in name else bytes)(as_lines(rows)) for name, rows in files.items()}
    )
    assert [source.name for source in text.train] == [f"{tmp_path} (train), {name}" for name in list(files)[:2]]
    assert [source.name for source in text.dev] == [f"{tmp_path} (validation), validation.jsonl"]
    assert [text for source in text.train for _, text in source.read_articles()] == ROWS
    (tmp_path / "train-0.jsonl").unlink()
    assert list(text.train[1].read_articles(8)) == [(8, "row 38"), (9, "row 39")]


def test_changed_files_change_the_text_hash(open_folder):
    first = open_folder({"train.jsonl": as_lines(ROWS)})
    assert open_folder({}).train_fingerprint == first.train_fingerprint
    second = open_folder({"validation.jsonl": as_lines(ROWS)})
    assert second.train_fingerprint == first.train_fingerprint and second.dev_fingerprint != first.dev_fingerprint
    third = open_folder({"train.jsonl": as_lines(ROWS[::-1])})
    assert third.train_fingerprint != first.train_fingerprint and third.dev_fingerprint == second.dev_fingerprint
    assert open_folder({"validation.jsonl": as_lines(ROWS[1:])}).dev_fingerprint != second.dev_fingerprint


EVALUATION_FLAGS = {"metric_for_best_model": "loss", "early_stopping_patience": 1, "eval_steps": 1}


@pytest.mark.parametrize("flag", EVALUATION_FLAGS)
def test_evaluation_text_needs_a_split(open_folder, flag):
    with pytest.raises(ValueError, match=f"--{flag} requires dev rows"):
        open_folder({"train.jsonl": as_lines(ROWS)}, **{flag: EVALUATION_FLAGS[flag]})
    assert open_folder({"validation.jsonl": as_lines(ROWS)}, **{flag: EVALUATION_FLAGS[flag]}).dev


def test_hub_revision_changes_the_text_hash():
    first, second = (text_stream._hash_dataset([f"hf://datasets/a/b@{sha}/train.parquet"]) for sha in ("12", "34"))
    assert first != second


def test_unreadable_dataset_shard_is_named(open_folder):
    packed = gzip.compress(as_lines(ROWS), mtime=0)
    train = open_folder(
        {
            "train-0.jsonl": as_lines(ROWS),
            "train-1.jsonl.gz": packed[: len(packed) // 2],
            "train-2.jsonl": as_lines(ROWS) + b'{"text": "ab\n',
        }
    ).train
    assert len(list(train[0].read_articles())) == len(ROWS)
    with pytest.raises(OSError, match=r"\(train\).*train-1\.jsonl\.gz.*row 0"):
        list(train[1].read_articles())
    with pytest.raises(OSError, match=r"\(train\).*train-2\.jsonl.*row 0") as error:
        list(train[2].read_articles())
    assert "in row" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("train.jsonl", b"", ValueError, r"\(a file without rows\)"),
        ("train.jsonl.gz", gzip.compress(as_lines(ROWS), mtime=0)[:60], OSError, r"\(EOFError"),
        ("train.jsonl", b'{"text": "ab\n', OSError, r"\(train\), train\.jsonl.*row 0"),
        ("train.txt", b"", ValueError, r"\(train\).*row"),
        ("validation.jsonl", as_lines(ROWS), ValueError, "only has validation"),
    ],
)
def test_folder_without_text_error_names_the_folder(open_folder, tmp_path, name, content, error, message):
    with pytest.raises(error, match=message):
        open_folder({name: content})


def test_unknown_dataset_name_raises_an_error(tmp_path, open_folder):
    tmp_path.rmdir()
    with pytest.raises(OSError, match=rf"--dataset_name {tmp_path} .*\(FileNotFoundError"):
        open_folder({})
