"""The frame of every script's run: checks, the accelerator, the output folder, the trackers."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from hf_attn_variants.training import arguments, outputs
from hf_attn_variants.training.checkpoints import find_checkpoint

__all__ = ["open_session", "start_run"]


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
        step_scheduler_with_optimizer=False,
        rng_types=[],
    )
    try:
        accelerator.wait_for_everyone()  # every process has seen the folder before one writes into it
        if accelerator.is_main_process:
            arguments.prepare_output_dir(args)
        yield accelerator
    finally:
        accelerator.end_training()
        # A second call in this process may want another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def start_run(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Clears the output folder where that was asked for, and starts the trackers of `--with_tracking`.

    Called on every process when all that the run needs has been loaded, so that a run which cannot start removes
    nothing. The trackers get the run's arguments, its Hub token left out.
    """
    if args.overwrite_output_dir and accelerator.is_main_process:
        outputs.remove_earlier_run(args.output_dir)
    accelerator.wait_for_everyone()
    if args.with_tracking:
        values = {
            k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(args).items() if k != "hub_token"
        }
        accelerator.init_trackers("hf_attn_variants", values)
