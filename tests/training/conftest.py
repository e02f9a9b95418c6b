from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    return make_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def glue() -> Path:
    return FIXTURES
