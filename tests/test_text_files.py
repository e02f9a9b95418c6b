"""Check that lines, parallel files and tables are read, and the errors for files that cannot be read."""

import gzip

import pytest

from hf_attn_variants.text_files import has_texts, is_table, read_columns, read_lines, read_pairs
from hf_attn_variants.training.pretraining.text_stream import TextFile


@pytest.fixture
def write(tmp_path):
    def call(name, text):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return tmp_path / name

    return call


def test_plain_and_gzip_lines_are_read_in_order_without_blank_lines(write):
    paths = [write("a.txt", "one\r\n\ntwo \n   \n"), write("b.txt.gz", "drei\nvier")]
    assert read_lines(paths) == ["one", "two ", "drei", "vier"]


def test_carriage_return_inside_a_line_does_not_end_it(write):
    source = write("s.txt", "one\rhalf\r\ntwo\n")
    assert read_lines([source]) == ["one\rhalf", "two"]
    assert read_pairs(source, write("t.txt.gz", "eins\nzwei\rhalb\n")).texts == [
        ("one\rhalf", "eins"),
        ("two", "zwei\rhalb"),
    ]
    table = write("t.csv", 'source,target\r\n"a\r\nb",c\r\n')
    assert read_columns([table], ["source", "target"]).texts == [("a\r\nb", "c")]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_byte_order_mark_is_removed(write, end):
    assert read_lines([write(f"a.txt{end}", "\ufeffone\n")]) == ["one"]
    assert read_columns([write(f"a.csv{end}", "\ufeffsource\none\n")], ["source"]).texts == [("one",)]
    assert list(TextFile(write(f"b.txt{end}", "\ufeffone\n\ntwo")).read_articles()) == [(0, "one\n"), (8, "two")]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("empty.txt", "\n  \n", ValueError, r"empty\.txt is empty"),
        ("latin.txt", b"cafe\n" * 5000 + b"caf\xe9\n", ValueError, r"latin\.txt, line 5001, must be UTF-8"),
        ("binary.txt", b"a\x00b\n", ValueError, r"binary\.txt, line 1, contains a null character"),
        ("none.txt", None, OSError, r"none\.txt"),
    ],
)
def test_unreadable_text_error_names_the_file(write, tmp_path, name, content, error, message):
    path = tmp_path / name if content is None else write(name, content)
    with pytest.raises(error, match=message):
        read_lines([path])


def test_truncated_gzip_error_names_the_file(write):
    path = write("cut.txt.gz", "line\n" * 1000)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(OSError, match=r"cut\.txt\.gz is not a complete gzip file"):
        read_lines([path])
    path = write("plain.txt", "text").rename(path.with_name("plain.txt.gz"))
    with pytest.raises(OSError, match=r"plain\.txt\.gz is not a complete gzip file"):
        read_lines([path])


def test_parallel_files_need_equal_line_counts_and_skip_blank_lines(write):
    source, target = write("s.txt", "a\nb\nc\n"), write("t.txt.gz", "x\n\nz\n")
    assert read_pairs(source, target).texts == [("a", "x"), ("c", "z")]
    with pytest.raises(ValueError, match=r"must have the same number of lines, got 3 and 2"):
        read_pairs(source, write("short.txt", "x\ny\n"))
    with pytest.raises(ValueError, match="are empty"):
        read_pairs(source, write("blank.txt", "\n\n\n"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", 'en,de\n"a, b",x\nc,z\n'),
        ("rows.tsv", "en\tde\na, b\tx\nc\tz\n"),
        ("rows.jsonl", '{"en": "a, b", "de": "x"}\n{"en": "c", "de": "z"}\n'),
        ("rows.json", '{"en": "a, b", "de": "x"}\n{"en": "c", "de": "z"}\n'),
        ("list.json.gz", '[\n{"en": "a, b", "de": "x"},\n{"en": "c", "de": "z"}]'),
    ],
)
def test_tables_return_the_requested_columns(write, name, text):
    path = write(name, text)
    assert read_columns([path], ("en", "de")).texts == [("a, b", "x"), ("c", "z")]
    place = "line 1, the header" if name.endswith(("csv", "tsv")) else "row 1"
    with pytest.raises(ValueError, match=f"{place}: there is no column 'fr'. The columns are en, de"):
        read_columns([path], ("en", "fr"))
    with pytest.raises(ValueError, match=r"The columns are en, de. .*--text_columns"):
        read_columns([path], ("en", "fr"), "--text_columns")


def test_rows_with_one_blank_side_give_a_warning(write, caplog):
    path = write("a.jsonl", '{"s": "\\u00a0", "t": ""}\n{"s": "", "t": " "}\n{"s": "one", "t": "two"}\n')
    assert read_columns([path], ("s", "t")).texts == [("one", "two")]
    assert (
        "Skipping 2 of 3 rows because they contain a blank text. The first one is" in caplog.text
        and "row 1" in caplog.text
    )


def test_table_with_only_half_blank_rows_raises_an_error(write):
    with pytest.raises(ValueError, match=r"a.csv: at least one row must contain text in each column of s, t"):
        read_columns([write("a.csv", "s,t\none,\ntwo,\n")], ("s", "t"))


def test_dotted_name_selects_a_nested_column(write):
    path = write("rows.jsonl", '{"pair": {"en": "a", "de": "x"}, "c.d": "flat"}\n')
    assert read_columns([path], ("pair.de", "c.d")).texts == [("x", "flat")]
    with pytest.raises(ValueError, match=r"no column 'pair.fr'. The columns are pair.en, pair.de, c.d"):
        read_columns([path], ("pair.en", "pair.fr"))


def test_blank_rows_are_kept_on_request(write):
    lines, table = write("a.txt", "one\n\ntwo\n"), write("a.csv", "s,t\none,1\n,2\n")
    assert read_lines([lines], keep_blank=True) == ["one", "", "two"]
    assert read_columns([table], ["s"], keep_blank=True).texts == [("one",), ("",)]
    assert has_texts([{"t": "1"}, {}], "t") and has_texts([{"t": ""}, {"t": "2"}], "t")
    for rows in ([], [{"u": "1"}], [{"t": None}, {"t": "2"}], [{"t": ""}, {"t": " "}, {"t": None}]):
        assert not has_texts(rows, "t")
    with pytest.raises(ValueError, match="is empty"):
        read_lines([write("b.txt", "\n \n")], keep_blank=True)
    with pytest.raises(ValueError, match="is empty"):
        read_columns([write("b.csv", 's,t\n" ",2\n')], ["s"], keep_blank=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.txt", "a\tx\n", "must be one of .csv, .tsv, .json, .jsonl"),
        ("rows.json", "a b\n", "must be a JSON list or have one JSON object per line"),
        ("rows.json", "[1]", "row 1: a row must be a JSON object, got int"),
        ("rows.jsonl", '{"en": "a", "de": "b"}\n\n{"en" "b"}\n', "line 3, column 7: the file must be a JSON list"),
        ("rows.jsonl", "", "is empty"),
        ("rows.csv", "en,de\n,\n", "is empty"),
        ("rows.csv", b"en,de\n\xff,x\n", "line 2, must be UTF-8"),
    ],
)
def test_unsupported_tables_raise_an_error(write, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_columns([write(name, text)], ("en", "de"))


def test_csv_cells_may_be_long_and_truncated_csv_error_names_the_file(write):
    document = "word " * 40_000
    assert read_columns([write("rows.csv", f'en,de\n"{document}",x\n')], ("en", "de")).texts == [(document, "x")]
    path = write("rows.csv.gz", "en,de\n" + "a,b\n" * 5000)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(OSError, match=r"rows.csv.gz is not a complete gzip file"):
        read_columns([path], ("en", "de"))


def test_table_formats_are_recognized_by_file_name():
    assert all(map(is_table, ("a.csv", "b.json", "c.jsonl", "d.CSV.gz", "e.tsv")))
    assert not any(map(is_table, ("a.txt", "b.gz", "csv", "c.txt.gz")))
