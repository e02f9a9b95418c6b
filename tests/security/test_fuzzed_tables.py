"""Compare damaged tables with pandas: equal rows, or an error that names the row.

There are 100 seeded tables per format by default, and 500 with `-m slow`.
"""

import csv
import gzip
import io
import json
import random
import re

import pandas
import pytest

from hf_attn_variants.text_files import read_columns, read_lines
from hf_attn_variants.training.ner.task import read_conll

COUNTS = pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
PIECES = [*"ab 5é東😀", "word ", "2\u00a0000", "\u2028", "\x85", ", ", '"', "\\", '\\"']
PIECES += ["'", ";", "#", "NA", "1e5", "-"]
INSIDE = [*PIECES, "\n", "\r", "\r\n", "\t", ""]
HARM = ['"', ",", "\n", "\t", "\r", '""', '\\"', "\n\n", " ", "{", "}", "]", ":"]
HARM += ['"source": "x", ', "\ufeff", "\0", "\ud800"]
# An error must match this pattern, in addition to naming the file.
PLACE = re.compile(r"\b(row|line) \d+|the header|is empty|must be a JSON list: .*line \d+|no sentence")


def draw_text(draw, pieces):
    return "".join(draw.choices(pieces, k=draw.randint(0, 6)))


def draw_rows(draw, pieces):
    names = ["source", "target", "other"][: draw.randint(1, 3)]
    return names, [[draw_text(draw, pieces) + "x" for _ in names] for _ in range(draw.randint(1, 8))]


def damage_content(draw, content):
    """Return bytes with up to three insertions or deletions."""
    for _ in range(draw.randint(0, 3)):
        position, harm = draw.randrange(len(content) + 1), draw.choice([*HARM, None])
        content = content[:position] + (
            harm + content[position:] if harm is not None else content[position + draw.randint(1, 9) :]
        )
    return content.encode(errors="surrogatepass")


def read_rows_or_none(path, read):
    """Return the rows, or None after an error that names the place."""
    try:
        return read()
    except ValueError as error:
        assert str(path) in str(error) and PLACE.search(str(error).replace(str(path), "")), str(error)
        assert "\n" not in str(error)
        return None


def read_with_pandas(content, tabs):
    form = {"sep": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    options = {"dtype": str, "keep_default_na": False, "index_col": False, "encoding_errors": "strict"}
    return pandas.read_csv(io.BytesIO(content), **form, **options)


def write_csv(draw, names, rows):
    out = io.StringIO(newline="")
    end, quoting = draw.choice([("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)])
    # If rows end with \\n, Python does not quote a single \\r, which pandas treats as the end of a row.
    csv.writer(out, lineterminator=end, quoting=quoting).writerows([names, *rows])
    return out.getvalue()


@COUNTS
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_fuzzed_tables_equal_pandas(suffix, count, tmp_path):
    read, num_complete = 0, 0
    for seed in range(count):
        draw = random.Random(f"{suffix}{seed}")
        names, rows = draw_rows(draw, INSIDE if suffix == "csv" else PIECES)
        written = (
            write_csv(draw, names, rows)
            if suffix == "csv"
            else "".join("\t".join(row) + "\n" for row in [names, *rows])
        )
        content = damage_content(draw, written)
        path = tmp_path / f"{seed}.{suffix}{draw.choice(['', '.gz'])}"
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        result = read_rows_or_none(
            path, lambda path=path, names=names: read_columns([path], names, keep_blank=True).texts
        )
        if content == written.encode():  # an undamaged table has all cells
            num_complete += 1
            assert result == [tuple(row) for row in rows], (seed, result)
        if result is not None:
            read += 1
            expected = list(read_with_pandas(content, suffix == "tsv")[names].itertuples(index=False, name=None))
            if len(names) == 1:  # pandas drops rows with only whitespace
                result, expected = ([row for row in item if row[0].strip()] for item in (result, expected))
            assert result == expected, (seed, content)
    assert num_complete > 0.15 * count and 0.3 * count < read < 0.95 * count, (num_complete, read)


@COUNTS
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_fuzzed_json_lines_equal_the_json_module(suffix, count, tmp_path):
    read = 0
    for seed in range(count):
        draw = random.Random(f"{suffix}{seed}")
        names, rows = draw_rows(draw, INSIDE)
        records = [dict(zip(names, row, strict=True)) for row in rows]
        plain = draw.random() < 0.5
        if suffix == "json":
            written = json.dumps(records, ensure_ascii=plain, indent=draw.choice([None, 1]))
        else:
            written = "\n".join(json.dumps(record, ensure_ascii=plain) for record in records)
        content = damage_content(draw, written)
        path = tmp_path / f"{seed}.{suffix}"
        path.write_bytes(content)
        result = read_rows_or_none(
            path, lambda path=path, names=names: read_columns([path], names, keep_blank=True).texts
        )
        if content == written.encode():
            assert result == [tuple(row) for row in rows], seed
            table = pandas.read_json(io.BytesIO(content), lines=suffix == "jsonl", dtype=False)
            assert result == list(table[names].itertuples(index=False, name=None))
        if result is not None:
            read += 1
            text = content.decode("utf-8-sig")
            values = json.loads(text) if suffix == "json" else [json.loads(x) for x in text.split("\n") if x.strip()]
            assert result == [tuple(value[name] for name in names) for value in values], (seed, content)
    assert 0.3 * count < read < 0.95 * count, read


@COUNTS
def test_fuzzed_tagged_words_equal_pandas(count, tmp_path):
    read = 0
    inside = [item for item in PIECES if item != "\u2028"]
    for seed in range(count):
        draw = random.Random(f"conll{seed}")
        words = [[(draw_text(draw, inside).strip(" ") or "w") for _ in range(draw.randint(1, 5))] for _ in range(4)]
        tags = [[draw.choice(["O", "B-LOC", "I-LOC"]) for _ in item] for item in words]
        lines = [
            "".join(f"{w}\tNN\t{t}\n" for w, t in zip(*item, strict=True)) for item in zip(words, tags, strict=True)
        ]
        written = "\n".join(lines)
        content = damage_content(draw, written).replace("\ufeff".encode(), b"")  # pandas removes it from each line
        path = tmp_path / f"{seed}.txt"
        path.write_bytes(content)
        result = read_rows_or_none(path, lambda path=path: read_conll(path))
        if content == written.encode():
            assert result == list(zip(words, tags, strict=True)), seed
        if result is not None:
            read += 1
            nonblank_lines = [line for line in content.decode("utf-8-sig").split("\n") if line.strip(" \t\r\n\v\f")]
            divided = [line for line in nonblank_lines if "\t" in line]
            form = {"sep": "\t", "quoting": csv.QUOTE_NONE, "header": None, "dtype": str, "keep_default_na": False}
            columns = [pandas.read_csv(io.StringIO(line), lineterminator="\n", **form).iloc[0] for line in divided]
            flat = [pair for item in result for pair in zip(*item, strict=True)]
            if len(divided) == len(nonblank_lines):
                assert [word for word, _ in flat] == [row.iloc[0].strip(" \r\v\f") for row in columns], (seed, content)
            assert len(flat) == len(nonblank_lines) - sum(line.startswith("-DOCSTART-") for line in nonblank_lines)
    assert 0.3 * count < read < 0.95 * count, read


@COUNTS
def test_fuzzed_lines_are_split_at_line_ends(count, tmp_path):
    for seed in range(count):
        draw = random.Random(f"lines{seed}")
        lines = [draw_text(draw, [*PIECES, "\r", "\t"]).rstrip("\r") for _ in range(draw.randint(1, 8))] + ["end"]
        path = tmp_path / f"{seed}.txt{draw.choice(['', '.gz'])}"
        content = draw.choice(["\n", "\r\n"]).join(lines).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        assert read_lines([path], keep_blank=True) == lines, seed
        assert read_lines([path]) == [line for line in lines if line.strip(" \t\r\n\v\f")], seed
