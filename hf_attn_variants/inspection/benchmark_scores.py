"""Average the runs on GLUE: the scores of the tasks over seeds, and their mean."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import RESULTS_NAME
from ..glue_tasks import TASKS
from ..model_history import read_json

__all__ = ["METRICS", "ModelScores", "Run", "Spread", "model_scores", "read_runs"]

# The tasks, and the metrics whose mean is the score of a task.
METRICS = {name: task.metrics for name, task in TASKS.items() if task.eval_splits}
# Arguments that two seeds of one model may differ in: they change neither the training nor the scores of the dev set.
FREE_ARGUMENTS = frozenset(
    "seed output_dir overwrite_output_dir logging_steps peak_tflops checkpointing_steps save_total_limit "
    "resume_from_checkpoint with_tracking report_to disable_tqdm push_to_hub hub_model_id hub_private_repo hub_token "
    "test_file test_source_file test_target_file skip_predict per_device_eval_batch_size "
    "dataloader_num_workers".split()
)


@dataclass(frozen=True)
class Run:
    """A run on a task.

    Attributes:
        folder: its.
        task: what it was scored on.
        model: which it began with.
        seed: its.
        score: on the dev set, from 0 to 1.
        rows: how many the dev set has.
        metrics: those whose mean the score is.
        settings: the recorded settings of its training, except `FREE_ARGUMENTS`.
    """

    folder: Path
    task: str
    model: str
    seed: int
    score: float
    rows: int | None = None
    metrics: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the sample's standard deviation, which is None for a single seed."""

    mean: float
    deviation: float | None
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, by_seed: Mapping[int, float]) -> "Spread":
        """Return the mean and the deviation of one score for each seed."""
        values = [*by_seed.values()]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, tuple(sorted(by_seed)))


@dataclass
class ModelScores:
    """A model's scores on GLUE.

    Attributes:
        tasks: the tasks that were run, by name, in GLUE's order.
        missing: the others.
        average: the mean of the means of `tasks`. Its deviation is over the seeds that every task was run with, which
            are its `seeds`.
        by_seed: the score of each run, by task and seed.
    """

    model: str
    tasks: dict[str, Spread]
    missing: list[str]
    average: Spread = field(init=False)
    by_seed: Mapping[str, Mapping[int, float]]

    def __post_init__(self) -> None:
        shared = set.intersection(*(set(scores) for scores in self.by_seed.values()))
        averages = {seed: statistics.fmean(scores[seed] for scores in self.by_seed.values()) for seed in shared}
        mean = statistics.fmean(spread.mean for spread in self.tasks.values())
        deviation = statistics.stdev(averages.values()) if len(averages) > 1 else None
        self.average = Spread(mean, deviation, tuple(sorted(shared)))

    def to_dict(self) -> dict[str, Any]:
        """Return them as JSON holds them; a task's scores by seed as well."""
        tasks = {
            name: {
                "mean": spread.mean,
                "deviation": spread.deviation,
                "seeds": dict(sorted(self.by_seed[name].items())),
            }
            for name, spread in self.tasks.items()
        }
        average = {"mean": self.average.mean, "deviation": self.average.deviation, "seeds": [*self.average.seeds]}
        return {"model": self.model, "tasks": tasks, "missing": self.missing, "average": average}


def read_runs(folders: Sequence[str | Path]) -> tuple[list[Run], dict[str, str]]:
    """Read the results of runs of `glue`, or of `seq2seq` on a task of GLUE.

    Returns:
        The runs, and by folder why others are none: there are no results in them, of no task of GLUE, or of a part of
        its dev set.

    Raises:
        OSError, ValueError: if a folder is not there, results cannot be read, there is no run, two are of one task,
            model and seed, two of one task were scored on different rows or by different metrics, or two of one task
            and model were trained with different settings.
    """
    runs: list[Run] = []
    left_out: dict[str, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise OSError(f"{folder}: no such folder")
        found = _run(folder)
        if isinstance(found, Run):
            runs.append(found)
        else:
            left_out[str(folder)] = found
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in [*left_out.items()][:3])
        raise ValueError(f"no folder has the results of a GLUE task ({reasons or 'none is named'})")
    seen: dict[tuple[str, str, int], Path] = {}
    for run in runs:
        key = run.task, run.model, run.seed
        if key in seen:
            raise ValueError(
                f"{seen[key]} and {run.folder} are both of {run.task}, the model {run.model} and seed {run.seed}: "
                "give one of them"
            )
        seen[key] = run.folder
    _check_alike(runs)
    _check_settings(runs)
    return runs, left_out


def _check_alike(runs: Sequence[Run]) -> None:
    """Check that the scores of a task are all of as many rows, and of the same metrics."""
    firsts: dict[str, Run] = {}
    for run in runs:
        first = firsts.setdefault(run.task, run)
        for what, one, other in (("rows", first.rows, run.rows), ("metrics", first.metrics, run.metrics)):
            if one != other:
                raise ValueError(
                    f"{first.folder} and {run.folder} are both of {run.task}, and their {what} differ "
                    f"({_shown(one)} and {_shown(other)}): evaluate both on one dev set, or give one of them"
                )


def _check_settings(runs: Sequence[Run]) -> None:
    """Check that runs of one model on one task, which count as its seeds, were trained with the same settings."""
    firsts: dict[tuple[str, str], Run] = {}
    for run in runs:
        first = firsts.setdefault((run.task, run.model), run)
        for name in sorted(first.settings.keys() & run.settings.keys()):
            one, other = first.settings[name], run.settings[name]
            if one != other:
                raise ValueError(
                    f"{first.folder} and {run.folder} are not two seeds of one model: `{name}` is {one!r} in the "
                    f"first and {other!r} in the second. Average runs that differ in the seed only."
                )


def _shown(value: int | tuple[str, ...] | None) -> str:
    return ", ".join(value) if isinstance(value, tuple) else "unknown" if value is None else str(value)


def _run(folder: Path) -> Run | str:
    """Return a folder's run, or why it is none."""
    results = read_json(folder / RESULTS_NAME)
    if results is None:
        return f"it has no {RESULTS_NAME}"
    task = results.get("task_name")
    if task not in METRICS or "dataset" in results:  # RTE is also a task of SuperGLUE, whose runs name their data
        return "its run is of no task of GLUE"
    arguments = results.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    if arguments.get("max_eval_samples") is not None:
        return f"its scores are of the first {arguments['max_eval_samples']} rows of the dev set alone"
    undefined = [name for name in _metrics(results, METRICS[task]) if results.get(name, 0) is None]
    if undefined:
        return f"{undefined[0]} is not defined on its dev set, as of predictions that are all the same"
    if results.get("eval_loss", 0) is None:
        return "its dev loss is no number, so its predictions are those of no model"
    model, seed = arguments.get("model_name_or_path"), results.get("seed")
    if not isinstance(model, str) or not isinstance(seed, int):
        raise ValueError(f"{folder / RESULTS_NAME} does not say the model and the seed of its run")
    metrics = METRICS[task]
    score, names = _score(results, metrics, folder), tuple(_metrics(results, metrics))
    settings = {name: value for name, value in arguments.items() if name not in FREE_ARGUMENTS}
    if "train_samples" in results:
        settings["train_samples"] = results["train_samples"]
    return Run(folder, task, model, seed, score, results.get("eval_samples"), names, settings)


def _score(results: Mapping[str, Any], metrics: Sequence[str], folder: Path) -> float:
    """Return a task's score: the mean of its metrics."""
    values: list[float] = []
    for name in _metrics(results, metrics):
        value = results.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{folder / RESULTS_NAME}: {name} must be a number, got {value!r}")
        values.append(value)
    return statistics.fmean(values)


def _metrics(results: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Return what a task's metrics are called in results, those of MNLI's second dev set where that was evaluated."""
    second = [f"eval_{name}_mm" for name in metrics if f"eval_{name}_mm" in results]
    return [*(f"eval_{name}" for name in metrics), *second]


def model_scores(runs: Sequence[Run]) -> list[ModelScores]:
    """Return each model's scores, the best average first."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        found.setdefault(run.model, {}).setdefault(run.task, {})[run.seed] = run.score
    scores = []
    for model, tasks in found.items():
        names = [name for name in METRICS if name in tasks]
        spreads = {name: Spread.of(tasks[name]) for name in names}
        missing = [name for name in METRICS if name not in tasks]
        scores.append(ModelScores(model, spreads, missing, by_seed={name: tasks[name] for name in names}))
    return sorted(scores, key=lambda each: (len(each.missing), -each.average.mean))
