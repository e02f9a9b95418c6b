"""Make the modules of examples/ importable, as in their scripts, and provide the tiny model."""

import sys
from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import make_tiny_bert

sys.path += [str(Path(__file__).parents[2] / "examples" / name) for name in ("multiple_choice", "superglue")]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    return make_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))
