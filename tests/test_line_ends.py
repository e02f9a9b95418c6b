"""Check that every reader splits files into the same lines, whichever program wrote the file."""

import gzip
from pathlib import Path

import pytest

from hf_attn_variants.glue_tasks import get_task
from hf_attn_variants.text_files import read_lines, read_pairs, read_table_rows
from hf_attn_variants.training.glue.task import read_glue_tsv
from hf_attn_variants.training.ner.task import read_conll
from hf_attn_variants.training.pretraining import text_stream
from hf_attn_variants.training.pretraining.text_stream import TextFile

ENDS = ("\n", "\r\n", "\r", "\r\r\n")
CONLL = ["\ufeffEU B-ORG", "rejects O", "", "Peter B-PER", "Blackburn I-PER"]
SENTENCES = [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter", "Blackburn"], ["B-PER", "I-PER"])]


def write(path: Path, lines: list[str], end: str) -> str:
    content = (end.join(lines) + end).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_line_readers_agree_on_line_ends(tmp_path, end, suffix):
    assert read_conll(write(tmp_path / f"a.txt{suffix}", CONLL, end)) == SENTENCES
    # A form feed and Unicode line separators do not end a line.
    texts = ["one\u2028half", "two\x85b", "a\x0cb"]
    source = write(tmp_path / f"b.txt{suffix}", texts, end)
    assert read_lines([source]) == texts
    assert read_pairs(source, write(tmp_path / "c.txt", ["x", "y", "z"], "\n")).texts[2] == ("a\x0cb", "z")
    rows = ['{"text": "x"}', '{"text": "y"}']
    result = [
        record.values["text"] for record in read_table_rows(Path(write(tmp_path / f"d.jsonl{suffix}", rows, end)))
    ]
    assert result == ["x", "y"]


@pytest.mark.parametrize("end", ENDS[:3])
def test_tables_are_read_with_every_line_end(tmp_path, end):
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        path = Path(write(tmp_path / name, [separator.join(row) for row in ("ab", "cd", "ef")], end))
        assert [tuple(record.values.values()) for record in read_table_rows(path)] == [("c", "d"), ("e", "f")]
    task = get_task("sst2")
    path = Path(write(tmp_path / "dev.tsv", ["sentence\tlabel", "good\t1", "bad\t0"], end))
    assert read_glue_tsv(path, task)["text1"] == ["good", "bad"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("max_article_bytes", [2**18, 16])
def test_article_offsets_are_right_with_every_line_end(tmp_path, monkeypatch, end, max_article_bytes):
    monkeypatch.setattr(text_stream, "MAX_ARTICLE_BYTES", max_article_bytes)
    file = TextFile(Path(write(tmp_path / "a.txt", ["one two", "three", "", "four five six seven", "", "é"], end)))
    result = list(file.read_articles())
    words = [text.split() for _, text in result]
    assert [word for text in words for word in text] == "one two three four five six seven é".split()
    if max_article_bytes > 16:
        assert words == [["one", "two", "three"], ["four", "five", "six", "seven"], ["é"]]
    for i, (begin, _) in enumerate(result):
        assert list(file.read_articles(begin)) == result[i:]


def test_mixed_line_ends_are_read(tmp_path, caplog):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a B-X\rb O\n\nc O\n")
    with pytest.raises(ValueError, match=r"line 1.*carriage return"):
        read_conll(str(path))
    path.write_bytes(b"one\rhalf\ntwo\n")
    assert read_lines([path]) == ["one\rhalf", "two"]
    assert "line 1: the line contains a carriage return" in caplog.text
    # Each line is split at its own line end, not at that of the last line.
    path.write_bytes(b"a B-X\rb O\r\rc O\r\n")
    assert read_conll(str(path)) == [(["a", "b"], ["B-X", "O"]), (["c"], ["O"])]
