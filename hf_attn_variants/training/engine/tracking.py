"""What a run shows and leaves behind: progress bars, the loss log, result files, the PNG of its curves, trackers."""

import json
import math
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from ... import progress
from ...files import LOG_FILE, atomic_write, parse_json
from ...pictures import write_picture
from .checkpoints import last_good_checkpoint
from .options import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RunLog", "library_versions", "plot_curves", "progress_bar", "read_log", "save_results"]

# Arguments that are a folder or a Hub id.
HUB_IDS = ("model_name_or_path", "teacher", "tokenizer_name", "dataset_name")


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
                file.write(json.dumps(_finite(record)) + "\n")
        except OSError as error:
            last = last_good_checkpoint(self.path.parent)
            raise OSError(f"could not write {self.path} ({type(error).__name__}: {error}){last}") from error
        values = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        # trackio keeps "time" for its own.
        tracked = {"train_seconds" if key == "time" else key: value for key, value in values.items()}
        self.accelerator.log(tracked, step=record["step"])
        if self.bar is not None and not self.bar.disable:
            _show(self.bar, record["step"], values)


def _show(bar: tqdm, step: int, values: dict[str, float]) -> None:
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


def _finite(value: Any) -> Any:
    # JSON has no NaN.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def library_versions() -> dict[str, str]:
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
    for name in HUB_IDS:
        given = arguments.get(name)
        if given is not None and not Path(given).is_absolute() and Path(given).is_dir():
            arguments[name] = f"./{Path(given)}"  # "runs/bert" would read like a Hub id elsewhere
    record = {**results, "date": time.strftime("%Y-%m-%d"), "arguments": arguments, "versions": library_versions()}
    atomic_write(path, json.dumps(_finite(record), indent=2, default=str) + "\n")


def plot_curves(records: Iterable[dict[str, Any]], metrics: list[str], path: str | Path, title: str) -> None:
    """Draw the training loss and the dev metrics (names without "eval_") of `read_log` against the step.

    What cannot be drawn is a warning; an OSError says that the file cannot be written.
    """
    write_picture(Path(path), lambda: _curves(list(records), metrics, title), dpi=120)


def _curves(records: list[dict[str, Any]], metrics: list[str], title: str) -> "Figure":
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
