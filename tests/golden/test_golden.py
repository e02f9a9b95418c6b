"""Check that saved models give the same outputs after loading, and that saved trainings end with the same weights.

`benchmarks/versions/golden_artefacts.py` made the archives in this folder. Their manifests name the code and the
machine. `benchmarks/versions/transformers_matrix.py` tests whether repositories load with the code that they contain.
"""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fixtures.golden import compute_outputs, describe_machine, list_folders, load_expected, pack, unpack
from fixtures.golden_trainings import COMMAND, WEIGHTS, run_training
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import hf_attn_variants
from hf_attn_variants.model_folder import read_history

FOLDER = Path(__file__).parent
MODELS = list_folders(FOLDER / "models.tar.xz")
TRAININGS = list(list_folders(FOLDER / "trainings.tar.xz"))
KINDS = MODELS | {"trainings": TRAININGS}
# The folders that the current version rejects on purpose, such as "repositories/bert-gqa" or "trainings/glue", and
# words that its ValueError must contain.
REJECTED_FOLDERS: dict[str, str] = {}
# The tolerance relative to the largest logit, because machines order float32 sums differently. Any two mechanisms
# differ by at least 1e-2.
TOLERANCE = 1e-5
# The tolerance relative to the largest weight, on a machine that rounds sums differently.
WEIGHTS_TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """The folder of an archive and the machine that made it, by the archive's name; unpacked once."""
    actual = {}

    def folder(name):
        if name not in actual:
            place = tmp_path_factory.mktemp(name)
            actual[name] = place, unpack(FOLDER / f"{name}.tar.xz", place)
        return actual[name]

    return folder


@contextmanager
def allow_listed_errors(name):
    """Let the body load something, or raise an error that is on the list."""
    if name not in REJECTED_FOLDERS:
        yield
        return
    with pytest.raises(ValueError, match=re.escape(REJECTED_FOLDERS[name])):
        yield


def check_outputs(folder, name):
    inputs, expected = load_expected(folder)
    with allow_listed_errors(name):
        architecture = AutoConfig.from_pretrained(folder).architectures[0]
        model_class = getattr(hf_attn_variants, architecture)
        model, info = model_class.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        actual = compute_outputs(model.eval(), inputs)
        largest = float(expected["logits"].abs().max())
        torch.testing.assert_close(actual["logits"], expected["logits"], atol=TOLERANCE * largest, rtol=0)
        assert actual.keys() == expected.keys()
        if "tokens" in expected:
            assert torch.equal(actual["tokens"], expected["tokens"])


@pytest.mark.parametrize("name", MODELS["repositories"])
def test_saved_repository_gives_the_recorded_outputs(unpacked, name):
    check_outputs(unpacked("models")[0] / "repositories" / name, f"repositories/{name}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS["converted"])
def test_converted_folder_gives_the_recorded_outputs_and_history(unpacked, name):
    folder = unpacked("models")[0] / "converted" / name
    check_outputs(folder, f"converted/{name}")
    history = read_history(folder)
    sources = [step["source"] for step in history.steps]
    assert not history.problems and sources == (
        ["bert", "bert-calibrated"] if name == "bert-twice" else [name.split("-")[0]]
    )
    assert all(step["kind"] == "conversion" for step in history.steps)


def test_every_architecture_and_command_has_an_archive(unpacked):
    folder = unpacked("models")[0]
    types = {AutoConfig.from_pretrained(folder / "repositories" / name).model_type for name in MODELS["repositories"]}
    assert len(types) == 13 and len(MODELS["repositories"]) == 397
    commands = {json.loads((unpacked("trainings")[0] / name / COMMAND).read_text())["command"] for name in TRAININGS}
    assert commands == {"glue", "squad", "seq2seq", "ner", "uptrain", "pretrain", "pretrain_t5"}
    assert REJECTED_FOLDERS.keys() <= {f"{kind}/{name}" for kind, names in KINDS.items() for name in names}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRAININGS)
def test_resumed_training_ends_with_the_recorded_weights(unpacked, tmp_path, name):
    folder, made_on = unpacked("trainings")
    run = shutil.copytree(folder / name, tmp_path / "run")
    saved = json.loads((run / COMMAND).read_text(encoding="utf-8"))
    with allow_listed_errors(f"trainings/{name}"):
        results = run_training(run, saved["command"], [*saved["argv"], "--resume_from_checkpoint", "latest"])
        if made_on["rounding"] == describe_machine()["rounding"]:
            assert results["train_loss"] == saved["train_loss"]
            assert (run / "out/model.safetensors").read_bytes() == (run / WEIGHTS).read_bytes()
            return
        actual, expected = load_file(run / "out/model.safetensors"), load_file(run / WEIGHTS)
        assert actual.keys() == expected.keys()
        largest = max(float(tensor.abs().max()) for tensor in expected.values())
        for key, tensor in expected.items():
            torch.testing.assert_close(actual[key], tensor, atol=WEIGHTS_TOLERANCE * largest, rtol=0, msg=key)


def test_archive_restores_the_same_bytes(tmp_path):
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    tensors = {"x": torch.arange(6.0), "y": torch.arange(6.0), "z": torch.tensor(1)}
    save_file(tensors, source / "a/one.safetensors", metadata={"format": "pt"})
    (source / "b.txt").write_text("b")
    pack(source, tmp_path / "packed.tar.xz")
    assert unpack(tmp_path / "packed.tar.xz", tmp_path / "again") == describe_machine()
    for name in ("a/one.safetensors", "b.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()
    assert len(list((tmp_path / "again").rglob("*.*"))) == 2
