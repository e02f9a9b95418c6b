"""Check an installation without extras: everything except training works, and training commands name their extra."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from configparser import ConfigParser
from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import make_tiny_bert

from hf_attn_variants.cli import TRAIN_EXTRA_COMMANDS, TRAIN_PACKAGES

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import json
import os
import sys
from hf_attn_variants import cli

source, out = sys.argv[1:]
commands = {
    "inspect": [source],
    "convert": [source, "--num_key_value_heads", "2", "--output_dir", f"{out}/gqa", "--disable_tqdm"],
    "visualize": ["--model_name_or_path", f"{out}/gqa", "--text", "The cats.", "--output_dir", f"{out}/maps"],
    "export": [f"{out}/gqa", "--to", "transformers", "--output_dir", f"{out}/plain"],
    "benchmark": [f"{out}/t5", "--num_key_value_heads", "2", "--length", "8", "--rounds", "1", "--threads", "1"],
    "frontier": [
        source, "--num_key_value_heads", "2", "--kv_lora_rank", "8", "--calibration_file", f"{out}/text.txt",
        "--calibration_size", "32", "--held_out_size", "16", "--fit_steps", "0", "--output_dir", f"{out}/frontier",
    ],
    "push": [f"{out}/gqa", "--repo_id", "me/gqa", "--dry_run"],
    "refresh": [f"{out}/gqa", "--output_dir", f"{out}/refreshed"],
}
with open(f"{out}/text.txt", "w") as file:
    file.writelines(f"the cats sit on {place} and {place}\\n" for place in range(100))
t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 60, "num_layers": 1}
os.mkdir(f"{out}/t5")
with open(f"{out}/t5/config.json", "w") as file:
    json.dump(t5 | {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}, file)
for name, argv in commands.items():
    assert cli.main([name, *argv]) == 0, name
assert os.listdir(f"{out}/frontier") == ["frontier.json"]
assert not {"datasets", "matplotlib", "scipy", "sklearn", "evaluate"} & set(sys.modules)
"""

ASK = """
import json, sys
from hf_attn_variants import cli

found = {}
for command in sys.argv[1:]:
    try:
        status = cli.main([command, "--help"])
    except SystemExit as ended:
        status = ended.code
    try:
        cli._check_train_extra(command)
    except Exception as error:
        found[command] = (status, str(error))
assert not {"datasets", "matplotlib", "scipy", "sklearn", "evaluate"} & set(sys.modules)
print(json.dumps(found))
"""


def read_setup_cfg():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def get_package_names(lines):
    return {re.split(r"[<>=\\[ ]", line)[0] for line in lines.strip().splitlines() if not line.startswith("#")}


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """An environment without the packages of extras, made of links to all other packages."""
    extras = read_setup_cfg()["options.extras_require"]
    gone = set().union(*(get_package_names(item) for item in extras.values())) - {
        "hf_attn_variants",
        "setuptools",
        "torchao",
    }
    hidden = {name for name, dists in importlib.metadata.packages_distributions().items() if gone & set(dists)}
    hidden |= {f"{name.replace('-', '_')}-" for name in gone}
    site = tmp_path_factory.mktemp("serving")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        is_info = path.suffix == ".dist-info" and any(path.name.startswith(item) for item in hidden if item[-1] == "-")
        if path.name not in hidden and path.stem not in hidden and not is_info and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))), "OMP_NUM_THREADS": "1"}


def run(environment, *argv):
    command = [sys.executable, "-S", *map(str, argv)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.thorough
def test_commands_except_training_work_without_extras(serving, tmp_path):
    done = run(serving, "-c", RUN, make_tiny_bert(tmp_path / "bert"), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.thorough
def test_training_commands_name_their_missing_extra(serving):
    """Check all commands in one process, because none imports what another one needs."""
    commands = sorted(TRAIN_EXTRA_COMMANDS)
    done = run(serving, "-c", ASK, *commands)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [*result] == commands and len(commands) > 8
    for command, (status, printed) in result.items():
        assert status == 0
        assert f"`{command}` requires datasets, evaluate, matplotlib, scipy, scikit-learn" in printed


def test_setup_cfg_lists_the_required_packages():
    parser = read_setup_cfg()
    extras = parser["options.extras_require"]
    assert get_package_names(extras["train"]) == {*TRAIN_PACKAGES.values(), "seqeval", "tensorboard"}
    for name in ("seq2seq", "uptraining", "demo", "test"):
        assert "hf_attn_variants" in get_package_names(extras[name])
    assert not get_package_names(extras["train"]) & get_package_names(parser["options"]["install_requires"])
