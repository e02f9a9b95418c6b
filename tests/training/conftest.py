from pathlib import Path

import pytest
from fixtures.commands import run_command
from fixtures.glue.tiny_bert import FIXTURES
from fixtures.licence_text import write_shards
from fixtures.uptraining import make_bert, make_t5
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def glue() -> Path:
    return FIXTURES


@pytest.fixture(scope="session")
def tokenizer(tiny_bert):
    return AutoTokenizer.from_pretrained(tiny_bert)


@pytest.fixture(scope="session")
def bert(tiny_bert, tmp_path_factory):
    """The folder of a multi-head BERT that learns in few steps; tests write only to its parent folder."""
    return make_bert(tmp_path_factory.mktemp("bert") / "mha", tiny_bert)


@pytest.fixture(scope="session")
def t5(tmp_path_factory):
    """The folder of a multi-head T5; tests write only to its parent folder."""
    return make_t5(tmp_path_factory.mktemp("t5") / "mha")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with two shards and a held-out file of the license."""
    return write_shards(tmp_path_factory.mktemp("text"))


@pytest.fixture
def call(tmp_path):
    """A function that runs a training command on a model, and returns its result and its output folder."""

    def run(command, model, *argv):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        arguments = ["--model_name_or_path", model, "--output_dir", out, *argv]
        return run_command(command, *arguments), out

    return run
