"""`scripts/run_glue.py` as a user starts it."""

import json
import shutil

import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.processes import run_processes, run_script

from hf_attn_variants.commands.training import glue

main, parse_args = glue.main, glue.parse_args


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    return make_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


def test_help_ends_with_an_example(capsys):
    with pytest.raises(SystemExit) as done:
        parse_args(["--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0 and "--resume_from_checkpoint PATH|latest" in shown
    assert "python scripts/run_glue.py ./minilm-gqa4 --task_name stsb" in shown.split("\nexample")[1]


@pytest.mark.thorough
def test_user_error_is_one_line_and_status_2(tmp_path):
    argv = [
        "--model_name_or_path",
        tmp_path / "none",
        "--task_name",
        "cola",
        "--data_dir",
        FIXTURES / "CoLA",
        "--output_dir",
        tmp_path / "out",
        "--cpu",
    ]  # fmt: skip
    statuses, printed = run_processes(1, run_script, "run_glue", [str(part) for part in argv])
    assert statuses == [2] and "Traceback" not in printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and printed.splitlines()[-1] == errors[0] and "none" in errors[0]


def test_a_damaged_checkpoint_is_one_line_and_status_2(tiny_bert, tmp_path):
    damaged = shutil.copytree(tiny_bert, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:500])
    argv = [
        "--model_name_or_path", damaged, "--task_name", "cola", "--data_dir", FIXTURES / "CoLA",
        "--output_dir", tmp_path / "out", "--max_length", 48, "--cpu",
    ]  # fmt: skip
    statuses, printed = run_processes(1, run_script, "run_glue", [str(part) for part in argv])
    assert statuses == [2] and "Traceback" not in printed
    assert printed.splitlines()[-1].startswith(f"error: {damaged}: SafetensorError: ")


@pytest.mark.thorough
def test_two_processes_train_like_one_with_the_batch_doubled(tiny_bert, tmp_path):
    def flags(out, batch_size):
        return [
            "--model_name_or_path", tiny_bert, "--task_name", "stsb", "--data_dir", FIXTURES / "STS-B",
            "--output_dir", out,
            "--max_length", 48, "--per_device_train_batch_size", batch_size, "--per_device_eval_batch_size", 3,
            "--gradient_accumulation_steps", 2, "--learning_rate", "1e-3", "--logging_steps", 1,
            "--num_train_epochs", 2,
            "--dropout_rate", 0, "--checkpointing_steps", "epoch", "--cpu", "--disable_tqdm",
        ]  # fmt: skip

    def losses(out):
        records = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
        return [value for record in records for key, value in record.items() if key in ("loss", "eval_loss")]

    one, two = tmp_path / "one", tmp_path / "two"
    main(parse_args([str(flag) for flag in flags(one, 8)]))
    statuses, printed = run_processes(2, run_script, "run_glue", [str(flag) for flag in flags(two, 4)])
    assert statuses == [0, 0], printed
    assert printed.count("STS-B dev") == 1
    assert len(losses(one)) == 4 + 2 and losses(two) == pytest.approx(losses(one), rel=1e-4)
    for name in ("predictions_STS-B.tsv", "predictions_dev_STS-B.tsv"):
        rows = [[float(cell) for cell in line.split("\t")] for line in (two / name).read_text().splitlines()[1:]]
        expected = [[float(cell) for cell in line.split("\t")] for line in (one / name).read_text().splitlines()[1:]]
        assert [row[0] for row in rows] == [row[0] for row in expected]
        assert [row[1] for row in rows] == pytest.approx([row[1] for row in expected], abs=0.002)
    assert (two / "checkpoint-4/random_states_1.pkl").is_file()
