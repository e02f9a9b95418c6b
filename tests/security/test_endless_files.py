"""Check pipes, devices and endless gzip files instead of files: errors, or a bounded read, without a hang."""

import gzip
import json
import os
import time

import pytest
from fixtures.glue.tiny_bert import make_tiny_bert

from hf_attn_variants import cli
from hf_attn_variants.files import GROWTH_CHECK_START, open_file, read_file
from hf_attn_variants.glue_tasks import TASKS
from hf_attn_variants.text_files import read_columns, read_lines, read_pairs
from hf_attn_variants.training.glue.task import read_glue_tsv
from hf_attn_variants.training.ner.task import read_conll
from hf_attn_variants.training.pretraining.text_stream import check_text_files, hash_files
from hf_attn_variants.training.squad.data import read_squad

SECONDS = 5
READERS = {
    "lines": (lambda path: read_lines([path]), ".txt"),
    "pairs": (lambda path: read_pairs(path, path), ".txt"),
    "a table": (lambda path: read_columns([path], ["text"]), ".csv"),
    "JSON lines": (lambda path: read_columns([path], ["text"]), ".jsonl"),
    "CoNLL": (read_conll, ".txt"),
    "SQuAD": (read_squad, ".json"),
    "articles": (lambda path: check_text_files([path]), ".txt"),
}


@pytest.fixture
def quick():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device"])
def test_nonregular_files_raise_an_error(reader, kind, tmp_path, quick):
    read, suffix = READERS[reader]
    path = tmp_path / f"x{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = type(path)("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((OSError, ValueError), match=r"regular file|does not exist|no such file|must be one of"):
        read(path)


@pytest.mark.parametrize("unit", [b"\0", b"a", b"a\n", b"\n", b"a B-PER\n", b'{"text": "a"}\n'], ids=repr)
@pytest.mark.parametrize("reader", READERS)
def test_endless_gzip_is_read_up_to_a_bound(reader, unit, tmp_path, quick):
    read, suffix = READERS[reader]
    path = tmp_path / f"x{suffix}.gz"
    block = gzip.compress(unit * (2**22 // len(unit)))
    path.write_bytes(block * 250)  # 1 GB of text in about 1 MB
    with pytest.raises((OSError, ValueError), match=r"times larger|null character|must be|no |column"):
        read(path)


def test_glue_table_must_be_a_regular_file(tmp_path, quick):
    os.mkfifo(tmp_path / "dev.tsv")
    with pytest.raises(OSError, match="must be a regular file"):
        read_glue_tsv(tmp_path / "dev.tsv", TASKS["stsb"])


def test_huge_single_line_raises_an_error(tmp_path, quick):
    with open(tmp_path / "x.txt", "wb") as file:
        file.truncate(2**40)
    for read in (lambda path: read_lines([path]), read_squad, lambda path: check_text_files([path])):
        with pytest.raises((OSError, ValueError), match=r"null character|contains? more than"):
            read(tmp_path / "x.txt")


def test_highly_compressible_text_is_read(tmp_path):
    lines = [f"line {i} of a text that says nearly the same again and again" for i in range(200_000)]
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode(), 9))
    assert read_lines([tmp_path / "x.txt.gz"]) == lines
    small = b"a\n" * (GROWTH_CHECK_START // 4)
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(small))
    assert read_file(tmp_path / "y.txt.gz") == small
    with open_file(tmp_path / "x.txt.gz") as file:
        file.seek(7)
        assert file.read(5) == "\n".join(lines).encode()[7:12]
    hash_files(check_text_files([tmp_path / "x.txt.gz"]))


@pytest.mark.parametrize("flag", ["--notes", "--card", "--evaluations"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_card_inputs_must_be_regular_files(flag, kind, tmp_path, capsys, quick):
    bert = make_tiny_bert(tmp_path / "bert")
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "pipe" if kind == "pipe" else "/dev/zero"
    assert cli.main(["push", str(bert), "--repo_id", "me/x", "--dry_run", flag, str(path)]) == 2
    assert f"error: {path} must be a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--calibration_file", "--calibration_target_file"])
def test_calibration_inputs_must_be_regular_files(flag, tmp_path, capsys, quick):
    bert, lines = make_tiny_bert(tmp_path / "bert"), tmp_path / "lines.txt"
    lines.write_text("a\n" * 20)
    os.mkfifo(tmp_path / "pipe")
    argv = ["convert", bert, "--num_key_value_heads", 2, "--output_dir", tmp_path / "out", "--calibration_file", lines]
    assert cli.main([str(item) for item in (*argv, flag, tmp_path / "pipe")]) == 2
    assert "must be a regular file" in capsys.readouterr().err


def test_oversized_json_file_raises_an_error(tmp_path, quick):
    from hf_attn_variants.files import load_json

    with open(tmp_path / "modules.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="must not contain more than 268,435,456 bytes"):
        load_json(tmp_path / "modules.json")
    (tmp_path / "a.json").write_text(json.dumps([1]))
    assert load_json(tmp_path / "a.json") == [1]
