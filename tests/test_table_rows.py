"""Check that rows, cells and fields are read completely, or that an error names the file and the row."""

import json
import logging
import re

import pytest

from hf_attn_variants.glue_tasks import TASKS
from hf_attn_variants.text_files import read_columns, read_lines, read_pairs
from hf_attn_variants.training.glue.task import read_glue_tsv
from hf_attn_variants.training.ner.task import _format_conll, read_conll
from hf_attn_variants.training.squad.data import read_squad


def read_column_texts(tmp_path, name, text, names=("source", "target"), **options):
    (tmp_path / name).write_bytes(text.encode())
    return read_columns([tmp_path / name], names, **options).texts


MANY = "".join(f"{i},row {i}\n" for i in range(100))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "source,target\nA dog,Ein Hund, extra\nA cat,Eine Katze\n",
            "line 2, row 1: .* 2 cells .* got 3",
        ),
        ("a.csv", "source,target\nA dog,Ein Hund\nA cat\n", "line 3, row 2: .* 2 cells .* got 1"),
        ("a.csv", "source,target\n,a,b,c\n", "line 2, row 1: .* got 4"),
        ("a.tsv", "source\ttarget\nA\tB\tC\n", "line 2, row 1: .* got 3. .* A tab always separates"),
        ("a.tsv", 'source\ttarget\n"A\tx"\tB\n', "line 2, row 1: .* got 3"),
        (
            "a.csv",
            f'source,target\n{MANY}x,"Hello\n{MANY}',
            "line 102, row 101: A quote begins in this row",
        ),
        (
            "a.csv",
            f'source,target\n{MANY}x,"Hello\n{MANY}y,"a, b"\n{MANY}',
            "line 102, row 101: Text follows a quoted",
        ),
        ("a.csv", 'source,target\n"He said \\"hi, there\\" now",Er\n', "line 2, row 1: Text follows a quoted cell"),
        ("a.csv", 'source,target\n\n"a ""b",c\n"d" e,f\n', "line 4, row 2: Text follows a quoted cell"),
        ("a.csv", 'source,"target\n', "line 1, the header: A quote begins"),
        ("a.csv", "source,target\na\rb,c\n", "line 2, row 1: A carriage return"),
        ("a.tsv", "source\ttarget\na\rb\tc\n", "line 2, row 1: A carriage return"),
        ("a.csv", "source,target,source\na,b,c\n", "line 1, the header: two columns have the name 'source'"),
        ("a.csv", 'source,target\na,b\n"source",target\nc,d\n', "line 3, row 2: the row repeats the header"),
        ("a.tsv", "source\ttarget\na\tb\n\ufeffsource\ttarget\n", "line 3, row 2: the row repeats the header"),
        ("a.jsonl", '{"source": "a\\ud800", "target": "b"}\n', "row 1: Column 'source' contains an incomplete"),
        (
            "a.jsonl",
            '{"source": "a", "target": "b"}\n\n{"source": "a"}\n',
            "line 3, row 2: there is no column 'target'. The columns are source",
        ),
        ("a.jsonl", '{"source": "a", "target": "b", "target": "c"}\n', "line 1: The key 'target' occurs twice"),
        ("a.json", '[{"target": "b", "source": {"a": 1, "a": 2}}]', "a.json must be a JSON list: The key 'a' occurs"),
        ("a.csv.gz", "source,target\n", "not a complete gzip"),
    ],
)
def test_malformed_row_error_names_the_row(tmp_path, name, text, message):
    with pytest.raises((ValueError, OSError), match=message) as raised:
        read_column_texts(tmp_path, name, text)
    assert name in str(raised.value)


def test_well_formed_rows_are_read_completely(tmp_path):
    assert read_column_texts(tmp_path, "a.csv", "\n  \nsource,target\n\nA dog,Ein Hund\n") == [("A dog", "Ein Hund")]
    assert read_column_texts(tmp_path, "b.csv", "source,target\ra,b\rc,d") == [("a", "b"), ("c", "d")]  # classic Mac
    assert read_column_texts(tmp_path, "c.csv", 'source,target\n5" nail,"a\n""b"", c"\n') == [('5" nail', 'a\n"b", c')]
    assert read_column_texts(tmp_path, "d.tsv", 'source\ttarget\n"a\tb"\n') == [('"a', 'b"')]
    assert read_column_texts(tmp_path, "e.csv", "source,target,,\na,b,,\n") == [("a", "b")]
    assert read_column_texts(tmp_path, "f.csv", "source,target\n\u00a0,b\n") == [("\u00a0", "b")]
    (tmp_path / "lines.txt").write_text("a\n\u3000\n \t\nb\n")
    assert read_lines([tmp_path / "lines.txt"]) == ["a", "\u3000", "b"]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_csv_without_commas_uses_the_separator_of_its_header(tmp_path, caplog, separator):
    rows = [["source", "target is, what"], ["a, b", 'x"; \ty|'], ["c", "z"]]
    quoted = "\n" + "".join(separator.join('"' + cell.replace('"', '""') + '"' for cell in row) + "\n" for row in rows)
    with caplog.at_level(logging.INFO, "hf_attn_variants"):
        assert read_column_texts(tmp_path, "a.csv", quoted, rows[0]) == [tuple(row) for row in rows[1:]]
    assert f"a.csv, line 2: the header contains no comma. {separator!r} is used as the separator" in caplog.text
    plain = "".join(separator.join(row) + "\n" for row in [["Customer Comment", "Happy?"], ["a, b", "yes"]])
    assert read_column_texts(tmp_path, "b.csv", plain, ("Happy?", "Customer Comment")) == [("yes", "a, b")]
    with pytest.raises(ValueError, match=r"line 3, row 2: .* 2 cells .* got 1. .* separator"):
        read_column_texts(tmp_path, "b.csv", plain + "c\n", ("Happy?",))


def test_csv_header_with_a_comma_is_split_at_commas(tmp_path):
    assert read_column_texts(tmp_path, "a.csv", "source;x,target|y\na,b\n", ("source;x", "target|y")) == [("a", "b")]
    assert read_column_texts(tmp_path, "b.csv", 'text\n"a;b"\n', ("text",)) == [("a;b",)]


def test_quotes_after_a_space_give_a_warning(tmp_path, caplog):
    spaced = 'id, text\n1, "good"\n2, "bad"\n'
    assert read_column_texts(tmp_path, "a.csv", spaced, (" text",)) == [(' "good"',), (' "bad"',)]
    assert caplog.text.count("there is a space before the quote in ' \"good\"'") == 1
    with pytest.raises(ValueError, match=r"2 cells like the header .* got 3"):
        read_column_texts(tmp_path, "b.csv", 'id, text\n1, "good, warm"\n', (" text",))
    caplog.clear()
    read_column_texts(tmp_path, "c.csv", 'text,other\n" good","a ""b"" c"\n', ("text",))
    assert caplog.text == ""


def test_misspelled_column_error_suggests_the_column(tmp_path):
    with pytest.raises(ValueError, match=r"a.csv, line 1, the header: .*'Hapy'. .* Did you mean 'Happy\?'\?$"):
        read_column_texts(tmp_path, "a.csv", "text,Happy?\na,b\n", ("Hapy",), flag="--label_column")
    with pytest.raises(ValueError, match=r"'zzz'. The columns are text, Happy\?\. .*--label_column"):
        read_column_texts(tmp_path, "a.csv", "text,Happy?\na,b\n", ("zzz",), flag="--label_column")


def test_skipped_rows_are_counted(tmp_path, caplog):
    assert read_column_texts(tmp_path, "a.csv", "source,target\na,b\nc,\n,\n") == [("a", "b")]
    assert "a.csv: Skipping 2 of 3 rows" in caplog.text
    assert f"The first one is {tmp_path}/a.csv, line 3, row 2" in caplog.text
    (tmp_path / "s.txt").write_text("a\nb\n")
    (tmp_path / "t.txt").write_text("\nb\n")
    assert read_pairs(tmp_path / "s.txt", tmp_path / "t.txt").texts == [("b", "b")]
    assert "Skipping 1 of 2 lines" in caplog.text and "The first one is line 1" in caplog.text
    (tmp_path / "both.txt").write_text("a\n\nb\n")
    assert read_pairs(tmp_path / "both.txt", tmp_path / "both.txt").texts == [("a", "a"), ("b", "b")]
    assert "Skipping 1 of 3 lines" in caplog.text and "The first one is line 2" in caplog.text


def read_conll_rows(tmp_path, text, **options):
    (tmp_path / "words.txt").write_text(text)
    return read_conll(tmp_path / "words.txt", **options)


def test_words_keep_unicode_spaces(tmp_path):
    tagged = "Paris\tB-LOC\n2\u00a0000\tO\nNew York\tNNP\tB-LOC \n \t\n\u2009 X O\na\u3000b  X  B-LOC\n"
    assert read_conll_rows(tmp_path, tagged) == [
        (["Paris", "2\u00a0000", "New York"], ["B-LOC", "O", "B-LOC"]),
        (["\u2009", "a\u3000b"], ["O", "B-LOC"]),
    ]


def test_words_of_test_files_keep_unicode_spaces(tmp_path, caplog):
    result = read_conll_rows(tmp_path, "Paris\n2\u00a0000\n\u00a0\nNew York\nSan Jose\t\n\nEU\n", needs_tags=False)
    assert result == [(["Paris", "2\u00a0000", "\u00a0", "New", "San Jose"], []), (["EU"], [])]
    assert re.search(r"line 4: 'New York' .*columns.*line 1 \(1\), got 2", caplog.text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("New York B-LOC", r"line 2: 'New York B-LOC' .*columns.*line 1 \(2\), got 3"),
        ("\tB-LOC", "line 2: .*got a tab"),
        ("a\tb\t", "line 2: .* its tag"),
    ],
)
def test_line_with_other_columns_error_names_the_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"words.txt, {message}"):
        read_conll_rows(tmp_path, f"Ann B-PER\n{line}\n")


def test_written_words_are_read_unchanged(tmp_path):
    words = ["New York", "2\u00a0000", "\u00a0", "EU", "a\tb\nc"]
    text = _format_conll([(words, [])], [["B-LOC", "O", "O", "B-ORG", "O"]])
    assert read_conll_rows(tmp_path, text) == [([*words[:4], "a b c"], ["B-LOC", "O", "O", "B-ORG", "O"])]


def read_squad_questions(tmp_path, answer, **qa):
    content = {"context": "A cat sat.", "qas": [{"id": "q", "question": "Who?", "answers": [answer]} | qa]}
    (tmp_path / "s.json").write_text(json.dumps({"data": [{"paragraphs": [content]}]}))
    return read_squad(tmp_path / "s.json")


def test_answer_start_may_be_a_string(tmp_path):
    [result] = read_squad_questions(tmp_path, {"text": "cat", "answer_start": "2"})
    assert result.answers[0].start == 2


@pytest.mark.parametrize(
    ("start", "qa", "message"),
    [
        ("two", {}, "answer_start must be a whole number, got 'two'"),
        (2.0, {}, "answer_start must be a whole number, got 2.0"),
        (True, {}, "answer_start must be a whole number, got True"),
        ("-2", {}, "answer_start must be a whole number"),
        ("9", {}, "must match the context"),
        (2, {"is_impossible": "false"}, "is_impossible must be true or false, got 'false'"),
        (2, {"is_impossible": True}, "answers.*is_impossible"),
        (2, {"question": "a\ud800"}, "an incomplete surrogate pair"),
    ],
)
def test_wrong_answers_error_names_the_question(tmp_path, start, qa, message):
    with pytest.raises(ValueError, match=rf"qas\[0\].*{message}"):
        read_squad_questions(tmp_path, {"text": "cat", "answer_start": start}, **qa)


def test_empty_cells_of_glue_give_a_warning(tmp_path, caplog):
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na\t1\n\t0\n \t1\n")
    with caplog.at_level(logging.WARNING):
        assert read_glue_tsv(tmp_path / "dev.tsv", TASKS["sst2"])["text1"][:] == ["a", "", " "]
    assert "2 of 3 rows have an empty cell" in caplog.text
    (tmp_path / "dev.tsv").write_text("sentence\tsentence\tlabel\na\tb\t1\n")
    with pytest.raises(ValueError, match=r"line 1: .*'sentence' twice"):
        read_glue_tsv(tmp_path / "dev.tsv", TASKS["sst2"])


@pytest.mark.parametrize(
    "text",
    [
        '{"source": "a", "target": "b"}\n',
        '[{"source": "a", "target": "b"}]',
        '\n[\n  {"source": "a", "target": "b"}\n]\n',
        '{\n"source": "a"}\n',
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_json_content_in_a_table_file_raises_an_error(tmp_path, name, text):
    with pytest.raises(ValueError, match=rf"{name}.* contains JSON"):
        read_column_texts(tmp_path, name, text)


def test_table_header_may_begin_with_a_bracket(tmp_path):
    assert read_column_texts(tmp_path, "a.csv", "[x],{y}\n1,2\n", names=("[x]", "{y}")) == [("1", "2")]
