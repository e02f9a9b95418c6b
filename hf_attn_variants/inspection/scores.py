"""Computes GLUE scores averaged over seeds and tasks, and semantic similarity scores without training."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..files import RESULTS_NAME
from ..glue_tasks import TASKS
from ..model_folder import read_json

# {task: metrics whose mean is the score}.
GLUE_METRICS = {name: task.metrics for name, task in TASKS.items() if task.eval_splits}
# Arguments that can differ between two runs because they affect neither training nor the scores on the dev set.
# Tasks have several spellings, so runs are compared by the task in their results instead of `task_name`.
FREE_ARGUMENTS = frozenset(
    "seed task_name output_dir overwrite_output_dir logging_steps peak_tflops checkpointing_steps save_total_limit "
    "resume_from_checkpoint with_tracking report_to disable_tqdm push_to_hub hub_model_id hub_private_repo hub_token "
    "test_file test_source_file test_target_file skip_predict per_device_eval_batch_size "
    "dataloader_num_workers".split()
)
DATA_HASHES = {"hash of the training data", "hash of the dev data"}


@dataclass(frozen=True)
class GlueRun:
    """The result of fine-tuning a model on one GLUE task.

    Attributes:
        folder: The output folder of the run.
        task: The name of the task.
        model: The name or path of the model that was fine-tuned.
        seed: The seed of the run.
        score: The score on the dev set, from 0 to 1.
        rows: The number of rows in the dev set.
        metrics: The metrics whose mean is the score.
        settings: The recorded training settings, except `FREE_ARGUMENTS`, and the hashes of the data if the
            run recorded them.
    """

    folder: Path
    task: str
    model: str
    seed: int
    score: float
    rows: int | None
    metrics: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """The mean and the sample standard deviation over seeds. The deviation is None for a single seed."""

    mean: float
    deviation: float | None
    seeds: tuple[int, ...]

    @classmethod
    def from_scores(cls, scores_by_seed: Mapping[int, float], mean: float) -> "Spread":
        """Return the given mean with the standard deviation of {seed: score}."""
        deviation = statistics.stdev(scores_by_seed.values()) if len(scores_by_seed) > 1 else None
        return cls(mean, deviation, tuple(sorted(scores_by_seed)))


class ModelScores:
    """The scores of a model on GLUE.

    Args:
        model: The name or path of the model.
        scores: The score of each run, {task: {seed: score}}.

    Attributes:
        by_seed: The score of each run, in GLUE order.
        tasks: The mean score for each task that was run, in GLUE order.
        missing: The names of the tasks that were not run.
        average: The mean of the task means. Its `seeds` are those that were run for all tasks, and its standard
            deviation is computed over these seeds.
    """

    def __init__(self, model: str, scores: Mapping[str, Mapping[int, float]]):
        self.model = model
        self.by_seed = {name: scores[name] for name in GLUE_METRICS if name in scores}
        self.missing = [name for name in GLUE_METRICS if name not in scores]
        means = {name: statistics.fmean(by_seed.values()) for name, by_seed in self.by_seed.items()}
        self.tasks = {name: Spread.from_scores(by_seed, means[name]) for name, by_seed in self.by_seed.items()}
        shared = set.intersection(*map(set, self.by_seed.values()))
        averages = {seed: statistics.fmean(by_seed[seed] for by_seed in self.by_seed.values()) for seed in shared}
        self.average = Spread.from_scores(averages, statistics.fmean(means.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values, including the score for each seed."""
        tasks = {
            name: vars(spread) | {"seeds": dict(sorted(self.by_seed[name].items()))}
            for name, spread in self.tasks.items()
        }
        average = vars(self.average) | {"seeds": [*self.average.seeds]}
        return {"model": self.model, "tasks": tasks, "missing": self.missing, "average": average}


def read_runs(folders: Sequence[str | Path]) -> tuple[list[GlueRun], dict[str, str]]:
    """Read the results of `glue` runs and of `seq2seq` runs on GLUE tasks.

    Args:
        folders: The output folders of the runs.

    Returns:
        The runs, and {folder: reason} for each folder that is skipped. A folder is skipped if it has no results, or if
        the results are not from the complete dev set of a GLUE task.

    Raises:
        OSError: If a folder does not exist or its results cannot be read.
        ValueError: If no folder contains a run, or two runs are not compatible. Runs on the same task must have the
            same rows and metrics. Runs of the same model on the same task must have the same settings and different
            seeds.
    """
    runs: list[GlueRun] = []
    left_out: dict[str, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise OSError(f"The folder {folder} does not exist. Pass the output folders of finished runs.")
        run_or_reason = _read_run(folder)
        if isinstance(run_or_reason, GlueRun):
            runs.append(run_or_reason)
        else:
            left_out[str(folder)] = run_or_reason
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in [*left_out.items()][:3])
        raise ValueError(f"No folder contains results for a GLUE task ({reasons or 'no folder was passed'}).")
    _check_compatible(runs)
    return runs, left_out


def _check_compatible(runs: Sequence[GlueRun]) -> None:
    """Check that runs on a task have the same dev set, and that runs of a model on a task differ only in the seed."""
    runs_by_key: dict[tuple[str, str, int], GlueRun] = {}
    tasks: dict[str, GlueRun] = {}
    models: dict[tuple[str, str], GlueRun] = {}
    for run in runs:
        if earlier_run := runs_by_key.get((run.task, run.model, run.seed)):
            raise ValueError(
                f"{earlier_run.folder} and {run.folder} are both runs of {run.task} with the model {run.model} and "
                f"seed {run.seed}. Pass only one of them."
            )
        runs_by_key[run.task, run.model, run.seed] = run
        first = tasks.setdefault(run.task, run)
        for aspect, old, new in (("rows", first.rows, run.rows), ("metrics", first.metrics, run.metrics)):
            if old != new:
                raise ValueError(
                    f"{first.folder} and {run.folder} are both runs of {run.task}, but their {aspect} differ "
                    f"({_format_value(old)} and {_format_value(new)}). Evaluate both on the same dev set, or pass "
                    "only one of them."
                )
        first = models.setdefault((run.task, run.model), run)
        shared = first.settings.keys() & run.settings.keys()
        if shared & DATA_HASHES:  # the same data can have several paths
            shared = {name for name in shared if not name.endswith(("_dir", "_file"))}
        for name in sorted(shared):
            if first.settings[name] != run.settings[name]:
                raise ValueError(
                    f"{first.folder} and {run.folder} are not two seeds of one model: `{name}` is "
                    f"{first.settings[name]!r} in the first and {run.settings[name]!r} in the second. Pass runs that "
                    "differ only in the seed."
                )


def _format_value(value: int | tuple[str, ...] | None) -> str:
    """Format a row count or the names of metrics as text."""
    return ", ".join(value) if isinstance(value, tuple) else "unknown" if value is None else str(value)


def _read_run(folder: Path) -> GlueRun | str:
    """Return the run stored in a folder, or the reason why the folder is skipped."""
    results = read_json(folder / RESULTS_NAME)
    if results is None:
        return f"it has no {RESULTS_NAME}"
    task = results.get("task_name")
    if task not in GLUE_METRICS or "dataset" in results:  # SuperGLUE also contains RTE, but its runs record `dataset`
        return "its task is not a GLUE task"
    arguments = results.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    if arguments.get("max_eval_samples") is not None:
        return f"it was evaluated only on the first {arguments['max_eval_samples']} rows of the dev set"
    names = _select_metrics(results, GLUE_METRICS[task])
    if undefined := [name for name in names if results.get(name, 0) is None]:
        return f"{undefined[0]} is undefined, for example because all predictions are the same"
    if results.get("eval_loss", 0) is None:
        return "its dev loss is not a number, so training has failed"
    model, seed = arguments.get("model_name_or_path"), results.get("seed")
    if not isinstance(model, str) or not isinstance(seed, int):
        raise ValueError(f"{folder / RESULTS_NAME} must contain a model name and a seed. Run the training again.")
    if missing := [name for name in names if not isinstance(results.get(name), int | float)]:
        raise ValueError(
            f"`{missing[0]}` in {folder / RESULTS_NAME} must be a number, got {results.get(missing[0])!r}. Run the "
            "evaluation again."
        )
    score = statistics.fmean(results[name] for name in names)
    settings = {name: value for name, value in arguments.items() if name not in FREE_ARGUMENTS}
    settings |= results.get("data_hashes", {})
    if "train_samples" in results:
        settings["train_samples"] = results["train_samples"]
    return GlueRun(folder, task, model, seed, score, results.get("eval_samples"), tuple(names), settings)


def _select_metrics(results: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Return the metric keys in the results, including MNLI's mismatched dev set if it was evaluated."""
    mismatched = [f"eval_{name}_mm" for name in metrics if f"eval_{name}_mm" in results]
    return [*(f"eval_{name}" for name in metrics), *mismatched]


def compute_model_scores(runs: Sequence[GlueRun]) -> list[ModelScores]:
    """Return the scores of each model, sorted by the number of tasks and then by the average, in descending order."""
    scores_by_model: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        scores_by_model.setdefault(run.model, {}).setdefault(run.task, {})[run.seed] = run.score
    scores = [ModelScores(model, tasks) for model, tasks in scores_by_model.items()]
    return sorted(scores, key=lambda model: (len(model.missing), -model.average.mean))


def mean_pooled(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean hidden state over the tokens that are not padding.

    Args:
        hidden_states: The hidden states [b, n, D].
        attention_mask: The attention mask [b, n], which is 1 for tokens and 0 for padding.

    Returns:
        The sentence embeddings [b, D].

    Example:
        >>> mean_pooled(model(**batch).last_hidden_state, batch["attention_mask"])
    """
    weights = attention_mask.to(hidden_states.dtype).unsqueeze(-1)  # [b, n, 1]
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


@torch.inference_mode()
def sentence_embeddings(
    model: nn.Module, tokenizer: Any, sentences: Sequence[str], batch_size: int = 64, max_length: int = 256
) -> torch.Tensor:
    """Compute sentence embeddings as the mean of the last hidden states over all tokens.

    Args:
        model: An encoder whose output has `last_hidden_state`. Its training mode is restored afterwards.
        tokenizer: The model's tokenizer.
        sentences: The sentences.
        batch_size: The number of sentences per batch. Each batch contains sentences of similar length.
        max_length: The maximum number of tokens in a sentence. Longer sentences are truncated.

    Returns:
        The float32 embeddings [sentences, D] on the CPU, in the order of `sentences`.

    Example:
        >>> embeddings = sentence_embeddings(model, tokenizer, ["A cat sleeps.", "A dog barks."])
    """
    device, config = next(model.parameters()).device, cast(Any, model.config)
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    batches = [torch.empty(0, config.hidden_size)] if not sentences else []
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            texts = [sentences[i] for i in order[start : start + batch_size]]
            batch = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
            batch = batch.to(device)
            states = model(**batch).last_hidden_state.float()
            batches.append(mean_pooled(states, batch["attention_mask"]).cpu())
    finally:
        model.train(was_training)
    return torch.cat(batches)[torch.tensor(order, dtype=torch.long).argsort()]


def cosine_similarities(
    model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]], batch_size: int = 64, max_length: int = 256
) -> torch.Tensor:
    """Compute the cosine similarity between the embeddings of each pair of sentences.

    Args:
        model, tokenizer, batch_size, max_length: See `sentence_embeddings`.
        pairs: The pairs of sentences.

    Returns:
        The cosine similarities, [pairs].

    Example:
        >>> cosine_similarities(model, tokenizer, [("A cat sleeps.", "A cat is asleep.")])
    """
    sentences = [sentence for pair in pairs for sentence in pair]
    embeddings = sentence_embeddings(model, tokenizer, sentences, batch_size, max_length)
    return nn.functional.cosine_similarity(embeddings[0::2], embeddings[1::2])


def similarity_spearman(
    model: nn.Module,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    scores: Sequence[float],
    batch_size: int = 64,
    max_length: int = 256,
) -> float:
    """Return the Spearman rank correlation between cosine similarities and human similarity scores.

    Args:
        model, tokenizer, batch_size, max_length: See `sentence_embeddings`.
        pairs: The pairs of sentences.
        scores: The human score of each pair, on any scale.

    Returns:
        The correlation, from -1 to 1.

    Raises:
        ValueError: If there are fewer than two pairs, or `pairs` and `scores` differ in length.

    Example:
        >>> similarity_spearman(model, tokenizer, data["pairs"], data["scores"])
    """
    from scipy.stats import spearmanr  # scipy is installed by the `train` extra

    if len(pairs) != len(scores) or len(pairs) < 2:
        raise ValueError(
            f"`scores` must contain one score per pair for at least two pairs, got {len(pairs)} pairs and "
            f"{len(scores)} scores."
        )
    cosines = cosine_similarities(model, tokenizer, pairs, batch_size, max_length)
    return float(spearmanr(cosines.numpy(), list(scores)).statistic)
