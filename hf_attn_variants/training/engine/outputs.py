"""Outputs of a run: progress bars, the loss log, result files, plots, trackers and the saved model."""

import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ... import progress
from ...files import (
    BEST_MODEL_FILE,
    CONFIG_NAME,
    CURVES_FILE,
    HISTORY_NAME,
    LOG_FILE,
    REPORT_NAME,
    RESULTS_NAME,
    atomic_write,
    parse_json,
    write_picture,
    write_problem,
)
from ...model_folder import RESULTS, STAGE, replace_model
from ...model_history import ModelHistory, write_history
from .checkpoints import NAME_PATTERN, describe_last_checkpoint
from .options import Settings
from .settings import TrainingSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "RunLog",
    "get_library_versions",
    "is_trained_in_place",
    "plot_curves",
    "progress_bar",
    "read_log",
    "remove_earlier_run",
    "save_bad_batch",
    "save_model",
    "save_results",
    "write_results",
]

# Arguments that are a folder or a Hub id.
PATH_OR_ID_SETTINGS = ("model_name_or_path", "teacher", "tokenizer_name", "dataset_name")


def progress_bar(accelerator: Accelerator, disable: bool = False, **kwargs: Any) -> tqdm:
    """Make a bar of `hf_attn_variants.progress`, on the main process only."""
    return progress.progress_bar(disable=disable or not accelerator.is_main_process, **kwargs)


class RunLog:
    """Appends a run's records to `train_log.jsonl` and hands them to accelerate's trackers, on the main process only.

    A bar shows the last loss, and the dev scores above it.
    """

    def __init__(self, accelerator: Accelerator, output_dir: str | Path, bar: tqdm | None = None):
        self.accelerator = accelerator
        self.path = Path(output_dir) / LOG_FILE
        self.bar = bar

    def write(self, record: dict[str, Any]) -> None:
        """Log one record; it has a "step", and a "loss" or "eval_*" values."""
        if not self.accelerator.is_main_process:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_replace_non_finite(record)) + "\n")
        except OSError as error:
            last = describe_last_checkpoint(self.path.parent)
            raise OSError(f"could not write {self.path} ({type(error).__name__}: {error}){last}") from error
        values = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        # trackio keeps "time" for its own.
        tracked = {"train_seconds" if key == "time" else key: value for key, value in values.items()}
        self.accelerator.log(tracked, step=record["step"])
        if self.bar is not None and not self.bar.disable:
            _show_on_bar(self.bar, record["step"], values)


def _show_on_bar(bar: tqdm, step: int, values: dict[str, float]) -> None:
    # Dev scores stand above the bar: 80 columns have no room for both.
    if "loss" in values:
        bar.set_postfix_str(f"loss={values['loss']:.4g}", refresh=False)
    scores = {key.removeprefix("eval_"): value for key, value in values.items() if key.startswith("eval_")}
    if scores:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
        bar.write(f"step {step}, dev: {listed}", file=sys.stderr)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a `train_log.jsonl`; none where there is no file."""
    path = Path(path)
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _replace_non_finite(value: Any) -> Any:
    # JSON has no NaN.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value


def get_library_versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}  # with its build, "+cu126" for example
    for name in ("hf-attn-variants", "transformers", "accelerate", "datasets", "scikit-learn", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def save_results(path: str | Path, results: dict[str, Any], settings: Settings) -> None:
    """Write `all_results.json`: the results, then the arguments (no token) and library versions that gave them."""
    arguments = {key: value for key, value in settings.values().items() if key != "hub_token"}
    for name in PATH_OR_ID_SETTINGS:
        given = arguments.get(name)
        if given is not None and not Path(given).is_absolute() and Path(given).is_dir():
            arguments[name] = f"./{Path(given)}"  # "runs/bert" would read like a Hub id elsewhere
    record = {**results, "date": time.strftime("%Y-%m-%d"), "arguments": arguments, "versions": get_library_versions()}
    atomic_write(path, json.dumps(_replace_non_finite(record), indent=2, default=str) + "\n")


def plot_curves(records: Iterable[dict[str, Any]], metrics: list[str], path: str | Path, title: str) -> None:
    """Draw the training loss and the dev metrics (names without "eval_") of `read_log` against the step.

    What cannot be drawn is a warning; an OSError says that the file cannot be written.
    """
    write_picture(Path(path), lambda: _draw_curves(list(records), metrics, title), dpi=120)


def _draw_curves(records: list[dict[str, Any]], metrics: list[str], title: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    def points(key: str) -> tuple[list[int], list[float]]:
        found = [record for record in records if record.get(key) is not None]
        return [record["step"] for record in found], [record[key] for record in found]

    steps, losses = points("loss")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(steps, losses, ".-" if len(losses) < 50 else "-", label="train", color="tab:blue")
    left.plot(*points("eval_loss"), "o--", label="dev", color="tab:orange")
    left.set(xlabel="optimiser step", ylabel="loss", title="loss")
    left.legend()
    for name in metrics:
        right.plot(*points(f"eval_{name}"), "o-", label=name)
    right.set(xlabel="optimiser step", title="dev metrics")
    if metrics:
        right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, parse_math=False)  # a name with $ is no formula
    return figure


PREDICTIONS_PREFIX = "predictions_"
BAD_BATCH_PREFIX = "bad_batch-"
# What an earlier run of ours leaves in its output folder and a new one must not mistake for its own.
STALE_PATTERN = re.compile(
    rf"{NAME_PATTERN.pattern}|\.tmp-.*|{BAD_BATCH_PREFIX}.*\.(pt|safetensors)|"
    + "|".join(re.escape(name) for name in (BEST_MODEL_FILE, LOG_FILE))
)


def is_trained_in_place(settings: TrainingSettings) -> bool:
    """Say whether a run begins with the model that lies in its own output folder."""
    source = settings.model_name_or_path
    return source is not None and Path(source).expanduser().resolve() == Path(settings.output_dir).resolve()


def remove_earlier_run(output_dir: str | Path) -> None:
    """Remove an earlier run's checkpoints, log and best weights; its model and what tells of it stay until the end.

    Raises:
        OSError: if something could not be removed.
    """
    folder = Path(output_dir)
    # Without a model that they tell of, results are of nobody.
    results = () if (folder / CONFIG_NAME).exists() else (*RESULTS, REPORT_NAME, HISTORY_NAME)
    for entry in list(folder.iterdir()):
        if STALE_PATTERN.fullmatch(entry.name) or any(fnmatchcase(entry.name, each) for each in results):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    history: ModelHistory,
    carried: dict[str, torch.Tensor] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Save model, tokenizer and history into the output folder, whole, in the place of what an earlier run left.

    Called on every process; only the main one writes. `carried` goes into the weights' file beside the model's, and
    `add_files` is called with the folder in which the model is made, to put more beside it.

    Raises:
        OSError: if the folder cannot be written; what was in it stays.
    """
    folder, weights = Path(settings.output_dir), accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        if accelerator.is_fsdp2:  # gathered, tied weights are tensors of their own
            own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            weights = {name: tensor for name, tensor in weights.items() if name in own}
        stage = folder / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        try:
            with _restore_class(accelerator.unwrap_model(model)) as unwrapped:
                unwrapped.save_pretrained(stage, state_dict=weights | (carried or {}))
            tokenizer.save_pretrained(stage)
            write_history(stage, history)
            if add_files is not None:
                add_files(stage)
            umask = os.umask(0)
            os.umask(umask)
            for path in stage.iterdir():
                if path.is_file():
                    path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read
        except Exception as error:  # safetensors has its own error for a full disk
            shutil.rmtree(stage, ignore_errors=True)
            raise OSError(f"could not write the model to {folder} {write_problem(error)}") from error
        replace_model(stage, folder, is_trained_in_place(settings) or bool(settings.resume_from_checkpoint))
    accelerator.wait_for_everyone()


@contextmanager
def _restore_class(model: Any) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 makes a class for a model it shards, and what would be saved as the model's code is torch's.
    sharded = type(model)
    model.__class__ = next(found for found in sharded.__mro__ if not issubclass(found, FSDPModule))
    try:
        yield model
    finally:
        model.__class__ = sharded


def save_bad_batch(
    accelerator: Accelerator, batches: list[dict[str, Tensor]], output_dir: str | Path, step: int
) -> str:
    """Save this process's batches of a step that went wrong; returns where, or why it could not.

    In the file "0.input_ids" is that of the first batch; a step has several where gradients are accumulated.
    """
    path = Path(output_dir) / f"{BAD_BATCH_PREFIX}{step}-{accelerator.process_index}.safetensors"
    named = ((f"{i}.{name}", each) for i, batch in enumerate(batches) for name, each in batch.items())
    # Copies: two names of one tensor, labels that are the inputs for example, are no safetensors.
    found = {name: each.cpu().clone(memory_format=torch.contiguous_format) for name, each in named}
    try:
        path.write_bytes(safetensors.torch.save(found))
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"could not be saved ({type(error).__name__}: {error})"
    return f"are in {path}"


def write_results(settings: TrainingSettings, results: dict[str, Any], metrics: list[str], title: str) -> None:
    """Write `all_results.json` and `training_curves.png`, which shows `metrics`; called on the main process.

    Raises:
        OSError: if a file could not be written.
    """
    folder = Path(settings.output_dir)
    save_results(folder / RESULTS_NAME, results, settings)
    plot_curves(read_log(folder / LOG_FILE), metrics, folder / CURVES_FILE, f"{title}, seed {settings.seed}")
