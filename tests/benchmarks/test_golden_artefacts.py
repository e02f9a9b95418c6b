"""Check the script that makes tests/golden's archives: the mechanisms per architecture, and the archives."""

import argparse

import pytest
from fixtures import golden_conversions, golden_repositories, golden_trainings
from fixtures.golden import list_folders, load_expected, unpack

from benchmarks.versions import golden_artefacts

PAIRS = [
    (architecture, mechanism)
    for architecture in golden_repositories.ARCHITECTURE_HEADS
    for mechanism in golden_repositories.MECHANISMS
]


@pytest.mark.parametrize(
    ("architecture", "mechanism"),
    [pair for pair in PAIRS if not golden_repositories.supports_mechanism(*pair)],
    ids=str,
)
def test_skipped_mechanisms_are_unsupported_by_the_architecture(architecture, mechanism):
    row, head = golden_repositories.ARCHITECTURE_HEADS[architecture]
    with pytest.raises(ValueError, match=r"only supported for|is not supported|must|cannot be"):
        row.make_config(head=head, **golden_repositories.get_mechanism_fields(architecture, mechanism))


@pytest.mark.thorough
def test_golden_archives_are_made(monkeypatch, tmp_path):
    monkeypatch.setattr(
        golden_repositories, "ARCHITECTURE_HEADS", {"bart": golden_repositories.ARCHITECTURE_HEADS["bart"]}
    )
    monkeypatch.setattr(golden_repositories, "MECHANISMS", {"gqa": {"num_key_value_heads": 4}})
    monkeypatch.setattr(golden_conversions, "CONVERSIONS", {"t5-mean": golden_conversions.CONVERSIONS["t5-mean"]})
    monkeypatch.setattr(golden_trainings, "TRAININGS", {"ner": golden_trainings.TRAININGS["ner"]})
    out = tmp_path / "out"
    golden_artefacts.main(
        argparse.Namespace(parts=["models", "trainings"], output_dir=out, work_dir=tmp_path / "work")
    )
    assert list_folders(out / "models.tar.xz") == {"converted": ["t5-mean"], "repositories": ["bart-gqa"]}
    unpack(out / "models.tar.xz", tmp_path / "models")
    inputs, expected = load_expected(tmp_path / "models/repositories/bart-gqa")
    assert inputs.keys() == {"input_ids", "attention_mask", "decoder_input_ids"}
    assert expected["logits"].shape == (3, 9, 9) and expected["tokens"].shape == (3, 7)
    assert (tmp_path / "models/repositories/bart-gqa/modeling_attn_variant_bart.py").is_file()
    assert list_folders(out / "trainings.tar.xz") == {"ner": ["model", "out"]}
    with pytest.raises(ValueError, match="bytes, but at most 9 are allowed"):
        monkeypatch.setattr(golden_artefacts, "MOST_BYTES", 9)
        golden_artefacts.main(argparse.Namespace(parts=["trainings"], output_dir=out, work_dir=tmp_path / "work"))
