"""How many examples a step has on all devices together, and the accumulated batches that make so many."""

from dataclasses import replace

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..engine.session import configure_deepspeed
from ..pretraining.span_corruption import SpanCorruption
from .settings import UptrainingSettings

__all__ = ["fit_batch_size", "mean_step", "sequences_per_step", "step_size"]


def fit_batch_size(settings: UptrainingSettings, accelerator: Accelerator) -> UptrainingSettings:
    """Return the settings with the accumulation steps by which a step has `total_train_batch_size` examples.

    Raises:
        ValueError: if that is no multiple of what all processes read at once, or DeepSpeed would have to accumulate.
    """
    total, processes = settings.total_train_batch_size, accelerator.num_processes
    if total is None:
        return settings
    at_once = settings.per_device_train_batch_size * processes
    if total % at_once:
        raise ValueError(
            f"--total_train_batch_size {total} is no multiple of the {at_once} examples that {processes} process(es) "
            f"with --per_device_train_batch_size {settings.per_device_train_batch_size} read at once: change one"
        )
    fitted = replace(settings, total_train_batch_size=None, gradient_accumulation_steps=total // at_once)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(fitted, accelerator.state.deepspeed_plugin.deepspeed_config)
    return fitted


def sequences_per_step(settings: UptrainingSettings, accelerator: Accelerator) -> int:
    """Return the examples of a step on all processes."""
    of_a_device = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    return of_a_device * accelerator.num_processes


def mean_step(examples: int, steps: int) -> int | float:
    """Return the examples that a step read on average: fewer than asked for, where the text ended within steps."""
    return examples // steps if examples % steps == 0 else round(examples / steps, 2)


def step_size(settings: UptrainingSettings, accelerator: Accelerator, prepare: SpanCorruption) -> str:
    """Say how many sequences a step reads, and how many tokens, where none is padding."""
    sequences = sequences_per_step(settings, accelerator)
    return (
        f"a step reads {sequences} sequences ({accelerator.num_processes} process(es), "
        f"{settings.per_device_train_batch_size} at a time, accumulated {settings.gradient_accumulation_steps} "
        f"time(s)): {sequences * prepare.input_length} tokens of inputs and {sequences * prepare.target_length} of "
        "targets"
    )
