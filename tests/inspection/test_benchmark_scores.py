"""Check `attn-variants average`: scores by GLUE's rules, over seeds, and the errors."""

import json
import statistics

import pytest
from fixtures.commands import run_command

from hf_attn_variants import cli
from hf_attn_variants.commands import average as command

GLUE = "cola sst2 mrpc stsb qqp mnli qnli rte wnli".split()


@pytest.fixture
def write(tmp_path):
    def call(name, task, seed=1, model="./bert", dataset=None, arguments=None, data_hashes=None, **scores):
        folder = tmp_path / name
        folder.mkdir()
        results = {f"eval_{key}": value for key, value in scores.items()} | {"task_name": task, "seed": seed}
        results |= {"dataset": dataset} if dataset else {}
        results |= {"data_hashes": data_hashes} if data_hashes else {}
        results["arguments"] = {"model_name_or_path": model, "max_eval_samples": None, **(arguments or {})}
        (folder / "all_results.json").write_text(json.dumps(results))
        return folder

    return call


def average(*folders, output_file=None):
    flags = [] if output_file is None else ["--output_file", output_file]
    return run_command(command, *folders, *flags)


def test_glue_average_first_averages_the_metrics_of_a_task(write, capsys):
    scores = {
        "cola": {"matthews_correlation": 0.5},
        "stsb": {"pearson": 0.8, "spearmanr": 0.7, "combined_score": 0.75},
        "mrpc": {"accuracy": 0.9, "f1": 0.8, "combined_score": 0.85},
        "qqp": {"accuracy": 0.9, "f1": 0.7},
        "mnli": {"accuracy": 0.8, "accuracy_mm": 0.9},
    }
    folders = [write(task, task, **scores.get(task, {"accuracy": 0.6})) for task in GLUE]
    [result] = average(*folders)["glue"]
    expected = (0.5 + 0.75 + 0.85 + 0.8 + 0.85 + 4 * 0.6) / 9
    assert result["average"] == {"mean": pytest.approx(expected), "deviation": None, "seeds": [1]}
    assert not result["missing"] and list(result["tasks"]) == GLUE
    printed = capsys.readouterr().out
    assert f"{100 * expected:.1f}\n" in printed and "±" not in printed and " of 9" not in printed


def test_models_have_rows_with_mean_and_spread_over_seeds(write, tmp_path, capsys):
    names = {"mrpc": ("accuracy", "f1"), "stsb": ("pearson", "spearmanr")}
    values = {(task, seed): (seed / 10, seed / 20) for task in names for seed in (1, 2, 3)}
    folders = [
        write(f"{task}{seed}", task, seed, "./bert", **dict(zip(names[task], pair, strict=True)))
        for (task, seed), pair in values.items()
    ]
    folders.append(write("other", "mrpc", 1, "a/b", accuracy=0.9, f1=0.9))
    result = average(*folders, output_file=tmp_path / "scores.json")
    first, second = result["glue"]
    by_seed = [statistics.fmean(values["mrpc", seed]) for seed in (1, 2, 3)]
    assert first["tasks"]["mrpc"]["mean"] == pytest.approx(statistics.fmean(by_seed))
    assert first["tasks"]["mrpc"]["deviation"] == pytest.approx(statistics.stdev(by_seed))
    assert first["tasks"]["mrpc"]["seeds"] == {
        seed: pytest.approx(item) for seed, item in zip((1, 2, 3), by_seed, strict=True)
    }
    assert first["average"]["deviation"] == pytest.approx(statistics.stdev(by_seed))
    assert (first["model"], second["model"]) == ("./bert", "a/b") and "cola" in first["missing"]
    assert json.loads((tmp_path / "scores.json").read_text())["glue"][1]["average"]["mean"] == pytest.approx(0.9)
    printed = capsys.readouterr().out
    assert "15.0 ± 7.5" in printed and "(2 of 9)" in printed and "90.0 (1 of 9)" in printed
    assert "same tasks" in " ".join(printed.split())


def test_spread_of_the_average_uses_seeds_common_to_all_tasks(write):
    folders = [write(f"rte{seed}", "rte", seed, accuracy=seed / 10) for seed in (1, 2, 3)]
    folders += [write(f"wnli{seed}", "wnli", seed, accuracy=0.5) for seed in (2, 3, 4)]
    [result] = average(*folders)["glue"]
    assert result["average"]["mean"] == pytest.approx((0.2 + 0.5) / 2) and result["average"]["seeds"] == [2, 3]
    assert result["average"]["deviation"] == pytest.approx(statistics.stdev([0.35, 0.4]))


def test_rte_of_glue_and_superglue_are_distinguished(write):
    other = write("b", "rte", dataset={"dataset_name": "SuperGLUE RTE"}, accuracy=0.7)
    result = average(write("a", "rte", accuracy=0.5), other)
    assert result["glue"][0]["average"]["mean"] == 0.5
    assert result["left_out"] == {str(other): "its task is not a GLUE task"}


def test_incomplete_runs_are_skipped_and_named(write, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    part = write("part", "cola", arguments={"max_eval_samples": 5}, matthews_correlation=1.0)
    other = write("other", "squad", f1=90.0)
    result = average(write("good", "cola", matthews_correlation=0.5), part, other, tmp_path / "empty")
    assert result["glue"][0]["average"]["mean"] == 0.5
    assert result["left_out"] == {
        str(part): "it was evaluated only on the first 5 rows of the dev set",
        str(other): "its task is not a GLUE task",
        str(tmp_path / "empty"): "it has no all_results.json",
    }
    assert f"Skipped {part}: it was evaluated only on the first 5 rows" in " ".join(capsys.readouterr().out.split())


def test_runs_that_cannot_be_averaged_raise_an_error(write, tmp_path, capsys):
    first = write("first", "cola", matthews_correlation=0.5)
    with pytest.raises(ValueError, match=r"first and .*second .*cola .*\./bert and seed 1"):
        average(first, write("second", "cola", matthews_correlation=0.6))
    with pytest.raises(ValueError, match="`eval_matthews_correlation`"):
        average(write("nothing", "cola", matthews_correlation="high"))
    with pytest.raises(ValueError, match=r"GLUE task.*squad: its task"):
        average(write("squad", "squad", f1=1.0))
    with pytest.raises(OSError, match="nowhere"):
        average(tmp_path / "nowhere")
    assert cli.main(["average", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_run_with_an_undefined_score_is_skipped(write, capsys):
    constant = write("one", "stsb", pearson=None, spearmanr=0.5)
    result = average(constant, write("two", "rte", accuracy=0.6))
    assert result["left_out"][str(constant)].startswith("eval_pearson is undefined")
    assert list(result["glue"][0]["tasks"]) == ["rte"] and "Skipped " in capsys.readouterr().out


def test_runs_with_other_rows_or_metrics_raise_an_error(write):
    rows = [write(f"sst{n}", "sst2", n, accuracy=0.9, samples=samples) for n, samples in ((1, 872), (2, 100))]
    with pytest.raises(ValueError, match=r"sst1 and .*sst2 .*rows differ \(872 and 100\)"):
        average(*rows)
    second = {"accuracy_mm": 0.7}
    sets = [write(f"mnli{n}", "mnli", n, accuracy=0.8, samples=9, **(second if n == 1 else {})) for n in (1, 2)]
    with pytest.raises(ValueError, match=r"metrics differ \(eval_accuracy, eval_accuracy_mm and eval_accuracy\)"):
        average(*sets)


@pytest.mark.parametrize(
    ("name", "values"),
    [("learning_rate", (1e-5, 5e-5)), ("num_train_epochs", (1.0, 3.0)), ("max_train_samples", (None, 100))],
)
def test_runs_with_different_settings_are_not_seeds_of_one_model(write, name, values):
    folders = [
        write(
            f"rte{seed}", "rte", seed, accuracy=0.6, arguments={name: value, "output_dir": f"./{seed}", "seed": seed}
        )
        for seed, value in enumerate(values)
    ]
    with pytest.raises(ValueError, match=rf"rte0.*rte1.*`{name}` is {values[0]} .* {values[1]} "):
        average(*folders)


def test_runs_are_compared_by_the_content_of_their_data(write):
    def write_run(seed, train_hash, **arguments):
        hashes = {"hash of the training data": train_hash} if train_hash else None
        return write(f"rte{seed}", "rte", seed, accuracy=0.6, arguments=arguments, data_hashes=hashes)

    first = write_run(1, "a", data_dir="g", task_name="rte")
    second = write_run(2, "a", data_dir="./g", task_name="RTE")
    assert average(first, second)["glue"][0]["tasks"]["rte"]["seeds"].keys() == {1, 2}
    with pytest.raises(ValueError, match=r"`hash of the training data` is 'a' .* 'b' "):
        average(first, write_run(3, "b", data_dir="g", task_name="rte"))
    with pytest.raises(ValueError, match=r"`data_dir` is 'g' .* 'h' "):
        average(first, write_run(4, None, data_dir="h", task_name="rte"))
