"""Check scripts in shared environments: two conversions into one folder, and a user with few write permissions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import BERT
from fixtures.data_files import write_lines
from fixtures.glue.tiny_bert import make_tiny_bert

from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.attention_tensors import MeanPooling

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


class Interrupted(MeanPooling):
    """A mean-pooling method during which another conversion into the same folder runs completely."""

    def __init__(self, other):
        self.other = other

    def pool(self, *args, **kwargs):
        if self.other is not None:
            other, self.other = self.other, None
            other()
        return super().pool(*args, **kwargs)


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "empty folder"])
def test_second_conversion_into_the_same_folder_raises_an_error(source, tmp_path, exists):
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
    assert str(output) in str(lost) and "Choose a new" in str(lost)
    # The folder contains the complete result of one conversion, and no files of the other one.
    config = json.loads((output / "config.json").read_text())
    assert config["num_key_value_heads"] == won.heads["num_key_value_heads"][1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == []


@pytest.fixture
def run_with_a_read_only_home(tmp_path):
    """Run a script as root, without the privileges that ignore file permissions."""
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

    def call(script, *options, **variables):
        command = [*unprivileged, sys.executable, REPOSITORY / "scripts" / script, *options]
        command += ["--output_dir", place / "out"]
        result = subprocess.run(
            [str(part) for part in command],
            cwd=place,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert list(home.iterdir()) == []
        return place / "out"

    return call


@pytest.mark.thorough
def test_conversion_works_with_a_read_only_home(source, run_with_a_read_only_home):
    out = run_with_a_read_only_home(
        "convert_checkpoint.py", "--model_name_or_path", source, "--num_key_value_heads", 4
    )
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    "elsewhere", [pytest.param(False, id="no cache"), pytest.param(True, id="cache elsewhere", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_pretraining_works_with_a_read_only_home(run_with_a_read_only_home, tmp_path, elsewhere):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    write_lines(data / "train.jsonl", [{"text": "a good film " * 50}])
    flags = ["--dataset_name", data, "--model_type", "bert", "--tokenizer_name", make_tiny_bert(tmp_path / "tiny")]
    flags += ["--config_overrides", "hidden_size=8,num_hidden_layers=1,num_attention_heads=2", "--max_length", 16]
    flags += ["--max_train_steps", 1, "--per_device_train_batch_size", 2, "--cpu", "--disable_tqdm"]
    variables = {"HF_DATASETS_CACHE": str(cache)} if elsewhere else {}
    out = run_with_a_read_only_home("pretrain_mlm.py", *flags, **variables)
    assert json.loads((out / "all_results.json").read_text())["steps"] == 1
    assert cache.is_dir() == elsewhere
