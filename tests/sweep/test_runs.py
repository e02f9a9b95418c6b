"""Check tiny sweeps from the file to the table and the plot: runs, skipped runs, and failures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.kills import draw_points

from hf_attn_variants import cli
from hf_attn_variants.sweep import runner
from hf_attn_variants.sweep.runner import format_markdown, plot_sweep
from hf_attn_variants.training.engine import checkpoints

# These values differ between runs.
TIMES = ("runtime", "per_second", "date", "arguments")


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
    """A file with a conversion, a training of six steps with checkpoints, and two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    flags = {"task_name": "stsb", "data_dir": str(FIXTURES / "STS-B"), "max_length": 16}
    flags |= {"per_device_train_batch_size": 4, "learning_rate": "1e-3", "max_train_steps": 6}
    flags |= {"checkpointing_steps": 2, "save_total_limit": 1, "cpu": True}
    content = {
        "title": "tiny",
        "command": "glue",
        "seeds": [0, 1],
        "metrics": ["eval_pearson", "eval_loss"],
        "convert": {"model_name_or_path": str(make_tiny_bert(folder / "bert"))},
        "flags": flags,
        "variants": {"multi-head": {"convert": None}, "grouped": {"convert": {"num_key_value_heads": 2}}},
    }
    (folder / "tiny.json").write_text(json.dumps(content))
    return folder / "tiny.json"


def change(path, **changed):
    other = path.with_name(f"changed-{len(list(path.parent.iterdir()))}.json")
    other.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return other


def run(path, out, *more):
    return cli.main(["sweep", str(path), "--output_dir", str(out), "--disable_tqdm", *more])


def read_results_without_times(out):
    """Return all results of a sweep without times."""
    result = json.loads((out / "sweep_results.json").read_text())

    def without_times(value):
        if isinstance(value, dict):
            return {key: without_times(item) for key, item in value.items() if not key.endswith(TIMES)}
        return value

    table = [line.split("|") for line in (out / "sweep_results.md").read_text().splitlines() if line.startswith("| ")]
    return [without_times(item) for item in result["contestants"]], [cells[:-3] + cells[-2:] for cells in table]


@pytest.fixture(scope="module")
def undisturbed(sweep_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run(sweep_file, out) == 0
    return out


@pytest.mark.thorough
def test_sweep_runs_from_file_to_table_and_plot(undisturbed, sweep_file, capsys):
    contestants, table = read_results_without_times(undisturbed)
    assert [item["name"] for item in contestants] == ["multi-head", "grouped"]
    assert all(item["seeds"] == [0, 1] and set(item["runs"]) == {"0", "1"} for item in contestants)
    # All numbers equal those in the files of the trainings, and the spread is computed from them.
    for name, item in zip(("multi-head", "grouped"), contestants, strict=True):
        sweep_rows = [
            json.loads((undisturbed / f"runs/{name}/seed-{seed}/trained/all_results.json").read_text())
            for seed in (0, 1)
        ]
        for metric in ("eval_pearson", "eval_loss", "num_parameters"):
            values = [results[metric] for results in sweep_rows]
            assert [item["runs"][str(seed)][metric] for seed in (0, 1)] == values
            spread = item["spread"][metric]
            assert spread["mean"] == pytest.approx(sum(values) / 2, rel=1e-12)
            assert (spread["min"], spread["max"]) == (min(values), max(values))
        assert sweep_rows[0]["eval_loss"] != sweep_rows[1]["eval_loss"] and sweep_rows[0]["seed"] == 0
        assert sweep_rows[1]["seed"] == 1
    assert table[0][1:3] == [" variant ", " pearson "] and table[2][1] == " multi-head "
    assert table[2][-2] == " 2 of 2 " and " to " in table[2][2]
    grouped = undisturbed / "runs/grouped/seed-1"
    assert json.loads((grouped / "trained/config.json").read_text())["num_key_value_heads"] == 2
    assert (undisturbed / "sweep_results.png").read_bytes().startswith(b"\x89PNG")
    assert "$ " in (grouped / "output.log").read_text()


@pytest.mark.thorough
def test_finished_sweep_only_runs_new_runs(undisturbed, sweep_file, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("output.log")}
    shutil.rmtree(out / "runs/grouped/seed-0/trained")  # the record still has the results
    other = change(sweep_file, metrics=["eval_spearmanr"])
    assert run(other, out) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("output.log")} == before
    assert "spearmanr" in (out / "sweep_results.md").read_text()
    # Another flag would make a different run from the existing one.
    flags = json.loads(sweep_file.read_text())["flags"]
    capsys.readouterr()
    assert run(change(sweep_file, flags=flags | {"learning_rate": "2e-3"}), out) == 2
    error = capsys.readouterr().err
    assert "a run with other flags" in error and "2e-3" in error and "multi-head/seed-0" in error
    assert run(change(sweep_file, metrics=["eval_pearsn"]), out) == 0
    assert "No run reports eval_pearsn. The available metrics are eval_" in capsys.readouterr().out


@pytest.mark.thorough
def test_failed_run_does_not_affect_other_runs(undisturbed, sweep_file, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    variants = json.loads(sweep_file.read_text())["variants"]
    wrong = change(sweep_file, seeds=[0], variants={"long": {"convert": None, "max_length": 4096}, **variants})
    assert run(wrong, out) == 2
    printed = capsys.readouterr()
    assert "long, seed 0 (status 2: " in printed.err and "4096" in printed.err
    assert "output.log" in printed.err and printed.err.count("\n") == 1
    table = (out / "sweep_results.md").read_text()
    assert "| long |" in table and "0 of 1" in table and table.count("1 of 1") == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"num_key_value_heads": 3}, "`num_key_value_heads` must divide"),
        ({"kv_cache_bytes": [512, 512]}, "`kv_cache_bytes` is only supported for encoder-decoders"),
        ({"num_key_value_heads": 2, "calibration_file": "TEXTS", "calibration_columns": ["texts"]}, "'texts'"),
        ({"num_key_value_heads": 2, "calibration_size": 10}, "--calibration_size requires --calibration_file"),
        ({"num_key_value_heads": 2, "method": "calibrated"}, "needs "),
        ({"num_key_value_heads": 2, "keep_matching_layers": 1}, "Set `calibration` (--calibration_file)"),
        ({"cross_kv_lora_rank": 8}, "`cross_kv_lora_rank` is not a field of "),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, dict) else "",
)
def test_impossible_conversion_raises_before_any_run(flags, message, sweep_file, tmp_path, capsys):
    texts = tmp_path / "texts.csv"
    texts.write_text("text\n" + "the cat sees the dog\n" * 20)
    flags = {name: str(texts) if value == "TEXTS" else value for name, value in flags.items()}
    variants = {"fine": {"convert": {"num_key_value_heads": 2}}, "wrong": {"convert": flags}}
    wrong = change(sweep_file, variants=variants)
    assert run(wrong, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "'wrong': " in error and message in error and error.count("\n") == 1
    assert not (tmp_path / "out/runs").exists()


@pytest.mark.thorough
def test_finished_conversion_does_not_need_its_source(undisturbed, sweep_file, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    gone = json.loads(sweep_file.read_text())["convert"] | {"model_name_or_path": str(tmp_path / "gone")}
    for record in out.glob("runs/*/*/run.json"):
        stored = json.loads(record.read_text())
        for name in ("train", "convert"):
            stored[name] = stored[name] and [gone["model_name_or_path"] if "/bert" in w else w for w in stored[name]]
        if (record.parent / "converted").is_dir():
            stored["results"] = None
            shutil.rmtree(record.parent / "trained")
        record.write_text(json.dumps(stored))
    assert run(change(sweep_file, convert=gone, seeds=[0]), out) == 0, capsys.readouterr().err


def test_folder_of_another_program_raises_an_error(sweep_file, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert run(sweep_file, tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err and [*tmp_path.iterdir()] == [tmp_path / "thesis.txt"]


def start(path, out):
    command = [sys.executable, "-m", "attn_variants", "sweep", str(path), "--output_dir", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill_all(process):
    """Kill a sweep and its runs at once, like a power failure."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()
    psutil.wait_procs(children)


def wait_for(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_sweep_ends_with_the_same_table(undisturbed, sweep_file, tmp_path, count):
    """Kill one sweep repeatedly after random seconds of its work; one seed by default."""
    out, kills = tmp_path / "out", 0
    path = sweep_file if count > 1 else change(sweep_file, seeds=[0])
    for seconds in draw_points(1, 12.0, 2 * count, f"sweep {count}")[1::2]:
        process = start(path, out)
        wait_for(lambda: (out / "runs").is_dir(), process)
        try:
            process.wait(timeout=seconds)
            break  # the sweep has finished
        except subprocess.TimeoutExpired:
            kill_all(process)
            kills += 1
    assert kills
    assert run(path, out) == 0
    if count == 1:
        path = change(sweep_file, seeds=[0])
        shutil.copytree(undisturbed, tmp_path / "expected")
        assert run(path, tmp_path / "expected") == 0  # only writes the table of the finished runs
        undisturbed = tmp_path / "expected"
    assert read_results_without_times(out) == read_results_without_times(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_training_with_a_checkpoint(undisturbed, sweep_file, tmp_path, number):
    out = tmp_path / "out"
    process = start(sweep_file, out)
    first = out / "runs/multi-head/seed-0/trained"
    wait_for(lambda: (first / "train_log.jsonl").is_file() or [*first.glob("checkpoint-*")], process)
    os.kill(process.pid, number)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number, error
    assert "stopped by" in error
    assert not psutil.pid_exists(process.pid)
    assert run(sweep_file, out) == 0
    assert read_results_without_times(out) == read_results_without_times(undisturbed)


@pytest.mark.thorough
def test_simultaneous_calls_share_the_runs(undisturbed, sweep_file, tmp_path):
    """Check that each run is executed by one call, and that the table equals that of one call."""
    out = tmp_path / "out"
    calls = [start(sweep_file, out) for _ in range(3)]
    errors = [call.communicate(timeout=600)[1] for call in calls]
    assert [call.returncode for call in calls] == [0, 0, 0], errors
    logs = [path.read_text() for path in out.glob("runs/*/*/output.log")]
    assert len(logs) == 4 and all(log.count(" glue ") == 1 for log in logs)
    assert read_results_without_times(out) == read_results_without_times(undisturbed)


@pytest.fixture
def half_done(undisturbed, tmp_path, monkeypatch):
    """A sweep without its last run, with a lock timeout of zero."""
    monkeypatch.setattr(checkpoints, "WAIT_SECONDS", 0.0)
    shutil.copytree(undisturbed, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/runs/grouped/seed-1")
    return tmp_path / "out"


def test_run_that_another_call_finishes_is_not_run_again(half_done, undisturbed, sweep_file, monkeypatch):
    """Check a run that ends after this call has read the records and before the run would start."""

    def finish_elsewhere(*args):
        shutil.copytree(undisturbed / "runs/grouped/seed-1", half_done / "runs/grouped/seed-1")

    monkeypatch.setattr("hf_attn_variants.commands.sweep._check_models", finish_elsewhere)
    monkeypatch.setattr(runner, "_run_command", None)  # no command is started
    assert run(sweep_file, half_done) == 0
    assert "2 of 2" in (half_done / "sweep_results.md").read_text().splitlines()[-1]


@pytest.mark.slow
def test_sweep_uses_accelerate_launch(sweep_file, tmp_path):
    root = Path(__file__).resolve().parents[2]
    launch = ["accelerate", "launch", "--config_file", str(root / "accelerate_configs/cpu.yaml")]
    out = tmp_path / "out"
    assert run(change(sweep_file, launch=launch, seeds=[0]), out) == 0
    log = (out / "runs/grouped/seed-0/output.log").read_text()
    assert "accelerate launch --config_file" in log
    # Each of the two processes of the configuration saved its random states.
    states = [*(out / "runs/grouped/seed-0/trained").glob("checkpoint-*/random_states_*.pkl")]
    assert len(states) == 2


def make_results(points, **more):
    """Return the results of a sweep: (variant, point, loss) of each contestant, with two seeds."""
    contestants = [
        {
            "name": variant,
            "variant": variant,
            "point": point,
            "seeds": [0, 1],
            "spread": {"eval_loss": {"mean": loss + 0.05, "min": loss, "max": loss + 0.1}},
            "runs": {"0": {"eval_loss": loss}, "1": {"eval_loss": loss + 0.1}},
        }
        for variant, point, loss in points
    ]
    result = {"title": "costs $ and $", "command": "uptrain", "metrics": ["eval_loss"], "curve": None}
    return result | {"contestants": contestants} | more


def test_plot_has_curves_for_numbers_and_bars_for_names():
    points = [("a", {"alpha": 0.1}, 1.0), ("a", {"alpha": 0.01}, 2.0), ("b", {"alpha": 0.01}, 3.0), ("r", {}, 4.0)]
    [axes] = plot_sweep(make_results(points, curve="alpha")).axes
    curves = {line.get_label(): line for line in axes.containers}
    assert [*curves] == ["a", "b"] and axes.get_xlabel() == "alpha"
    line = curves["a"].lines[0]
    assert list(line.get_xdata()) == [0.01, 0.1] and list(line.get_ydata()) == pytest.approx([2.05, 1.05])
    low, high = (segment[:, 1] for segment in curves["a"].lines[2][0].get_segments())
    assert sorted(low) == pytest.approx([2.0, 2.1]) and sorted(high) == pytest.approx([1.0, 1.1])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["r", "a", "b"]
    left, right = plot_sweep(make_results([("a", {}, 1.0)], metrics=["eval_loss", "eval_bleu"])).axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["a"] and right.get_ylabel() == "bleu"


def test_models_that_ignore_their_context_are_named():
    result = make_results([("a", {}, 1.0), ("b", {}, 2.0)])
    assert format_markdown(result).endswith("|\n")
    for item, passed in zip(result["contestants"], (True, False), strict=True):
        item["runs"]["0"]["gate_passed"] = passed
    warning = format_markdown(result).partition("|\n\n")[2]
    assert warning.startswith("Not trained long enough to compare their attention: b. ") and warning.count("\n") == 1
