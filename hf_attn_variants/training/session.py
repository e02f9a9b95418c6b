"""The frame of every script's run: checks, the accelerator, the output folder, the trackers."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from transformers.utils import logging as transformers_logging

from hf_attn_variants.model_history import ModelHistory, source_history, write_history
from hf_attn_variants.training import arguments, outputs
from hf_attn_variants.training.checkpoints import find_checkpoint

__all__ = ["configure_deepspeed", "open_session", "start_run"]

logger = logging.getLogger(__name__)

# Whoever drops a process group last waits for its threads. DDP, which goes with an error's traceback, would do that
# holding the interpreter's lock, and a thread of gloo that needs it to free its last tensor would never end.
_ended_groups: list[Any] = []


@contextmanager
def open_session(args: argparse.Namespace) -> Iterator[Accelerator]:
    """Makes the accelerator as `TrainingLoop` wants it, with the output folder ready; ends the trackers afterwards.

    Args:
        args: Of `arguments.add_shared_arguments`, checked.

    Raises:
        ValueError, OSError: The checkpoint to resume from is not there, the output folder is not free or cannot be
            written to, or the Hub would not take the result.
    """
    if args.resume_from_checkpoint:
        find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    arguments.prepare_output_dir(args, write=False)
    outputs.check_hub_access(args)
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        log_with=args.report_to if args.with_tracking else None,
        project_dir=args.output_dir,
        # The loop accumulates; a number of accelerate's environment would divide each loss by it once more.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        step_scheduler_with_optimizer=False,
        rng_types=[],
    )
    try:
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            configure_deepspeed(args, accelerator.state.deepspeed_plugin.deepspeed_config)
        if accelerator.is_fsdp2 and args.optim == "adafactor":
            raise ValueError(
                "--optim adafactor: its moments are whole tensors, which FSDP2's shards do not fit; take --optim "
                "adamw, or launch with accelerate_configs/multi_gpu_ddp.yaml"
            )
        accelerator.wait_for_everyone()  # every process has seen the folder before one writes into it
        if accelerator.is_main_process:
            arguments.prepare_output_dir(args)
        with _library_bars(not args.disable_tqdm):
            yield accelerator
    finally:
        if accelerator.num_processes > 1:
            _ended_groups.append(torch.distributed.group.WORLD)
        accelerator.end_training()
        # A second call in this process may want another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextmanager
def _library_bars(wanted: bool) -> Iterator[None]:
    """Leave out the bars of datasets (tokenising) and transformers (loading, saving) where none are wanted."""
    if wanted:
        yield
        return
    had = not datasets.are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had[0]:
            datasets.enable_progress_bars()
        if had[1]:
            transformers_logging.enable_progress_bar()


def configure_deepspeed(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Gives DeepSpeed's configuration the batch size and the clipping of the run, which it does itself.

    Args:
        args: Reads `per_device_train_batch_size`, `max_grad_norm`, `gradient_accumulation_steps`.
        config: Of accelerate's plugin; changed in place.

    Raises:
        ValueError: Gradients are to be accumulated; DeepSpeed would step after each batch.
    """
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            "--gradient_accumulation_steps: under DeepSpeed only 1; give a larger --per_device_train_batch_size, or "
            "launch with accelerate_configs/fsdp2.yaml"
        )
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    config["gradient_clipping"] = args.max_grad_norm


def start_run(args: argparse.Namespace, accelerator: Accelerator) -> ModelHistory:
    """Clears the output folder where that was asked for, and starts the trackers of `--with_tracking`.

    Called on every process when all that the run needs has been loaded, so that a run which cannot start removes
    nothing. The trackers get the run's arguments, its Hub token left out.

    Returns:
        How the model that the run begins with was made, for `outputs.save_model`; read before a folder that is its own
        source is cleared. Empty on all but the main process.
    """
    history = source_history(args.model_name_or_path) if accelerator.is_main_process else ModelHistory()
    for problem in history.problems:
        logger.warning("the model card will not tell all of the model's history: %s", problem)
    if args.overwrite_output_dir and accelerator.is_main_process:
        outputs.remove_earlier_run(args.output_dir)
        if _is_own_source(args):
            write_history(Path(args.output_dir), history)  # the model there is still the one that it tells of
    accelerator.wait_for_everyone()
    if args.with_tracking:
        values = {
            k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(args).items() if k != "hub_token"
        }
        accelerator.init_trackers("hf_attn_variants", values)
    return history


def _is_own_source(args: argparse.Namespace) -> bool:
    source = args.model_name_or_path
    return source is not None and Path(source).resolve() == Path(args.output_dir).resolve()
