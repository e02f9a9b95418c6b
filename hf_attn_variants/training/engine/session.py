"""Setup and cleanup of a training run: checks, the accelerator, the output folder and the trackers."""

import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, LoggerType

from ...errors import INTERRUPTED, TerminatedError
from ...files import make_folders, remove_empty_folders
from ...model_history import ModelHistory, source_history
from ...progress import no_progress_bars
from . import outputs
from .checkpoints import find_checkpoint, list_checkpoints, lock_folder
from .settings import TrainingSettings

__all__ = ["configure_deepspeed", "open_session", "start_run"]

logger = logging.getLogger(__name__)

# Environment variables in which launchers store the number of processes: torchrun and accelerate, MPI, SLURM. For
# SLURM, it is the variable of a job step, because the other variables of a job also exist in a batch script, which is
# one process.
SLURM_COUNT = "SLURM_STEP_NUM_TASKS"
PROCESS_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", SLURM_COUNT)

# Process groups are never freed. A DDP model in the traceback of an error would free its group while it holds the
# interpreter's lock. Freeing waits for the threads of gloo, which may need the same lock: a deadlock.
_finished_process_groups: list[Any] = []
# Accelerators of runs that reached `start_run` and from then on own the contents of the output folder.
_started_accelerators: weakref.WeakSet[Accelerator] = weakref.WeakSet()


@contextmanager
def open_session(settings: TrainingSettings) -> Iterator[Accelerator]:
    """Create the accelerator for `TrainingLoop` and prepare the output folder; end the trackers afterwards.

    Raises:
        ValueError, OSError: If the machine does not support the settings, the checkpoint to resume from does not
            exist, the output folder is not empty, is in use or cannot be written to, or several processes were
            launched without a connection between them.
        KeyboardInterrupt, TerminatedError: If the run raises them. The message adds how to resume.
    """
    _check_machine(settings)
    if settings.resume_from_checkpoint:
        find_checkpoint(settings.resume_from_checkpoint, settings.output_dir)
    _check_output_dir(settings)
    accelerator = Accelerator(
        cpu=settings.cpu,
        mixed_precision=settings.mixed_precision,
        log_with=settings.tracker,
        project_dir=settings.output_dir,
        # The loop accumulates gradients. With a number from the environment, Accelerate would divide the losses again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        step_scheduler_with_optimizer=False,
        rng_types=[],
    )
    new_folders = []
    try:
        _check_processes(settings, accelerator)
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            configure_deepspeed(settings, accelerator.state.deepspeed_plugin.deepspeed_config)
        if accelerator.is_fsdp2 and settings.optim == "adafactor":
            raise ValueError(
                "--optim adafactor cannot be used with FSDP2, because its moments need whole tensors. Use --optim "
                "adamw, or launch with accelerate_configs/multi_gpu_ddp.yaml."
            )
        accelerator.wait_for_everyone()  # every process has checked the folder before one of them writes into it
        if accelerator.is_main_process:
            new_folders = _make_output_dir(settings.output_dir)
        lock = lock_folder(settings.output_dir) if accelerator.is_main_process else nullcontext(False)
        with lock as was_in_use, no_progress_bars(settings.disable_tqdm):
            if was_in_use:
                _check_output_dir(settings)
            yield accelerator
    except (KeyboardInterrupt, TerminatedError) as stop:
        advice = _describe_resuming(settings) if accelerator in _started_accelerators else "No file was changed."
        raise type(stop)(f"{(str(stop) or INTERRUPTED).rstrip('.')}. {advice}") from stop
    finally:
        remove_empty_folders(new_folders)
        if accelerator.num_processes > 1:
            _finished_process_groups.append(torch.distributed.group.WORLD)
        accelerator.end_training()
        # The next run in this process may use another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _check_machine(settings: TrainingSettings) -> None:
    """Check that this machine supports the precision and the trackers, before anything is downloaded or written."""
    on_cpu = settings.cpu or not torch.accelerator.is_available()
    if settings.mixed_precision == "fp16" and on_cpu:
        raise ValueError("--mixed_precision fp16 needs an accelerator. On a CPU, use bf16.")
    if settings.mixed_precision == "bf16" and on_cpu:
        capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in older versions of PyTorch
        names = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
        if capabilities is not None and not any(capabilities().get(name) for name in names):
            logger.warning(
                "--mixed_precision bf16 makes training many times slower than --mixed_precision no on this CPU, "
                "because it has no bfloat16 instructions."
            )
    if settings.tracker is not None:
        _check_trackers(settings.tracker)


def _check_trackers(report_to: str) -> None:
    """Check that the tracker is known and installed, because Accelerate ignores others without a warning."""
    known = [str(LoggerType(name)) for name in LoggerType.list()]
    installed = [str(name) for name in get_available_trackers()]
    if report_to not in known:
        raise ValueError(f"--report_to must be one of {', '.join(known)}, got {report_to!r}.")
    if not installed or (report_to != "all" and report_to not in installed):
        raise ValueError(
            f"--report_to must be an installed tracker ({', '.join(installed) or 'nothing is installed'}), got "
            f"{report_to!r}. Install it with `pip install {'tensorboard' if report_to == 'all' else report_to}`."
        )


def _check_processes(settings: TrainingSettings, accelerator: Accelerator) -> None:
    """Check that processes which were launched together also train together, not each one for itself."""
    counts = {name: int(os.environ.get(name, "")) for name in PROCESS_COUNTS if os.environ.get(name, "").isdecimal()}
    name = next((name for name, count in counts.items() if count > 1), None)
    if accelerator.num_processes > 1 or name is None:
        return
    if name == SLURM_COUNT:
        advice = (
            f"Start one task per machine with srun and `accelerate launch` in it. For independent runs, unset {name}."
        )
    elif settings.cpu or torch.accelerator.is_available():
        advice = "Start them with `accelerate launch` or torchrun."
    else:
        advice = "There is no GPU. Add --cpu to train together on CPUs, or start only one process."
    raise ValueError(
        f"{counts[name]} processes were launched ({name}={counts[name]}) without a connection between them, and each "
        f"would train a model in the same folder. {advice}"
    )


def _check_output_dir(settings: TrainingSettings) -> None:
    """Check that the output folder is empty, overwritten, or belongs to the run that resumes."""
    folder = Path(settings.output_dir)
    if folder.exists() and not folder.is_dir():
        raise OSError(f"--output_dir must be a folder, but {folder} is a file.")
    is_used = folder.is_dir() and any(folder.iterdir())
    if is_used and not (settings.overwrite_output_dir or settings.resume_from_checkpoint):
        checkpoints = list_checkpoints(folder)
        resume = (
            f"Resume from {checkpoints[-1].name} with --resume_from_checkpoint latest, start"
            if checkpoints
            else "Start"
        )
        raise ValueError(
            f"--output_dir {folder} is not empty. {resume} a new run with --overwrite_output_dir, or give another "
            "folder."
        )
    resumed = settings.resume_from_checkpoint
    if is_used and resumed and resumed != "latest" and folder.resolve() not in Path(resumed).resolve().parents:
        raise ValueError(
            f"--resume_from_checkpoint {resumed} is not in --output_dir {folder}, which is not empty. The run would "
            "replace the log and the best weights in that folder. Give an empty folder, or that of the checkpoint."
        )


def _make_output_dir(output_dir: str) -> list[Path]:
    """Create the output folder if necessary, check that it can be written to, and return the new folders."""
    folder, new_folders = Path(output_dir), []
    try:
        new_folders = make_folders(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remove_empty_folders(new_folders)
        raise OSError(
            f"--output_dir {folder} cannot be written to ({error.strerror}). Give another folder."
        ) from error
    return new_folders


def _describe_resuming(settings: TrainingSettings) -> str:
    """Return the advice on resuming for the message of a stopped run."""
    checkpoints = list_checkpoints(settings.output_dir)
    if not checkpoints:
        return f"There is no checkpoint in {settings.output_dir}. Use --checkpointing_steps to save checkpoints."
    instead = " instead of --overwrite_output_dir" if settings.overwrite_output_dir else ""
    return (
        f"The last checkpoint is {checkpoints[-1]}. To resume, repeat the command with --resume_from_checkpoint "
        f"latest{instead}."
    )


def configure_deepspeed(settings: TrainingSettings, config: dict[str, Any]) -> None:
    """Set the batch size and the gradient clipping in the configuration of DeepSpeed, which applies them itself.

    Raises:
        ValueError: If gradients are accumulated, because DeepSpeed would update the weights after each batch.
    """
    if settings.gradient_accumulation_steps > 1:
        raise ValueError(
            f"--gradient_accumulation_steps must be 1 with DeepSpeed, got {settings.gradient_accumulation_steps}. Use "
            "a larger --per_device_train_batch_size, or launch with accelerate_configs/fsdp2.yaml."
        )
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = settings.per_device_train_batch_size
    config["gradient_clipping"] = settings.max_grad_norm


def start_run(settings: TrainingSettings, accelerator: Accelerator) -> ModelHistory:
    """Clear the output folder and start the trackers, if the settings require it.

    This is called on every process after everything that the run needs was loaded. Therefore, a run that cannot start
    does not remove files.

    Returns:
        The history of the model from which the run starts, for `outputs.save_model`. It is read before the folder is
        cleared, because it may be in this folder. Empty on all processes except the main one.
    """
    is_resumed = outputs.is_trained_in_place(settings) and bool(settings.resume_from_checkpoint)
    history = ModelHistory()
    if accelerator.is_main_process:
        history = source_history(settings.model_name_or_path, is_resumed)
    for problem in history.problems:
        logger.warning("The history in the model card will be incomplete: %s", problem)
    _started_accelerators.add(accelerator)
    if settings.overwrite_output_dir and accelerator.is_main_process:
        outputs.remove_earlier_run(settings.output_dir)
    accelerator.wait_for_everyone()
    if settings.tracker is not None:
        values = {key: value for key, value in settings.values().items() if key != "hub_token"}
        shown = {key: item if isinstance(item, int | float | str) else str(item) for key, item in values.items()}
        # TensorBoard uses this name for a folder in the output folder, other trackers use it for a project.
        accelerator.init_trackers("runs" if settings.tracker == "tensorboard" else "hf_attn_variants", shown)
    return history
