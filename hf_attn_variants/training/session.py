"""The accelerator of a script's run, and the trackers it logs to."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from hf_attn_variants.training import arguments

__all__ = ["open_accelerator", "start_trackers"]


@contextmanager
def open_accelerator(args: argparse.Namespace) -> Iterator[Accelerator]:
    """Makes the accelerator as `TrainingLoop` wants it, with the output folder ready; ends the trackers afterwards.

    Args:
        args: Of `arguments.add_training_arguments` and `add_output_arguments`.
    """
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


def start_trackers(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Starts the trackers of `--with_tracking` with the run's arguments, its Hub token left out."""
    if args.with_tracking:
        values = {
            k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(args).items() if k != "hub_token"
        }
        accelerator.init_trackers("hf_attn_variants", values)
