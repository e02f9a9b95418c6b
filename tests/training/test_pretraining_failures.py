"""Check failures of the pretraining scripts: an error that names the file, and a checkpoint to resume from."""

import gzip
import json

import numpy as np
import pytest
from fixtures.commands import run_command
from fixtures.data_files import write_lines
from fixtures.licence_text import LICENCE
from fixtures.linear_loop import read_losses
from fixtures.span_corruption import make_sentinel_tokenizer
from training.test_two_processes import COMMANDS, SIZES

from hf_attn_variants.training.engine.checkpoints import list_checkpoints
from hf_attn_variants.training.pretraining import text_stream
from hf_attn_variants.training.pretraining.text_stream import SHARD_ORDER

STEPS = 30


@pytest.fixture
def text(tmp_path):
    """Three shards of the license."""
    articles = LICENCE.read_text().split("\n\n")
    for i in range(3):
        (tmp_path / f"train-{i}.txt.gz").write_bytes(gzip.compress("\n\n".join(articles[i::3]).encode()))
    return tmp_path


@pytest.fixture(params=SIZES)
def run(request, text, tiny_bert):
    tokenizer = tiny_bert if request.param == "pretrain_mlm" else make_sentinel_tokenizer(text / "tokenizer")
    script = COMMANDS[request.param]

    def call(*more, out="out", files=None):
        argv = ["--train_file", *(files or sorted(text.glob("train-*.txt.gz")))]
        argv = [] if "--dataset_name" in more else argv
        argv += ["--model_type", "bert" if request.param == "pretrain_mlm" else "t5"]
        argv += ["--config_overrides", SIZES[request.param], "--tokenizer_name", tokenizer, "--max_length", 32]
        argv += ["--per_device_train_batch_size", 4, "--shuffle_buffer_size", 1, "--max_train_steps", STEPS]
        argv += ["--checkpointing_steps", 2, "--logging_steps", 1, "--cpu", "--disable_tqdm"]
        return run_command(script, *argv, "--output_dir", text / out, *more)

    return call


def write_rows(path, texts, column="text"):
    path.parent.mkdir(exist_ok=True)
    write_lines(path, ({column: text} for text in texts))


def assert_goes_on_to_the_same_end(run, text, *flags):
    run(*flags, "--resume_from_checkpoint", "latest")
    run(*flags, out="whole")
    assert len(read_losses(text / "whole")) == STEPS and read_losses(text / "out") == read_losses(text / "whole")
    weights = [(text / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


def get_second_shard(text):
    order = np.random.default_rng((42, SHARD_ORDER, 0)).permutation(3)
    return text / f"train-{order[1]}.txt.gz"


@pytest.mark.thorough
def test_unreadable_shard_is_named_and_the_run_resumes_after_repair(run, text, monkeypatch):
    broken, opened = get_second_shard(text), text_stream.open_file

    class FailingDisk:
        def __init__(self, file):
            self.file, self.left = file, 20

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def seek(self, offset):
            self.file.seek(offset)

        def read(self, size):  # the first bytes are read to detect the line endings
            return self.file.read(size)

        def readline(self, size):
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "Input/output error")
            return self.file.readline(size)

    monkeypatch.setattr(text_stream, "open_file", lambda p: FailingDisk(opened(p)) if p == broken else opened(p))
    with pytest.raises(OSError, match=rf"{broken.name}.*Input/output error"):
        run()
    last = list_checkpoints(text / "out")[-1]
    assert 2 <= json.loads((last / "train_state.json").read_text())["step"] < STEPS
    with pytest.raises(OSError, match=broken.name):  # the checkpoint loads, but the shard still fails
        run("--resume_from_checkpoint", "latest")
    monkeypatch.undo()
    assert_goes_on_to_the_same_end(run, text)


def test_changed_dataset_folder_raises_on_resume(run, text):
    flags = ["--dataset_name", text / "data", "--max_train_steps", 2]
    articles = LICENCE.read_text().split("\n\n")
    write_rows(text / "data/train.jsonl", articles)
    run(*flags)
    write_rows(text / "data/train.jsonl", articles[::-1])
    with pytest.raises(ValueError, match=r"hash of the training text was .* and is"):
        run(*flags, "--resume_from_checkpoint", "latest")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("blank.txt", b"\n \n", ValueError, r"blank\.txt"),
        ("plain.txt.gz", b"no gzip file", OSError, r"plain\.txt\.gz.*0"),
        ("missing.txt", None, OSError, r"missing\.txt"),
    ],
)
def test_empty_file_raises_before_writing(run, text, name, content, error, message):
    if content is not None:
        (text / name).write_bytes(content)
    with pytest.raises(error, match=message):
        run(files=[text / "train-0.txt.gz", text / name])
    assert not list((text / "out").glob("*"))
