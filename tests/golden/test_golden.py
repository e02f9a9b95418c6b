"""Saved models give the same outputs when they are loaded again, and saved trainings end with the same weights.

The archives beside this file were made by `benchmarks/versions/golden_artefacts.py`; their manifests say by which
code and on which machine. Whether repositories load by the code inside them is the question of
`benchmarks/versions/transformers_matrix.py`.
"""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fixtures.golden import folders_in, load_expected, machine, outputs, pack, unpack
from fixtures.golden_trainings import COMMAND, WEIGHTS, run_training
from hf_attn_variants.model_history import read_history
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import hf_attn_variants

FOLDER = Path(__file__).parent
MODELS = folders_in(FOLDER / "models.tar.xz")
TRAININGS = list(folders_in(FOLDER / "trainings.tar.xz"))
KINDS = MODELS | {"trainings": TRAININGS}
# What a later version refuses on purpose: "repositories/bert-gqa", "converted/bert-mean" or "trainings/glue", and
# words that its ValueError must have, by which a user knows why and what to do.
REFUSED: dict[str, str] = {}
# Of the largest logit: float32 in another order of summation. Any two mechanisms of a host differ by 1e-2 or more.
TOLERANCE = 1e-5
# Of the largest weight, on another machine than the maker's, where sums are rounded otherwise.
WEIGHTS_TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """The folder of what is in an archive and the machine that made it, by the archive's name; each unpacked once."""
    found = {}

    def folder(name):
        if name not in found:
            place = tmp_path_factory.mktemp(name)
            found[name] = place, unpack(FOLDER / f"{name}.tar.xz", place)
        return found[name]

    return folder


@contextmanager
def maybe_refused(name):
    """Let the body load something, or, where it is on the list, be refused in the words that stand there."""
    if name not in REFUSED:
        yield
        return
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        yield


def check_outputs(folder, name):
    inputs, expected = load_expected(folder)
    with maybe_refused(name):
        architecture = AutoConfig.from_pretrained(folder).architectures[0]
        model_class = getattr(hf_attn_variants, architecture)
        model, info = model_class.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        found = outputs(model.eval(), inputs)
        largest = float(expected["logits"].abs().max())
        torch.testing.assert_close(found["logits"], expected["logits"], atol=TOLERANCE * largest, rtol=0)
        assert found.keys() == expected.keys()
        if "tokens" in expected:
            assert torch.equal(found["tokens"], expected["tokens"])


@pytest.mark.parametrize("name", MODELS["repositories"])
def test_a_repository_gives_what_it_gave(unpacked, name):
    check_outputs(unpacked("models")[0] / "repositories" / name, f"repositories/{name}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS["converted"])
def test_a_converted_folder_gives_what_it_gave_and_tells_how_it_was_made(unpacked, name):
    folder = unpacked("models")[0] / "converted" / name
    check_outputs(folder, f"converted/{name}")
    history = read_history(folder)
    sources = [step["source"] for step in history.steps]
    assert not history.problems and sources == (
        ["bert", "bert-calibrated"] if name == "bert-twice" else [name.split("-")[0]]
    )
    assert all(step["kind"] == "conversion" for step in history.steps)


def test_there_is_an_artefact_of_each_host_and_command(unpacked):
    folder = unpacked("models")[0]
    types = {AutoConfig.from_pretrained(folder / "repositories" / name).model_type for name in MODELS["repositories"]}
    assert len(types) == 13 and len(MODELS["repositories"]) == 397
    commands = {json.loads((unpacked("trainings")[0] / name / COMMAND).read_text())["command"] for name in TRAININGS}
    assert commands == {"glue", "squad", "seq2seq", "ner", "uptrain", "pretrain", "pretrain_t5"}
    assert REFUSED.keys() <= {f"{kind}/{name}" for kind, names in KINDS.items() for name in names}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on_to_the_weights_that_it_ended_with(unpacked, tmp_path, name):
    folder, made_on = unpacked("trainings")
    run = shutil.copytree(folder / name, tmp_path / "run")
    saved = json.loads((run / COMMAND).read_text(encoding="utf-8"))
    with maybe_refused(f"trainings/{name}"):
        results = run_training(run, saved["command"], [*saved["argv"], "--resume_from_checkpoint", "latest"])
        if made_on["rounding"] == machine()["rounding"]:
            assert results["train_loss"] == saved["train_loss"]
            assert (run / "out/model.safetensors").read_bytes() == (run / WEIGHTS).read_bytes()
            return
        found, expected = load_file(run / "out/model.safetensors"), load_file(run / WEIGHTS)
        assert found.keys() == expected.keys()
        largest = max(float(tensor.abs().max()) for tensor in expected.values())
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=WEIGHTS_TOLERANCE * largest, rtol=0, msg=key)


def test_an_archive_gives_back_the_bytes(tmp_path):
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    tensors = {"x": torch.arange(6.0), "y": torch.arange(6.0), "z": torch.tensor(1)}
    save_file(tensors, source / "a/one.safetensors", metadata={"format": "pt"})
    (source / "b.txt").write_text("b")
    pack(source, tmp_path / "packed.tar.xz")
    assert unpack(tmp_path / "packed.tar.xz", tmp_path / "again") == machine()
    for name in ("a/one.safetensors", "b.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()
    assert len(list((tmp_path / "again").rglob("*.*"))) == 2
