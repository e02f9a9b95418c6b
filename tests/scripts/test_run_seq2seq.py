"""Check `scripts/run_seq2seq.py` like a user."""

import json

import pytest
from fixtures.processes import run_processes, run_script
from fixtures.uptraining import make_t5, make_text

from hf_attn_variants.commands.training import seq2seq

main, parse_args = seq2seq.main, seq2seq.parse_args


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, a source file and a target file."""
    folder = tmp_path_factory.mktemp("seq2seq")
    return make_t5(folder / "t5"), *make_text(folder, count=40)


@pytest.mark.thorough
def test_seq2seq_two_processes_train_and_decode_like_one(files, tmp_path):
    model, source, target = files

    def flags(out, batch_size):
        return [
            "--model_name_or_path", model, "--source_file", source, "--target_file", target,
            "--validation_source_file", source, "--validation_target_file", target, "--max_eval_samples", 9,
            "--output_dir", out, "--max_length", 12, "--per_device_train_batch_size", batch_size,
            "--per_device_eval_batch_size", 2, "--gradient_accumulation_steps", 2, "--learning_rate", "1e-2",
            "--max_train_steps", 4, "--logging_steps", 1, "--dropout_rate", 0, "--cpu", "--disable_tqdm",
        ]  # fmt: skip

    def records(out, name):
        return [json.loads(line) for line in (out / name).read_text().splitlines()]

    one, two = tmp_path / "one", tmp_path / "two"
    results = main(parse_args([str(flag) for flag in flags(one, 8)]))
    statuses, printed = run_processes(2, run_script, "run_seq2seq", [str(flag) for flag in flags(two, 4)])
    assert statuses == [0, 0], printed
    losses = [[record["loss"] for record in records(out, "train_log.jsonl") if "loss" in record] for out in (one, two)]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert records(two, "predictions_dev.jsonl") == records(one, "predictions_dev.jsonl")
    two_results = json.loads((two / "all_results.json").read_text())
    assert two_results["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-4)
    assert two_results["eval_decode_tokens"] == results["eval_decode_tokens"]
