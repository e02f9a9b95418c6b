"""The frame of every script's run: checks, the accelerator, the output folder, the trackers."""

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

# The variables in which launchers tell a process how many there are: torchrun and accelerate, MPI's, SLURM's. Of
# SLURM it is that of a job step: a batch script, which is one process, has the job's other variables too.
SLURM_COUNT = "SLURM_STEP_NUM_TASKS"
PROCESS_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", SLURM_COUNT)

# Process groups are kept for good: freeing one waits for its threads. A DDP model in an error's traceback would free
# it under the interpreter's lock, which a thread of gloo may need in order to end: a deadlock.
_finished_process_groups: list[Any] = []
# Accelerators of runs that reached `start_run`: what lies in the output folder from then on is theirs.
_started_accelerators: weakref.WeakSet[Accelerator] = weakref.WeakSet()


@contextmanager
def open_session(settings: TrainingSettings) -> Iterator[Accelerator]:
    """Make the accelerator as `TrainingLoop` wants it, with the output folder ready; end the trackers afterwards.

    Raises:
        ValueError, OSError: if the machine cannot do what the settings ask for, the checkpoint to resume from is not
            there, the output folder is not free, in use by another run, or cannot be written to, or several processes
            were launched that know nothing of each other.
        KeyboardInterrupt, TerminatedError: as the run does, with a message that says how to go on.
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
        # The loop accumulates; a number of accelerate's environment would divide each loss by it once more.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        step_scheduler_with_optimizer=False,
        rng_types=[],
    )
    made = []
    try:
        _check_processes(settings, accelerator)
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            configure_deepspeed(settings, accelerator.state.deepspeed_plugin.deepspeed_config)
        if accelerator.is_fsdp2 and settings.optim == "adafactor":
            raise ValueError(
                "--optim adafactor: its moments are whole tensors, which FSDP2's shards do not fit; take --optim "
                "adamw, or launch with accelerate_configs/multi_gpu_ddp.yaml"
            )
        accelerator.wait_for_everyone()  # every process has seen the folder before one writes into it
        if accelerator.is_main_process:
            made = _make_output_dir(settings.output_dir)
        held = lock_folder(settings.output_dir) if accelerator.is_main_process else nullcontext(False)
        with held as was_in_use, no_progress_bars(settings.disable_tqdm):
            if was_in_use:
                _check_output_dir(settings)
            yield accelerator
    except (KeyboardInterrupt, TerminatedError) as stop:
        advice = _describe_resuming(settings) if accelerator in _started_accelerators else "nothing was changed"
        raise type(stop)(f"{str(stop) or INTERRUPTED}; {advice}") from stop
    finally:
        remove_empty_folders(made)
        if accelerator.num_processes > 1:
            _finished_process_groups.append(torch.distributed.group.WORLD)
        accelerator.end_training()
        # A second call in this process may want another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _check_machine(settings: TrainingSettings) -> None:
    """Check that this machine can compute and log as the settings ask, before anything is downloaded or written."""
    on_cpu = settings.cpu or not torch.accelerator.is_available()
    if settings.mixed_precision == "fp16" and on_cpu:
        raise ValueError("--mixed_precision fp16 needs an accelerator; on the CPU use bf16")
    if settings.mixed_precision == "bf16" and on_cpu:
        capabilities = getattr(torch.cpu, "get_capabilities", None)  # older versions of torch lack it
        names = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
        if capabilities is not None and not any(capabilities().get(name) for name in names):
            logger.warning(
                "--mixed_precision bf16: this CPU has no bfloat16 instructions; training will be many times slower "
                "than with --mixed_precision no"
            )
    if settings.tracker is not None:
        _check_trackers(settings.tracker)


def _check_trackers(report_to: str) -> None:
    # accelerate itself leaves out a tracker that is not installed without a word.
    known = [str(LoggerType(name)) for name in LoggerType.list()]
    installed = [str(name) for name in get_available_trackers()]
    if report_to not in known:
        raise ValueError(f"--report_to must be one of {', '.join(known)}, got {report_to!r}")
    if not installed or (report_to != "all" and report_to not in installed):
        raise ValueError(
            f"--report_to {report_to}: not installed (pip install "
            f"{'tensorboard' if report_to == 'all' else report_to}); installed: {', '.join(installed) or 'none'}"
        )


def _check_processes(settings: TrainingSettings, accelerator: Accelerator) -> None:
    """Check that processes launched together train together: alone, each would take itself for the main one."""
    counts = {name: int(os.environ.get(name, "")) for name in PROCESS_COUNTS if os.environ.get(name, "").isdecimal()}
    name = next((name for name, count in counts.items() if count > 1), None)
    if accelerator.num_processes > 1 or name is None:
        return
    if name == SLURM_COUNT:
        advice = f"srun one task a machine, with `accelerate launch` in it, or unset {name} if these are runs apart"
    elif settings.cpu or torch.accelerator.is_available():
        advice = "start them by `accelerate launch` or torchrun"
    else:
        advice = "there is no GPU here, so give the script --cpu to train together on CPUs, or start one process"
    raise ValueError(
        f"{counts[name]} processes were launched ({name}={counts[name]}) that do not know of each other, and each "
        f"would train alone into one folder: {advice}"
    )


def _check_output_dir(settings: TrainingSettings) -> None:
    folder = Path(settings.output_dir)
    if folder.exists() and not folder.is_dir():
        raise OSError(f"--output_dir {folder} is a file; give a folder")
    used = folder.is_dir() and any(folder.iterdir())
    if used and not (settings.overwrite_output_dir or settings.resume_from_checkpoint):
        kept = list_checkpoints(folder)
        go_on = f"--resume_from_checkpoint latest to go on from {kept[-1].name}, " if kept else ""
        raise ValueError(
            f"--output_dir {folder} is not empty{'' if kept else ' and has no checkpoint to go on from'}: give "
            f"{go_on}--overwrite_output_dir to start over, or another folder"
        )
    resumed = settings.resume_from_checkpoint
    if used and resumed and resumed != "latest" and folder.resolve() not in Path(resumed).resolve().parents:
        raise ValueError(
            f"--resume_from_checkpoint {resumed} does not lie in --output_dir {folder}, which is not empty: the "
            "resumed run would replace the log and the best weights there; give an empty folder, or the checkpoint's"
        )


def _make_output_dir(output_dir: str) -> list[Path]:
    """Make the folder if it is not there, and check that it can be written to; return the new folders."""
    folder, made = Path(output_dir), []
    try:
        made = make_folders(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remove_empty_folders(made)
        raise OSError(
            f"--output_dir {folder} cannot be written to ({error.strerror}); give a folder that can"
        ) from error
    return made


def _describe_resuming(settings: TrainingSettings) -> str:
    kept = list_checkpoints(settings.output_dir)
    if not kept:
        return f"no checkpoint is in {settings.output_dir} (--checkpointing_steps saves some)"
    instead = " in place of --overwrite_output_dir" if settings.overwrite_output_dir else ""
    return (
        f"the last checkpoint is {kept[-1]}: to go on from it, repeat the command with "
        f"--resume_from_checkpoint latest{instead}"
    )


def configure_deepspeed(settings: TrainingSettings, config: dict[str, Any]) -> None:
    """Give DeepSpeed's configuration the batch size and the clipping of the run, which it does itself.

    Raises:
        ValueError: if gradients are to be accumulated; DeepSpeed would step after each batch.
    """
    if settings.gradient_accumulation_steps > 1:
        raise ValueError(
            "--gradient_accumulation_steps: under DeepSpeed only 1; give a larger --per_device_train_batch_size, or "
            "launch with accelerate_configs/fsdp2.yaml"
        )
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = settings.per_device_train_batch_size
    config["gradient_clipping"] = settings.max_grad_norm


def start_run(settings: TrainingSettings, accelerator: Accelerator) -> ModelHistory:
    """Clear the output folder and start the trackers, where the settings ask for either.

    Called on every process when all that the run needs has been loaded: a run that cannot start removes nothing.

    Returns:
        How the model that the run begins with was made, for `outputs.save_model`; read before a folder that is its own
        source is cleared. Empty on all but the main process.
    """
    is_resumed, history = (
        outputs.is_trained_in_place(settings) and bool(settings.resume_from_checkpoint),
        ModelHistory(),
    )
    if accelerator.is_main_process:
        history = source_history(settings.model_name_or_path, is_resumed)
    for problem in history.problems:
        logger.warning("the model card will not tell all of the model's history: %s", problem)
    _started_accelerators.add(accelerator)
    if settings.overwrite_output_dir and accelerator.is_main_process:
        outputs.remove_earlier_run(settings.output_dir)
    accelerator.wait_for_everyone()
    if settings.tracker is not None:
        values = {key: value for key, value in settings.values().items() if key != "hub_token"}
        shown = {key: v if isinstance(v, int | float | str) else str(v) for key, v in values.items()}
        # To tensorboard alone it is the name of a folder in the run's, to others that of a project, which is not.
        accelerator.init_trackers("runs" if settings.tracker == "tensorboard" else "hf_attn_variants", shown)
    return history
