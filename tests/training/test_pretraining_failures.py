"""What goes wrong in either pretraining script: an error that names the file, and a last checkpoint to go on from."""

import gzip
import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from fixtures.span_corruption import make_sentinel_tokenizer

from hf_attn_variants.training import checkpoints
from hf_attn_variants.training.checkpoints import list_checkpoints
from hf_attn_variants.training.text_data import SHARD_ORDER, TextFile

LICENCE = Path(__file__).parents[2] / "LICENSE"
SIZES = {
    "pretrain_mlm": "hidden_size=16,num_hidden_layers=1,num_attention_heads=4,intermediate_size=32",
    "pretrain_span_corruption": "d_model=16,d_kv=4,d_ff=32,num_layers=1,num_heads=4",
}
STEPS = 30


@pytest.fixture
def text(tmp_path):
    """Three shards of the licence."""
    articles = LICENCE.read_text().split("\n\n")
    for i in range(3):
        (tmp_path / f"train-{i}.txt.gz").write_bytes(gzip.compress("\n\n".join(articles[i::3]).encode()))
    return tmp_path


@pytest.fixture(params=SIZES)
def run(request, text, tiny_bert):
    tokenizer = tiny_bert if request.param == "pretrain_mlm" else make_sentinel_tokenizer(text / "tokenizer")
    script = importlib.import_module(f"hf_attn_variants.training.{request.param}")

    def call(*more, out="out", files=None):
        argv = [] if files == [] else ["--train_file", *(files or sorted(text.glob("train-*.txt.gz")))]
        argv += ["--model_type", "bert" if request.param == "pretrain_mlm" else "t5"]
        argv += ["--config_overrides", SIZES[request.param], "--tokenizer_name", tokenizer, "--max_length", 32]
        argv += ["--per_device_train_batch_size", 4, "--shuffle_buffer_size", 1, "--max_train_steps", STEPS]
        argv += ["--checkpointing_steps", 2, "--logging_steps", 1, "--cpu", "--disable_tqdm"]
        return script.main(script.parse_args([str(part) for part in [*argv, "--output_dir", text / out, *more]]))

    return call


def records(folder):
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def assert_goes_on_to_the_same_end(run, text):
    run("--resume_from_checkpoint", "latest")
    run(out="whole")
    assert len(records(text / "whole")) == STEPS and records(text / "out") == records(text / "whole")
    weights = [(text / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


def second_shard(text):
    order = np.random.default_rng((42, SHARD_ORDER, 0)).permutation(3)
    return text / f"train-{order[1]}.txt.gz"


def test_a_shard_that_cannot_be_read_is_named_and_the_run_goes_on_when_it_can_be(run, text, monkeypatch):
    broken, opened = second_shard(text), TextFile._open

    class FailingDisk:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def seek(self, offset):
            self.file.seek(offset)

        def __iter__(self):
            yield from itertools.islice(self.file, 20)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(TextFile, "_open", lambda s: FailingDisk(opened(s)) if s.path == broken else opened(s))
    with pytest.raises(OSError, match=rf"{broken.name}: cannot be read beyond byte \d+ .*Input/output error"):
        run()
    last = list_checkpoints(text / "out")[-1]
    assert 2 <= json.loads((last / "train_state.json").read_text())["step"] < STEPS
    with pytest.raises(OSError, match=broken.name):  # the checkpoint loads; the shard is as it was
        run("--resume_from_checkpoint", "latest")
    monkeypatch.undo()
    assert_goes_on_to_the_same_end(run, text)


def test_a_cut_shard_is_named_and_leaves_the_checkpoints(run, text):
    broken = second_shard(text)
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=rf"{broken.name}: cannot be read beyond byte \d+ of its text"):
        run()
    kept = [path.name for path in list_checkpoints(text / "out")]
    assert len(kept) >= 1 and not list((text / "out").glob(".tmp-*"))
    broken.write_bytes(whole)
    with pytest.raises(ValueError, match=r"hash of the training text was .* and is"):  # it is another text now
        run("--resume_from_checkpoint", "latest")
    assert [path.name for path in list_checkpoints(text / "out")] == kept


def test_a_full_disk_leaves_the_last_checkpoint_to_go_on_from(run, text, monkeypatch):
    finish = checkpoints._finish_checkpoint

    def disk_full(state, *others):
        if state.step == 6:
            raise OSError(28, "No space left on device")
        finish(state, *others)

    monkeypatch.setattr(checkpoints, "_finish_checkpoint", disk_full)
    with pytest.raises(OSError, match=r"checkpoint-6 .*No space left on device.*last good one is .*checkpoint-4"):
        run()
    assert [path.name for path in list_checkpoints(text / "out")] == ["checkpoint-2", "checkpoint-4"]
    monkeypatch.undo()
    assert_goes_on_to_the_same_end(run, text)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("empty.txt", b"", ValueError, r"empty\.txt holds no text"),
        ("blank.txt", b"\n \n", ValueError, r"blank\.txt holds no text"),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), ValueError, r"empty\.txt\.gz holds no text"),
        ("plain.txt.gz", b"no gzip file", OSError, r"plain\.txt\.gz: cannot be read beyond byte 0"),
        ("latin1.txt", "Gr\u00fc\u00dfe".encode("latin-1"), OSError, r"latin1\.txt: not UTF-8 text"),
        ("missing.txt", None, OSError, r"missing\.txt: cannot be read"),
    ],
)
def test_a_file_without_text_fails_before_anything_is_written(run, text, name, content, error, message):
    if content is not None:
        (text / name).write_bytes(content)
    with pytest.raises(error, match=message):
        run(files=[text / "train-0.txt.gz", text / name])
    assert not list((text / "out").glob("*"))


def test_a_wrong_column_names_the_dataset_and_the_row(run, text):
    (text / "data").mkdir()
    (text / "data/train.jsonl").write_text(json.dumps({"body": "Some text."}) + "\n")
    with pytest.raises(ValueError, match=r"data \(train\), row 0: no text in the column 'text'; it has body"):
        run("--dataset_name", text / "data", files=[])
    assert not list((text / "out").glob("*"))


def test_a_row_without_text_stops_training_and_keeps_the_checkpoints(run, text):
    rows = [{"text": article} for article in LICENCE.read_text().split("\n\n") if article.strip()]
    rows[-1] = {"text": None}
    (text / "data").mkdir()
    (text / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"data \(train\), row {len(rows) - 1}: no text in the column 'text'"):
        run("--dataset_name", text / "data", "--max_train_steps", 400, files=[])
    assert list_checkpoints(text / "out")
