"""Small checkpoints with the names of those in the documentation."""

import pytest
from fixtures.named_checkpoints import CheckpointShelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return CheckpointShelf(tmp_path_factory.mktemp("shelf"))
