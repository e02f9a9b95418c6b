"""Check `scripts/run_squad.py` like a user."""

import json

import pytest
from fixtures.processes import run_processes, run_script
from fixtures.squad import make_reader, write_questions

from hf_attn_variants.commands.training import squad

main, parse_args = squad.main, squad.parse_args


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_reader("bert", tmp_path_factory.mktemp("bert") / "mha")


def test_squad_two_processes_train_and_predict_like_one(model, tmp_path):
    file = write_questions(tmp_path / "dev.json", version_2=True)

    def flags(out, batch_size):
        return [
            "--model_name_or_path", model, "--train_file", file, "--validation_file", file,
            "--version_2_with_negative", "--max_length", 24, "--max_query_length", 8, "--doc_stride", 4,
            "--output_dir", out,
            "--per_device_train_batch_size", batch_size, "--per_device_eval_batch_size", 2, "--max_train_steps", 3,
            "--learning_rate", "1e-3", "--logging_steps", 1, "--dropout_rate", 0, "--cpu", "--disable_tqdm",
        ]  # fmt: skip

    one, two = tmp_path / "one", tmp_path / "two"
    results = main(parse_args([str(flag) for flag in flags(one, 4)]))
    statuses, printed = run_processes(2, run_script, "run_squad", [str(flag) for flag in flags(two, 2)])
    assert statuses == [0, 0], printed
    assert printed.count("SQuAD v2.0 dev (7 questions") == 1
    two_results = json.loads((two / "all_results.json").read_text())
    assert two_results["train_loss"] == pytest.approx(results["train_loss"], rel=1e-4)
    assert two_results["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-4)
    for name in ("predictions_dev.json", "predictions_nbest_dev.json"):
        result, expected = (json.loads((out / name).read_text()) for out in (two, one))
        assert list(result) == list(expected)
    assert json.loads((two / "predictions_dev.json").read_text()) == json.loads(
        (one / "predictions_dev.json").read_text()
    )
