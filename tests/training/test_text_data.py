"""Check text streams: complete packing, order by seed for any number of processes, seeking, and broken files."""

import gzip
import itertools

import datasets
import numpy as np
import pytest
import torch
from fixtures.span_corruption import make_sentinel_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from hf_attn_variants.training.engine.dataloaders import IGNORED_LABEL
from hf_attn_variants.training.pretraining import text_stream
from hf_attn_variants.training.pretraining import text_stream as text_data
from hf_attn_variants.training.pretraining.text_stream import (
    DatasetShard,
    TextFile,
    TextStream,
    check_text_files,
    hash_files,
    pack_blocks,
    read_blocks,
)

# Sentences of the Gettysburg Address, with two articles per file.
ARTICLES = [
    "Four score and seven years ago our fathers brought forth\non this continent, a new nation.",
    "Now we are engaged in a great civil war, testing whether that nation can long endure.",
    "We are met on a great battle-field of that war.\nWe have come to dedicate a portion of that field.",
    "It is altogether fitting and proper that we should do this.",
    "The world will little note, nor long remember what we say here.",
]
LENGTH = 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = sorted({word for text in ARTICLES for word in text.lower().replace(",", " ,").replace(".", " .").split()})
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "battle", "-", "field", "##s"]))
    return BertTokenizerFast(str(path))


@pytest.fixture
def shards(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_text("\n\n".join(ARTICLES[:2]) + "\n")
    packed.write_bytes(gzip.compress(("\n\n\n" + "\n \n".join(ARTICLES[2:])).encode()))
    return check_text_files([plain, packed])


def tokenize_texts(tokenizer, texts=ARTICLES):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.sep_token_id] for text in texts]
    return list(itertools.chain(*ids))


def test_packing_keeps_every_token(tokenizer, shards):
    blocks = read_blocks(shards, tokenizer, LENGTH, tokenizer.sep_token_id)
    assert {len(block) for block in blocks[:-1]} == {LENGTH} and 0 < len(blocks[-1]) <= LENGTH
    assert np.concatenate(blocks).tolist() == tokenize_texts(tokenizer)
    assert tokenizer.unk_token_id not in tokenize_texts(tokenizer)
    assert len(read_blocks(shards, tokenizer, LENGTH, tokenizer.sep_token_id, limit=3)) == 3


@pytest.mark.parametrize("length", [1, 4, LENGTH, 1000])
@pytest.mark.parametrize("batch", [1, 32])
def test_packing_continues_from_any_block(tokenizer, shards, monkeypatch, length, batch):
    monkeypatch.setattr(text_data, "TEXTS_PER_CALL", batch)
    assert_goes_on_from_any_block(shards, tokenizer, length, tokenizer.sep_token_id)


def assert_goes_on_from_any_block(shards, *settings):
    all_blocks = list(pack_blocks(shards, *settings))
    for i, (_, place) in enumerate(all_blocks):
        again = list(pack_blocks(shards, *settings, place))
        assert [(block.tolist(), at) for block, at in again] == [(block.tolist(), at) for block, at in all_blocks[i:]]


def test_file_without_empty_lines_is_split_at_line_ends(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_stream, "MAX_ARTICLE_BYTES", 60)
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(line for text in ARTICLES for line in text.splitlines()))
    articles = list(TextFile(path).read_articles())
    assert len(articles) > 3 and "\n".join(text.strip("\n") for _, text in articles) == path.read_text()
    assert list(TextFile(path).read_articles(articles[2][0])) == articles[2:]
    assert read_blocks([TextFile(path)], tokenizer, LENGTH, tokenizer.sep_token_id)


@pytest.mark.parametrize("word", ["Schnee", "雪"], ids=["words", "none"])
def test_long_line_is_split_between_words_or_characters(word, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_stream, "MAX_ARTICLE_BYTES", 60)
    path = tmp_path / "line.txt"
    path.write_text((" ".join if word.isascii() else "".join)([word] * 100), encoding="utf-8")
    articles = list(TextFile(path).read_articles())
    assert "".join(text for _, text in articles) == path.read_text(encoding="utf-8") and len(articles) > 2
    assert all(len(text.encode()) <= 120 and not text.strip().replace(word, "").strip() for _, text in articles)
    for i, (offset, _) in enumerate(articles):
        assert list(TextFile(path).read_articles(offset)) == articles[i:]
    assert_goes_on_from_any_block([TextFile(path)], tokenizer, LENGTH, tokenizer.sep_token_id)


def test_table_as_text_raises_an_error(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\na dog,1\n")
    with pytest.raises(ValueError, match=r"rows\.csv.*--dataset_name"):
        check_text_files([tmp_path / "rows.csv"])


def make_stream(tokenizer, shards, process_index=0, num_processes=1, batch_size=2, window=3, seed=5):
    def prepare(block, key, other_block):
        padded = np.zeros(LENGTH, dtype=np.int64)
        padded[: len(block)] = block
        return {"ids": padded, "labels": padded, "key": np.array(key)}

    prepare.block_length, prepare.separator = LENGTH, tokenizer.sep_token_id
    return TextStream(shards, tokenizer, prepare, batch_size, seed, window, process_index, num_processes)


def get_rows(batches):
    return torch.cat([batch["ids"] for batch in batches]).tolist()


def test_block_order_depends_only_on_seed_and_epoch(tokenizer, shards):
    stream = make_stream(tokenizer, shards)
    first = list(stream)
    assert get_rows(stream) == get_rows(first) == get_rows(make_stream(tokenizer, shards))
    assert [tuple(key) for batch in first for key in batch["key"].tolist()] == [
        (0, i) for i in range(len(get_rows(first)))
    ]
    unshuffled = sorted(token for row in get_rows(first) for token in row if token)
    assert unshuffled == sorted(tokenize_texts(tokenizer))
    orders = [get_rows(first)]
    for epoch in range(1, 4):
        stream.start_epoch(epoch)
        orders.append(get_rows(stream))
    assert len({str(order) for order in orders}) > 2
    assert get_rows(make_stream(tokenizer, shards, seed=6)) != orders[0]


@pytest.fixture(params=["files", "datasets"])
def any_shards(request, shards, tmp_path):
    if request.param == "files":
        return shards
    paths = [str(tmp_path / f"{i}.jsonl") for i in range(3)]
    for i, path in enumerate(paths):
        datasets.Dataset.from_dict({"text": ARTICLES[i::3]}).to_json(path)
    stream = datasets.load_dataset("json", data_files=paths, split="train", streaming=True)
    return [DatasetShard(f"{i}.jsonl", stream, shard=i) for i in range(3)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_seek_continues_after_any_batch(tokenizer, any_shards, epoch):
    stream = make_stream(tokenizer, any_shards)
    stream.start_epoch(epoch)
    all_batches = list(stream)
    assert len(all_batches) > 4
    for used in range(1, len(all_batches)):
        resumed = make_stream(tokenizer, any_shards)
        resumed.start_epoch(epoch)
        resumed.seek(used, all_batches[used - 1]["position"].tolist())
        for batch, expected in zip(resumed, all_batches[used:], strict=True):
            assert all(torch.equal(batch[key], expected[key]) for key in expected)


def test_seek_opens_only_the_needed_shards(tokenizer, any_shards, monkeypatch):
    stream = make_stream(tokenizer, any_shards, batch_size=1, window=2)
    all_batches = list(stream)
    opened = []
    kind = type(any_shards[0])
    articles = kind.read_articles
    monkeypatch.setattr(
        kind, "read_articles", lambda self, offset=0: opened.append((self.name, offset)) or articles(self, offset)
    )
    stream.seek(len(all_batches) - 1, all_batches[-2]["position"].tolist())
    assert len(list(stream)) == 1
    assert len(opened) == 1 and all_batches[-2]["position"][2] == len(any_shards) - 1


def test_two_processes_split_the_batch_of_one(tokenizer, shards):
    one = list(make_stream(tokenizer, shards, batch_size=10))
    both = [list(make_stream(tokenizer, shards, i, 2, batch_size=5)) for i in range(2)]
    assert len(one[-1]["ids"]) == 3  # the processes get 2 and 1 of these
    for batch, left, right in zip(one, *both, strict=True):
        assert torch.equal(batch["ids"], torch.cat([left["ids"], right["ids"]]))


def test_process_without_a_row_gets_an_empty_last_batch(tokenizer, tmp_path):
    path = tmp_path / "war.txt"
    path.write_text("war " * (17 * LENGTH - 1))
    one = list(make_stream(tokenizer, [TextFile(path)], batch_size=4))
    assert [len(batch["ids"]) for batch in one] == [4, 4, 4, 4, 1]
    both = [list(make_stream(tokenizer, [TextFile(path)], i, 2, batch_size=2)) for i in range(2)]
    for batch, left, right in zip(one, *both, strict=True):
        assert left["examples"] + right["examples"] == batch["examples"] == len(batch["ids"])
        assert torch.equal(left["position"], batch["position"]) and torch.equal(right["position"], batch["position"])
    last = both[1][-1]
    assert last["examples"] == 0 and torch.equal(last["ids"], one[-1]["ids"])
    assert (last["labels"] == IGNORED_LABEL).all()
    assert all((batch["labels"] >= 0).all() for batch in [*one, *both[0], *both[1][:-1]])


def test_special_tokens_in_text_are_removed(tokenizer, tmp_path):
    path, plain = tmp_path / "special.txt", tmp_path / "plain.txt"
    path.write_text("[CLS] war [MASK][MASK] nation , zzz [SEP]\n\n[PAD] [SEP]\n\n[PAD] field")
    plain.write_text("war nation , zzz\n\nfield")
    blocks = [read_blocks([TextFile(p)], tokenizer, LENGTH, tokenizer.sep_token_id) for p in (path, plain)]
    assert [block.tolist() for block in blocks[0]] == [block.tolist() for block in blocks[1]]
    assert tokenizer.unk_token_id in blocks[0][0]  # "zzz"
    assert_goes_on_from_any_block([TextFile(path)], tokenizer, 1, tokenizer.sep_token_id)

    t5 = AutoTokenizer.from_pretrained(make_sentinel_tokenizer(tmp_path / "t5"))
    path.write_text("a<extra_id_0>b</s><pad>c<extra_id_7>")
    (block,) = read_blocks([TextFile(path)], t5, 100, t5.eos_token_id)
    assert t5.convert_ids_to_tokens(block) == ["a", "b", "c", "</s>"]


def test_dataset_rows_are_read_as_text(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    datasets.Dataset.from_dict({"text": ARTICLES}).to_json(path)
    stream = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
    source = DatasetShard("articles", stream)
    assert list(source.read_articles(3)) == [(3, ARTICLES[3]), (4, ARTICLES[4])]
    blocks = read_blocks([source], tokenizer, LENGTH, tokenizer.sep_token_id)
    assert np.concatenate(blocks).tolist() == tokenize_texts(tokenizer)
    with pytest.raises(ValueError, match=r"row 0.*column 'body'"):
        next(DatasetShard("articles", stream, "body").read_articles())


def test_whitespace_is_kept_on_request(tmp_path):
    code = "def f(x):\n    return  1\n\treturn 2"
    (tmp_path / "code.txt").write_text(code + "\n\nend\n")
    backend = Tokenizer(BPE({symbol: i for i, symbol in enumerate([*ByteLevel.alphabet(), "</s>"])}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    byte_level = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    for keeps, read in ((True, code), (False, " ".join(code.split()))):
        (block,) = read_blocks(check_text_files([tmp_path / "code.txt"], keeps), byte_level, 999, 256)
        assert byte_level.decode(block) == f"{read}</s>end</s>"


def test_broken_file_error_names_the_file(tmp_path):
    compressed = gzip.compress("\n\n".join(ARTICLES * 50).encode(), mtime=0)
    files = {
        "cut.txt.gz": compressed[: len(compressed) // 2],
        "plain.txt.gz": b"not compressed at all",
        "flipped.txt.gz": compressed[:-8] + bytes(8),
        "latin.txt": "na\u00efve".encode("latin-1"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OSError, match=rf"{name} .*byte \d+"):
            list(TextFile(tmp_path / name).read_articles())
    (tmp_path / "empty.txt.gz").write_bytes(gzip.compress(b" \n\n"))
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf\n")
    with pytest.raises(ValueError, match=r"mark\.txt"):
        check_text_files([tmp_path / "mark.txt"])
    with pytest.raises(ValueError, match=r"empty\.txt\.gz"):
        check_text_files([tmp_path / "empty.txt.gz"])
    with pytest.raises(OSError, match=r"none\.txt"):
        check_text_files([tmp_path / "none.txt"])
    with pytest.raises(OSError, match="is a folder"):
        check_text_files([tmp_path])


def test_text_hash_uses_names_sizes_and_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = hash_files([TextFile(path)])
    path.write_text("two")
    second = hash_files([TextFile(path)])
    path.write_text("one")
    assert first == hash_files([TextFile(path)]) != second
    assert hash_files([TextFile(path.rename(tmp_path / "b.txt"))]) != first
