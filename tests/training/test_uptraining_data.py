"""Reading text and pairs, holding out, masking by key, and the batches of an encoder-decoder."""

import gzip

import pytest
import torch
from transformers import AutoTokenizer

from hf_attn_variants.training.text_data import TextFile
from hf_attn_variants.training.uptraining_data import (
    TextRows,
    hash_texts,
    hold_out,
    masked_text_collator,
    pair_collator,
    read_columns,
    read_lines,
    read_pairs,
    text_collator,
)


@pytest.fixture
def write(tmp_path):
    def call(name, text):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return tmp_path / name

    return call


@pytest.fixture(scope="module")
def tokenizer(tiny_bert):
    return AutoTokenizer.from_pretrained(tiny_bert)


def test_lines_of_plain_and_gzip_files_come_in_order_without_blank_ones(write):
    paths = [write("a.txt", "one\r\n\ntwo \n   \n"), write("b.txt.gz", "drei\nvier")]
    assert read_lines(paths) == ["one", "two ", "drei", "vier"]


def test_a_carriage_return_inside_a_line_ends_none(write):
    source = write("s.txt", "one\rhalf\r\ntwo\n")
    assert read_lines([source]) == ["one\rhalf", "two"]
    assert read_pairs(source, write("t.txt.gz", "eins\nzwei\rhalb\n")) == [
        ("one\rhalf", "eins"),
        ("two", "zwei\rhalb"),
    ]
    table = write("t.csv", 'source,target\r\n"a\r\nb",c\r\n')
    assert read_columns([table], ["source", "target"]) == [("a\r\nb", "c")]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_byte_order_mark_is_no_text(write, end):
    assert read_lines([write(f"a.txt{end}", "\ufeffone\n")]) == ["one"]
    assert read_columns([write(f"a.csv{end}", "\ufeffsource\none\n")], ["source"]) == [("one",)]
    assert list(TextFile(write(f"b.txt{end}", "\ufeffone\n\ntwo")).articles()) == [(0, "one\n"), (8, "two")]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("empty.txt", "\n  \n", ValueError, r"empty\.txt is empty"),
        ("latin.txt", b"caf\xe9\n", ValueError, r"latin\.txt is not UTF-8"),
        ("none.txt", None, OSError, r"none\.txt: no such file"),
    ],
)
def test_unreadable_text_is_named(write, tmp_path, name, content, error, message):
    path = tmp_path / name if content is None else write(name, content)
    with pytest.raises(error, match=message):
        read_lines([path])


def test_a_truncated_gzip_file_is_named(write):
    path = write("cut.txt.gz", "line\n" * 1000)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(OSError, match=r"cut\.txt\.gz is no whole gzip file"):
        read_lines([path])
    path = write("plain.txt", "text").rename(path.with_name("plain.txt.gz"))
    with pytest.raises(OSError, match=r"plain\.txt\.gz is no whole gzip file"):
        read_lines([path])


def test_pairs_need_as_many_lines_and_lose_blank_ones(write):
    source, target = write("s.txt", "a\nb\nc\n"), write("t.txt.gz", "x\n\nz\n")
    assert read_pairs(source, target) == [("a", "x"), ("c", "z")]
    with pytest.raises(ValueError, match=r"s\.txt has 3 lines and .*short\.txt has 2"):
        read_pairs(source, write("short.txt", "x\ny\n"))
    with pytest.raises(ValueError, match="are empty: they have no pair"):
        read_pairs(source, write("blank.txt", "\n\n\n"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", 'en,de\n"a, b",x\nc,z\n'),
        ("rows.jsonl", '{"en": "a, b", "de": "x"}\n{"en": "c", "de": "z"}\n'),
        ("rows.json", '{"en": "a, b", "de": "x"}\n{"en": "c", "de": "z"}\n'),
        ("list.json.gz", '[\n{"en": "a, b", "de": "x"},\n{"en": "c", "de": "z"}]'),
    ],
)
def test_tables_give_their_columns(write, name, text):
    path = write(name, text)
    assert read_columns([path], ("en", "de")) == [("a, b", "x"), ("c", "z")]
    with pytest.raises(ValueError, match="row 1: no text in column 'fr'; its columns are en, de"):
        read_columns([path], ("en", "fr"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.txt", "a\tx\n", "must be one of .csv, .json, .jsonl"),
        ("rows.json", "a b\n", "neither a JSON list nor one JSON object a line"),
        ("rows.json", "[1]", "must hold JSON objects, got int"),
        ("rows.jsonl", "", "is empty"),
        ("rows.csv", "en,de\n,\n", "is empty"),
        ("rows.csv", b"en,de\n\xff,x\n", "is not UTF-8"),
    ],
)
def test_other_tables_are_refused(write, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_columns([write(name, text)], ("en", "de"))


def test_a_document_in_a_csv_may_be_long_and_a_cut_file_is_named(write):
    document = "word " * 40_000
    assert read_columns([write("rows.csv", f'en,de\n"{document}",x\n')], ("en", "de")) == [(document, "x")]
    path = write("rows.csv.gz", "en,de\n" + "a,b\n" * 5000)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(OSError, match=r"rows.csv.gz is no whole gzip file"):
        read_columns([path], ("en", "de"))


def test_the_last_rows_are_held_out():
    rows = [str(i) for i in range(100)]
    assert hold_out(rows) == (rows[:95], rows[95:])
    assert hold_out(rows, max_rows=2) == (rows[:98], rows[98:])
    assert hold_out(["a", "b"]) == (["a"], ["b"]) and len(hold_out(rows * 200)[1]) == 512
    with pytest.raises(ValueError, match="give a validation file"):
        hold_out(["a"])


def test_rows_know_their_key_and_their_length():
    rows = TextRows(["aa", "bbbb", "c"])
    assert rows[1] == ("bbbb", (0, 1))
    rows.start_epoch(3)
    assert rows[1] == ("bbbb", (3, 1)) and rows.longest_first().texts == ["bbbb", "aa", "c"]
    assert TextRows([("a", "bb")]).lengths() == [3]
    assert hash_texts(["ab", "c"]) != hash_texts(["a", "bc"]) == hash_texts([("a", "bc")])


def test_masks_are_a_function_of_the_key(tokenizer):
    text = "the dog and the cat were in the house with the man"
    collate = masked_text_collator(tokenizer, 32, 8, probability=0.5, seed=1)
    plain = text_collator(tokenizer, 32, 8)([(text, (0, 0)), ("the dog", (0, 1))])
    batch = collate([(text, (0, 0)), ("the dog", (0, 1))])
    predicted = batch["labels"] != -100
    assert torch.equal(batch["labels"][predicted], plain["input_ids"][predicted])
    assert torch.equal(batch["input_ids"][~predicted], plain["input_ids"][~predicted])
    assert torch.equal(batch["attention_mask"], plain["attention_mask"]) and batch["labels"].shape[1] % 8 == 0
    specials = torch.isin(plain["input_ids"], torch.tensor(tokenizer.all_special_ids))
    assert predicted.any() and not (predicted & specials).any()
    assert (batch["input_ids"] == tokenizer.mask_token_id).any()
    again = collate([(text, (0, 0))])
    length = again["labels"].shape[1]
    assert torch.equal(again["labels"][0], batch["labels"][0, :length])
    others = [collate([(text, key)])["labels"] for key in ((1, 0), (0, 1))]
    others.append(masked_text_collator(tokenizer, 32, 8, probability=0.5, seed=2)([(text, (0, 0))])["labels"])
    assert not any(torch.equal(again["labels"], other) for other in others)


def test_targets_are_moved_one_to_the_right(tokenizer):
    collate = pair_collator(tokenizer, 16, None, 5, decoder_start_token_id=7, source_prefix="the ")
    batch = collate([(("dog", "the cat and the dog"), (0, 0)), (("house in the", "dog"), (0, 1))])
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["the dog", "the house in the"]
    assert batch["labels"].shape == (2, 5) and (batch["labels"][1] == -100).tolist() == [False] * 3 + [True] * 2
    assert batch["decoder_input_ids"][:, 0].tolist() == [7, 7]
    real = batch["labels"][:, :-1] != -100
    assert torch.equal(batch["decoder_input_ids"][:, 1:][real], batch["labels"][:, :-1][real])
    assert sorted(batch) == ["attention_mask", "decoder_input_ids", "input_ids", "labels", "token_type_ids"]
