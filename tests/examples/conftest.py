"""Make the modules of examples/ importable, as in their scripts, and run SuperGLUE tasks."""

import sys
from pathlib import Path

import pytest
from fixtures.commands import run_command
from fixtures.data_files import read_lines
from fixtures.superglue import write_superglue

sys.path += [str(Path(__file__).parents[2] / "examples" / name) for name in ("multiple_choice", "superglue")]


@pytest.fixture
def run_task(tmp_path):
    """A function that trains a model on a tiny SuperGLUE task, and returns the results and the output folder."""
    import run_superglue
    from superglue_tasks import TASKS

    def call(model, task, *flags, out="out"):
        folder = tmp_path / TASKS[task.lower()].folder
        if not folder.exists():
            write_superglue(folder, task.lower(), 8)
        argv = [model, "--task_name", task, "--data_dir", folder, "--output_dir", tmp_path / out, "--max_length", 64]
        argv += ["--per_device_train_batch_size", 4, "--cpu", "--disable_tqdm", *flags]
        return run_command(run_superglue, *argv), tmp_path / out

    return call


@pytest.fixture
def check_outputs(run_task):
    """A function that checks the scores and predictions of a run, and that the saved model has the same scores."""
    from superglue_tasks import TASKS

    def check(task, results, out):
        spec = TASKS[task]
        assert results["task_name"] == task and results["steps"] == 2
        assert all(0 <= results[f"eval_{name}"] <= 1 for name in (*spec.metrics, spec.main_metric))
        test, dev = (read_lines(out / f"predictions_{prefix}{spec.folder}.jsonl") for prefix in ("", "dev_"))
        assert (len(test), len(dev)) == ((12, 6) if task == "record" else (8, 4))
        assert all(set(row) == {"idx", "passage" if task == "multirc" else "label"} for row in test)
        again, other = run_task(out, task, "--num_train_epochs", 0, "--skip_predict", out="again")
        assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5) and again["steps"] == 0
        assert again[f"eval_{spec.main_metric}"] == results[f"eval_{spec.main_metric}"]
        assert not (other / f"predictions_{spec.folder}.jsonl").exists()

    return check
