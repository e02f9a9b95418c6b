"""Check two processes on one output folder: one finishes or raises an error, and their files are not mixed."""

import threading

import pytest
from faults.test_kills import convert_to, read_contents, remove_names, train
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.linear_loop import log_without_times
from fixtures.processes import run_processes

from hf_attn_variants import cli
from hf_attn_variants.training.engine import checkpoints
from hf_attn_variants.training.engine.checkpoints import lock_folder


def run_at_once(*calls):
    """Return the exit statuses and outputs of simultaneous calls (a function and its arguments) in new processes."""
    results = [None] * len(calls)

    def run(number):
        results[number] = run_processes(1, *calls[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [statuses[0] for statuses, _ in results], [output for _, output in results]


@pytest.fixture
def bert(tmp_path):
    return make_tiny_bert(tmp_path / "bert")


@pytest.mark.thorough
@pytest.mark.parametrize("exists", [False, True])
def test_simultaneous_conversions_into_one_folder_are_not_mixed(bert, tmp_path, exists):
    convert_to(bert, tmp_path / "whole")
    if exists:
        (tmp_path / "out").mkdir()
    statuses, outputs = run_at_once(*[(convert_to, bert, tmp_path / "out")] * 2)
    # If the folder exists, each process may find files of the other one and raise an error.
    assert sum(status == 0 for status in statuses) in ((0, 1) if exists else (1,)), outputs
    for status, output in zip(statuses, outputs, strict=True):
        assert status == 0 or "FileExistsError" in output.splitlines()[-1], output
    if 0 in statuses:
        result, expected = read_contents(tmp_path / "out"), read_contents(tmp_path / "whole")
        assert remove_names(result, tmp_path / "out") == remove_names(expected, tmp_path / "whole")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_simultaneous_trainings_into_one_folder_are_not_mixed(bert, tmp_path):
    train(bert, tmp_path / "whole")
    statuses, outputs = run_at_once(*[(train, bert, tmp_path / "out")] * 2)
    assert sorted(statuses) == [0, 1], outputs
    refused = outputs[statuses.index(1)].splitlines()[-1]
    assert "is not empty" in refused or "is in use" in refused, refused
    assert log_without_times(tmp_path / "out") == log_without_times(tmp_path / "whole")
    result, expected = read_contents(tmp_path / "out"), read_contents(tmp_path / "whole")
    assert result.keys() == expected.keys() and result["model.safetensors"] == expected["model.safetensors"]


def test_folder_lock_has_one_owner(tmp_path):
    with lock_folder(str(tmp_path)) as waited:
        assert not waited
        with pytest.raises(ValueError, match=r"--output_dir .* is in use"), lock_folder(str(tmp_path), 0):
            pass
    with lock_folder(str(tmp_path), 0) as waited:
        assert not waited
    assert list(tmp_path.iterdir()) == []


def test_released_folder_lock_goes_to_the_next_process(tmp_path):
    is_held, let_go = threading.Event(), threading.Event()

    def first():
        with lock_folder(str(tmp_path)):
            is_held.set()
            let_go.wait()

    thread = threading.Thread(target=first)
    thread.start()
    is_held.wait()
    threading.Timer(0.3, let_go.set).start()
    with lock_folder(str(tmp_path), 20) as waited:
        assert waited
    thread.join()


TRAININGS = {
    "classify": ("--train_file", "t.csv"),
    "glue": ("--task_name", "stsb", "--data_dir", "."),
    "ner": ("--train_file", "t.conll", "--validation_file", "t.conll"),
    "pretrain": ("--train_file", "t.txt", "--max_train_steps", "1"),
    "pretrain-t5": ("--train_file", "t.txt", "--max_train_steps", "1"),
    "seq2seq": ("--train_file", "t.csv"),
    "squad": ("--train_file", "t.json", "--validation_file", "t.json"),
    "uptrain": ("--train_file", "t.txt", "--objective", "mlm"),
}


@pytest.mark.parametrize("command", TRAININGS)
@pytest.mark.parametrize("resumes", [False, True])
def test_training_into_a_locked_folder_raises_an_error(bert, tmp_path, monkeypatch, capfd, command, resumes):
    monkeypatch.setattr(checkpoints, "WAIT_SECONDS", 0.0)
    out = tmp_path / "out"
    (out / "checkpoint-1").mkdir(parents=True)
    (out / "checkpoint-1" / "train_state.json").write_text("{}")
    before = sorted(out.rglob("*"))
    flags = ("--resume_from_checkpoint", "latest") if resumes else ("--overwrite_output_dir",)
    argv = [command, "--model_name_or_path", str(bert), "--output_dir", str(out), "--cpu", *TRAININGS[command], *flags]
    with lock_folder(str(out)):
        assert cli.main(argv) == 2
    assert f"error: --output_dir {out} is in use" in capfd.readouterr().err
    assert sorted(out.rglob("*")) == before
