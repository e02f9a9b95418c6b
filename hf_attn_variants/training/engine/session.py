"""Sets up a training run, writes its logs, results and model, and cleans up afterwards."""

import json
import logging
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ... import files, model_folder
from ...errors import INTERRUPTED_MESSAGE, TerminatedError
from ...progress import disable_progress_bars, progress_bar
from .checkpoints import NAME_PATTERN, convert_write_errors, find_checkpoint, list_checkpoints, lock_folder
from .settings import Settings, TrainingSettings

# The settings whose value is either a folder or a Hub id.
PATH_OR_ID_SETTINGS = ("model_name_or_path", "teacher", "tokenizer_name", "dataset_name")


def show_progress(accelerator: Accelerator, batches: Iterable[Any], name: str) -> tqdm:
    """Return a progress bar over batches, which is only shown on the main process (see `progress_bar`)."""
    return progress_bar(batches, disable=not accelerator.is_main_process, desc=name, leave=False)


class RunLog:
    """Appends records to `train_log.jsonl` and sends them to Accelerate's trackers, on the main process only.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The output folder of the run.
        bar: A progress bar that shows the latest loss. Dev scores are printed above the bar.
    """

    def __init__(self, accelerator: Accelerator, output_dir: str | Path, bar: tqdm | None = None):
        self.accelerator = accelerator
        self.path = Path(output_dir) / files.LOG_FILE
        self.bar = bar

    def write(self, record: dict[str, Any]) -> None:
        """Log a record with the key "step" and either a "loss" or "eval_*" values."""
        if not self.accelerator.is_main_process:
            return
        with convert_write_errors(f"{self.path} could not be written", self.path.parent):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_replace_non_finite(record)) + "\n")
        values = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        # The key "time" is reserved by trackio.
        tracked = {"train_seconds" if key == "time" else key: value for key, value in values.items()}
        self.accelerator.log(tracked, step=record["step"])
        if self.bar is None or self.bar.disable:
            return
        # A line of 80 columns is too short for both the loss and the dev scores, which are printed above the bar.
        if "loss" in values:
            self.bar.set_postfix_str(f"loss={values['loss']:.4g}", refresh=False)
        scores = [f"{key[5:]} {value:.4g}" for key, value in values.items() if key.startswith("eval_")]
        if scores:
            self.bar.write(f"Step {record['step']}, dev: {', '.join(scores)}", file=sys.stderr)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Read the records in a `train_log.jsonl` file, or return an empty list if the file does not exist."""
    path = Path(path)
    return [files.parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _replace_non_finite(value: Any) -> Any:
    """Replace non-finite numbers with None, because JSON does not support NaN or infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value


def get_library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect the results."""
    # PyTorch's version includes the build, such as "+cu126".
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("hf-attn-variants", "transformers", "accelerate", "datasets", "scikit-learn", "scipy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def save_results(path: str | Path, results: dict[str, Any], settings: Settings) -> None:
    """Write the results, the settings (without the Hub token) and the library versions to a JSON file."""
    arguments = {key: value for key, value in settings.values().items() if key != "hub_token"}
    for name in PATH_OR_ID_SETTINGS:
        value = arguments.get(name)
        if value is not None and not Path(value).is_absolute() and Path(value).is_dir():
            arguments[name] = f"./{Path(value)}"  # without "./", a folder such as "runs/bert" would look like a Hub id
    record = {**results, "date": time.strftime("%Y-%m-%d"), "arguments": arguments, "versions": get_library_versions()}
    files.atomic_write(path, json.dumps(_replace_non_finite(record), indent=2, default=str) + "\n")


def make_curves_figure(records: list[dict[str, Any]], metrics: list[str], title: str) -> Any:
    """Plot the training loss and dev metrics against the training step.

    Args:
        records: The records returned by `read_log`.
        metrics: The dev metrics, without the "eval_" prefix.
        title: The title of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    def collect_points(key: str) -> tuple[list[int], list[float]]:
        rows = [row for row in records if row.get(key) is not None]
        return [row["step"] for row in rows], [row[key] for row in rows]

    steps, losses = collect_points("loss")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(steps, losses, ".-" if len(losses) < 50 else "-", label="train", color="tab:blue")
    left.plot(*collect_points("eval_loss"), "o--", label="dev", color="tab:orange")
    left.set(xlabel="optimizer step", ylabel="loss", title="loss")
    left.legend()
    for name in metrics:
        right.plot(*collect_points(f"eval_{name}"), "o-", label=name)
    right.set(xlabel="optimizer step", title="dev metrics")
    if metrics:
        right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, parse_math=False)  # a "$" in a name must not start a formula
    return figure


PREDICTIONS_PREFIX = "predictions_"
# The names of files from an earlier run that must be removed from the output folder before a new run starts.
STALE_PATTERN = re.compile(
    rf"{NAME_PATTERN.pattern}|\.tmp-.*|"
    + "|".join(re.escape(name) for name in (files.BEST_MODEL_FILE, files.LOG_FILE))
)


def is_trained_in_place(settings: TrainingSettings) -> bool:
    """Return whether the run starts from the model in its output folder."""
    source = settings.model_name_or_path
    return source is not None and Path(source).expanduser().resolve() == Path(settings.output_dir).resolve()


def remove_earlier_run(output_dir: str | Path) -> None:
    """Remove the checkpoints, the log and the best weights of an earlier run.

    If the folder contains a model, the model and the files that describe it are only replaced at the end of the new
    run.

    Raises:
        OSError: If a file could not be removed.
    """
    folder = Path(output_dir)
    # If the folder contains no model, results that describe a model are also removed.
    is_model = (folder / files.CONFIG_NAME).exists()
    results = () if is_model else (*model_folder.RESULT_PATTERNS, files.REPORT_NAME, files.HISTORY_NAME)
    for entry in list(folder.iterdir()):
        if STALE_PATTERN.fullmatch(entry.name) or any(fnmatchcase(entry.name, pattern) for pattern in results):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    history: model_folder.ModelHistory,
    extra_tensors: dict[str, torch.Tensor] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Save the model, tokenizer and history in the output folder, replacing files from an earlier run atomically.

    This function must be called on every process, but only the main process writes files.

    Args:
        accelerator: The accelerator of the run.
        model: The prepared model.
        tokenizer: The tokenizer.
        settings: The settings of the run.
        history: The model's history.
        extra_tensors: Tensors to save in the weights file in addition to those of the model.
        add_files: A function that adds files to the temporary folder in which the model is saved. It is called with
            the path of this folder.

    Raises:
        OSError: If the model cannot be written. In this case, the files in the output folder are left unchanged.
    """
    folder, weights = Path(settings.output_dir), accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        if accelerator.is_fsdp2:  # FSDP2 also returns the duplicate names of tied weights
            names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            weights = {name: tensor for name, tensor in weights.items() if name in names}
        stage = folder / model_folder.STAGE_FOLDER
        shutil.rmtree(stage, ignore_errors=True)
        with convert_write_errors(f"The model could not be written to {folder}", folder, stage):
            with _restore_original_class(accelerator.unwrap_model(model)) as unwrapped:
                unwrapped.save_pretrained(stage, state_dict=weights | (extra_tensors or {}))
            tokenizer.save_pretrained(stage)
            model_folder.write_history(stage, history)
            if add_files is not None:
                add_files(stage)
            umask = os.umask(0)
            os.umask(umask)
            for path in stage.iterdir():
                if path.is_file():
                    path.chmod(0o666 & ~umask)  # safetensors creates files that only the owner can read
        continues = is_trained_in_place(settings) or bool(settings.resume_from_checkpoint)
        model_folder.replace_model(stage, folder, continues)
    accelerator.wait_for_everyone()


@contextmanager
def _restore_original_class(model: Any) -> Iterator[Any]:
    """Restore the original class of a model sharded by FSDP2 while the `with` block runs."""
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 creates a class that is defined in PyTorch, and PyTorch's file would be saved as the model's remote code.
    sharded = type(model)
    model.__class__ = next(base for base in sharded.__mro__ if not issubclass(base, FSDPModule))
    try:
        yield model
    finally:
        model.__class__ = sharded


logger = logging.getLogger(__name__)

# Environment variables in which launchers store the number of processes (torchrun and accelerate, MPI, SLURM). SLURM's
# job variables are not used because they are also set in a batch script, which is a single process.
PROCESS_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

# References to process groups are kept so that the groups are never freed. If an error's traceback contained the last
# reference to a DDP model, freeing its group would wait for gloo's threads while holding the interpreter lock. The
# threads may need the same lock, which would cause a deadlock.
_finished_process_groups: list[Any] = []
# The accelerators of runs that have called `start_run`. Once it has been called, the output folder belongs to the run.
_started_accelerators: weakref.WeakSet[Accelerator] = weakref.WeakSet()


@contextmanager
def open_session(settings: TrainingSettings) -> Iterator[Accelerator]:
    """Create the accelerator for `TrainingLoop` and prepare the output folder. At the end, close the trackers.

    Raises:
        ValueError: If the machine does not support the settings, if the checkpoint to resume from does not exist, if
            the output folder is not empty or is in use, or if the launched processes are not connected to each other.
        OSError: If the output folder is not writable.
        KeyboardInterrupt, TerminatedError: If the run raises these errors. Instructions for resuming are added to the
            message.
    """
    _check_hardware_and_trackers(settings)
    if settings.resume_from_checkpoint:
        find_checkpoint(settings.resume_from_checkpoint, settings.output_dir)
    _check_output_dir(settings)
    accelerator = Accelerator(
        cpu=settings.cpu,
        mixed_precision=settings.mixed_precision,
        log_with=settings.tracker,
        project_dir=settings.output_dir,
        # The training loop accumulates gradients. If Accelerate used a value from the environment, it would divide the
        # losses again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        step_scheduler_with_optimizer=False,
        rng_types=[],
    )
    new_folders = []
    try:
        _check_processes_connected(accelerator)
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            configure_deepspeed(settings, accelerator.state.deepspeed_plugin.deepspeed_config)
        if accelerator.is_fsdp2 and settings.optim == "adafactor":
            raise ValueError(
                "--optim adafactor is not supported with FSDP2 because its moments require whole tensors. Use --optim "
                "adamw, or launch with accelerate_configs/multi_gpu_ddp.yaml."
            )
        accelerator.wait_for_everyone()  # all processes check the folder before any process writes to it
        if accelerator.is_main_process:
            new_folders = _make_output_dir(settings.output_dir)
        lock = lock_folder(settings.output_dir) if accelerator.is_main_process else nullcontext(False)
        with lock as was_in_use, disable_progress_bars(settings.disable_tqdm):
            if was_in_use:
                _check_output_dir(settings)
            yield accelerator
    except (KeyboardInterrupt, TerminatedError) as stop:
        advice = (
            _describe_how_to_resume(settings) if accelerator in _started_accelerators else "No files were changed."
        )
        raise type(stop)(f"{(str(stop) or INTERRUPTED_MESSAGE).rstrip('.')}. {advice}") from stop
    finally:
        files.remove_empty_folders(new_folders)
        if accelerator.num_processes > 1:
            _finished_process_groups.append(torch.distributed.group.WORLD)
        accelerator.end_training()
        # The next run in this process may use a different precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _check_hardware_and_trackers(settings: TrainingSettings) -> None:
    """Check that this machine supports the precision and the trackers before anything is downloaded or written."""
    on_cpu = settings.cpu or not torch.accelerator.is_available()
    if settings.mixed_precision == "fp16" and on_cpu:
        raise ValueError("--mixed_precision fp16 requires an accelerator. Use bf16 on CPUs.")
    if settings.mixed_precision == "bf16" and on_cpu:
        capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in older versions of PyTorch
        names = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
        if capabilities is not None and not any(capabilities().get(name) for name in names):
            logger.warning(
                "--mixed_precision bf16 makes training many times slower than --mixed_precision no on this CPU "
                "because it has no bfloat16 instructions."
            )
    installed = [str(name) for name in get_available_trackers()]
    installed_names = ", ".join(installed) or "none is installed"
    # Accelerate silently ignores trackers that are not installed.
    if settings.tracker is not None and (settings.tracker not in (*installed, "all") or not installed):
        raise ValueError(f"--report_to must be an installed tracker ({installed_names}), got {settings.tracker!r}.")


def _check_processes_connected(accelerator: Accelerator) -> None:
    """Check that processes that were launched together are connected instead of training independently."""
    counts = {name: int(os.environ.get(name, "")) for name in PROCESS_COUNTS if os.environ.get(name, "").isdecimal()}
    name = next((name for name, count in counts.items() if count > 1), None)
    if accelerator.num_processes > 1 or name is None:
        return
    raise ValueError(
        f"{counts[name]} processes were launched ({name}={counts[name]}) that are not connected to each other, so "
        "each would train a model in the same folder. Start them with `accelerate launch` or torchrun, and add --cpu "
        f"if there is no GPU. For independent runs, unset {name}."
    )


def _check_output_dir(settings: TrainingSettings) -> None:
    """Check that the output folder is empty, may be overwritten, or contains the run to resume."""
    folder = Path(settings.output_dir)
    is_used = folder.is_dir() and any(folder.iterdir())
    if is_used and not (settings.overwrite_output_dir or settings.resume_from_checkpoint):
        raise ValueError(
            f"--output_dir {folder} is not empty. Continue its run with --resume_from_checkpoint latest, start a new "
            "run with --overwrite_output_dir, or choose another folder."
        )
    resumed = settings.resume_from_checkpoint
    if is_used and resumed and resumed != "latest" and folder.resolve() not in Path(resumed).resolve().parents:
        raise ValueError(
            f"--resume_from_checkpoint {resumed} is not in --output_dir {folder}, which is not empty. The run would "
            "replace the log and the best weights in that folder. Choose an empty folder, or the folder of the "
            "checkpoint."
        )


def _make_output_dir(output_dir: str) -> list[Path]:
    """Create the output folder if necessary, check that it is writable, and return the newly created folders."""
    new_folders = []
    try:
        new_folders = files.make_folders(Path(output_dir))
        tempfile.TemporaryFile(dir=output_dir).close()
    except OSError as error:
        files.remove_empty_folders(new_folders)
        problem = f"--output_dir {output_dir} cannot be written to ({error.strerror})"
        raise OSError(f"{problem}. Choose another folder.") from error
    return new_folders


def _describe_how_to_resume(settings: TrainingSettings) -> str:
    """Return instructions for resuming, which are added to the message when a run is stopped."""
    checkpoints = list_checkpoints(settings.output_dir)
    if not checkpoints:
        return f"There is no checkpoint in {settings.output_dir}. Use --checkpointing_steps to save checkpoints."
    flags = "--resume_from_checkpoint latest"
    flags += " instead of --overwrite_output_dir" if settings.overwrite_output_dir else ""
    return f"The last checkpoint is {checkpoints[-1]}. To resume, repeat the command with {flags}."


def configure_deepspeed(settings: TrainingSettings, config: dict[str, Any]) -> None:
    """Set the batch size and the gradient clipping in a DeepSpeed configuration, which is modified in place.

    Raises:
        ValueError: If gradients should be accumulated, because DeepSpeed would update the weights after each batch.
    """
    if settings.gradient_accumulation_steps > 1:
        raise ValueError(
            f"--gradient_accumulation_steps must be 1 with DeepSpeed, got {settings.gradient_accumulation_steps}. Use "
            "a larger --per_device_train_batch_size, or launch with accelerate_configs/fsdp2.yaml."
        )
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = settings.per_device_train_batch_size
    config["gradient_clipping"] = settings.max_grad_norm


def start_run(settings: TrainingSettings, accelerator: Accelerator) -> model_folder.ModelHistory:
    """Remove the files of an earlier run and start the trackers, if the settings require it.

    This function must be called on every process. It is called once everything that the run requires has been loaded,
    so that a run that cannot start does not remove any files.

    Returns:
        The history of the initial model, which `save_model` requires. It is read before files are removed because it
        may be in the output folder. The history is empty on all processes except the main process.
    """
    is_resumed = is_trained_in_place(settings) and bool(settings.resume_from_checkpoint)
    history = model_folder.ModelHistory()
    if accelerator.is_main_process:
        history = model_folder.read_source_history(settings.model_name_or_path, is_resumed)
    for problem in history.problems:
        logger.warning("The history in the model card will be incomplete: %s", problem)
    _started_accelerators.add(accelerator)
    if settings.overwrite_output_dir and accelerator.is_main_process:
        remove_earlier_run(settings.output_dir)
    accelerator.wait_for_everyone()
    if settings.tracker is not None:
        values = {key: value for key, value in settings.values().items() if key != "hub_token"}
        printable_settings = {
            key: item if isinstance(item, int | float | str) else str(item) for key, item in values.items()
        }
        # TensorBoard uses this name for a subfolder of the output folder, and other trackers use it for the project.
        accelerator.init_trackers(
            "runs" if settings.tracker == "tensorboard" else "hf_attn_variants", printable_settings
        )
    return history
