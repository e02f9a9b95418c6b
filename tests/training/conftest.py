from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    return make_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def glue() -> Path:
    return FIXTURES


@pytest.fixture
def call(tmp_path):
    """A function that runs a training command on a model, and returns its result and its output folder."""

    def run(command, model, *argv):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        arguments = ["--model_name_or_path", model, "--output_dir", out, *argv]
        return command.main(command.parse_args([str(part) for part in arguments])), out

    return run
