"""The converter among others: two of them at one folder, and as a user who may write nowhere but to the output."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import BERT

from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.methods.mean import MeanPooling

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    BERT.upstream_model("BertModel").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


class Interrupted(MeanPooling):
    """Mean-pooling that, in the middle of its conversion, lets another one into the same folder run to its end."""

    def __init__(self, other):
        self.other = other

    def pool(self, *args, **kwargs):
        if self.other is not None:
            other, self.other = self.other, None
            other()
        return super().pool(*args, **kwargs)


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "empty folder"])
def test_two_conversions_into_one_folder(source, tmp_path, exists):
    output = tmp_path / "out"
    if exists:
        output.mkdir()
    outcomes = []

    def other():
        try:
            outcomes.append(convert_checkpoint(source, output, 1))
        except OSError as error:
            outcomes.append(error)

    try:
        outcomes.append(convert_checkpoint(source, output, 4, Interrupted(other)))
    except OSError as error:
        outcomes.append(error)
    (lost,) = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
    (won,) = [outcome for outcome in outcomes if outcome is not lost]
    assert str(output) in str(lost) and "give a new" in str(lost)
    # the folder is the winner's, whole, and nothing of the other's is left
    made = json.loads((output / "config.json").read_text())
    assert made["num_key_value_heads"] == won.heads["num_key_value_heads"][1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == []


def test_a_user_with_a_read_only_home(source, tmp_path):
    """As root, with the privileges dropped that would let it write where permissions say no."""
    home, place = tmp_path / "home", tmp_path / "place"
    home.mkdir(mode=0o555)
    place.mkdir()
    unprivileged = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("as root, this needs the command setpriv")
        unprivileged = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": os.fspath(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.fspath(REPOSITORY)}
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([*unprivileged, "mkdir", home / "cache"], check=True, capture_output=True)
    options = ["--model_name_or_path", source, "--num_key_value_heads", "4", "--output_dir", place / "out"]
    command = [*unprivileged, sys.executable, REPOSITORY / "scripts" / "convert_checkpoint.py", *options]
    result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((place / "out" / "config.json").read_text())["num_key_value_heads"] == 4
    assert list(home.iterdir()) == []
