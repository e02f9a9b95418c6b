"""Check `scripts/run_glue.py` like a user."""

import json

import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.processes import run_processes, run_script

from hf_attn_variants.commands.training import glue

main, parse_args = glue.main, glue.parse_args


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    return make_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.mark.thorough
def test_glue_two_processes_equal_one_process_with_a_double_batch(tiny_bert, tmp_path):
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
