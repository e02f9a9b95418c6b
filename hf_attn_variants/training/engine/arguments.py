"""The command-line arguments that every training script shares, under HF's names for them, and their checks."""

import argparse
import json
import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from transformers.trainer_utils import SchedulerType

from ...command_line import add_checkpoint_argument

__all__ = [
    "add_shared_arguments",
    "check_arguments",
    "only_evaluates",
    "resume_fingerprint",
]

logger = logging.getLogger(__name__)
# Needs the metric at every step, which no other schedule does.
UNSUPPORTED_SCHEDULES = {"reduce_lr_on_plateau", "greedy"}
SCHEDULES = [name.value for name in SchedulerType if name.value not in UNSUPPORTED_SCHEDULES]
# What decides the weights a run ends with, beyond what its loop knows; see `resume_fingerprint`.
RESUME_ARGUMENTS = (
    "model_name_or_path",
    "tokenizer_name",
    "attn_implementation",  # where there is dropout, each draws its own
    "dropout_rate",
    "max_length",
    "per_device_train_batch_size",
    "group_by_length",
    "pad_to_multiple_of",
    "optim",
    "adafactor_scale_parameter",
    "adafactor_relative_step",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "seed",
)


def add_shared_arguments(parser: argparse.ArgumentParser, packed: bool = False) -> None:
    """Adds what every training script takes: model, data, training, output, Hub.

    Args:
        parser: Gets the arguments, after the script's own; it is parsed by `cli.parse_with_checkpoint`.
        packed: Whether rows are blocks of a stream of text, all of one length.
    """
    _add_model_arguments(parser)
    _add_data_arguments(parser, packed)
    _add_training_arguments(parser)
    _add_output_arguments(parser)
    _add_hub_arguments(parser)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds which checkpoint is trained and how it is built."""
    group = parser.add_argument_group("model")
    add_checkpoint_argument(group, "Folder or Hub id of the checkpoint, ours or upstream's.")
    group.add_argument("--tokenizer_name", help="Folder or Hub id of the tokenizer, where it is not the checkpoint's.")
    group.add_argument("--attn_implementation", help="eager, sdpa, ...: what the model computes attention with.")
    group.add_argument(
        "--dropout_rate", type=float, help="Replaces every dropout probability of the checkpoint's config."
    )
    group.add_argument("--gradient_checkpointing", action="store_true", help="Recompute activations to save memory.")
    group.add_argument(
        "--trust_remote_code", action="store_true", help="Run the model code that a Hub repository holds."
    )


def _add_data_arguments(parser: argparse.ArgumentParser, packed: bool) -> None:
    """Adds how rows become batches; `packed`: rows are blocks of a stream of text, all of one length."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--max_length",
        type=int,
        default=128,
        help="Tokens per example, special tokens included" + ("." if packed else "; longer ones are cut."),
    )
    if not packed:
        group.add_argument("--max_train_samples", type=int, help="Use only the first N training rows.")
    group.add_argument("--max_eval_samples", type=int, help="Use only the first N rows of each dev split.")
    group.add_argument(
        "--per_device_train_batch_size", type=int, default=32, help="Examples per device and forward pass."
    )
    group.add_argument("--per_device_eval_batch_size", type=int, default=64, help="The same, in evaluation.")
    if not packed:
        group.add_argument(
            "--group_by_length",
            action="store_true",
            help="Batches of examples of like length, in random order: less padding.",
        )
        group.add_argument(
            "--pad_to_multiple_of", type=int, help="Pad each batch to a multiple of N tokens (8 suits tensor cores)."
        )
    group.add_argument(
        "--dataloader_num_workers", type=int, default=0, help="Processes that prepare batches; 0: the main one."
    )


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the optimiser, its schedule and the length of training."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--optim",
        choices=["adamw", "adafactor"],
        default="adamw",
        help="Adafactor keeps no moments of whole matrices.",
    )
    group.add_argument("--learning_rate", type=float, default=5e-5, help="Peak learning rate.")
    group.add_argument(
        "--weight_decay",
        type=float,
        default=0.0,
        help="Decoupled weight decay; biases, norms, logits_proj and weights_proj are exempt.",
    )
    group.add_argument("--adam_beta1", type=float, default=0.9, help="Decay of AdamW's mean of gradients.")
    group.add_argument("--adam_beta2", type=float, default=0.999, help="Decay of its mean of squares.")
    group.add_argument("--adam_epsilon", type=float, default=1e-8, help="Added to its denominator.")
    group.add_argument(
        "--adafactor_scale_parameter",
        action="store_true",
        help="Steps in proportion to each parameter's root mean square (T5's pretraining, rate 1e-2).",
    )
    group.add_argument(
        "--adafactor_relative_step",
        action="store_true",
        help="Adafactor's own schedule, min(1e-6 step, 1/sqrt(step)), instead of a rate, a schedule and warm-up.",
    )
    group.add_argument(
        "--max_grad_norm", type=float, default=1.0, help="Clip the gradient norm to this; 0: never clip."
    )
    group.add_argument("--num_train_epochs", type=float, default=3.0, help="Epochs (0: only evaluate).")
    group.add_argument("--max_train_steps", type=int, help="Optimiser steps in all; overrides --num_train_epochs.")
    group.add_argument(
        "--max_train_minutes",
        type=float,
        help="Stop after N minutes of this process's training, with a checkpoint to go on from.",
    )
    group.add_argument(
        "--gradient_accumulation_steps",
        type=int,
        default=1,
        help="Forward passes per optimiser step; the loss is the mean over all their examples.",
    )
    group.add_argument(
        "--lr_scheduler_type",
        choices=SCHEDULES,
        default="linear",
        metavar="NAME",
        help=f"One of {', '.join(SCHEDULES)}.",
    )
    group.add_argument(
        "--lr_scheduler_kwargs",
        type=json.loads,
        default={},
        metavar="JSON",
        help="Further settings of the schedule, such as '{\"num_decay_steps\": 100}'.",
    )
    group.add_argument("--num_warmup_steps", type=int, help="Steps over which the learning rate rises from 0.")
    group.add_argument("--warmup_ratio", type=float, default=0.0, help="The same as a share of all steps.")
    group.add_argument(
        "--seed", type=int, default=42, help="Seeds the head's weights, dropout and the order of examples."
    )
    group.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="Autocast of the forward pass, on CPUs faster (bf16) only where they have "
        "bfloat16 instructions; default: as `accelerate launch` says, or no.",
    )
    group.add_argument("--cpu", action="store_true", help="Train on the CPU even where an accelerator is present.")
    group.add_argument("--eval_steps", type=int, help="Evaluate every N optimiser steps (default: after every epoch).")
    group.add_argument(
        "--metric_for_best_model",
        help="Keep the weights of the best evaluation by this dev metric instead of the last ones.",
    )
    group.add_argument(
        "--early_stopping_patience",
        type=int,
        help="Stop after N evaluations without a better dev metric; keeps the best weights.",
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where results go, what is logged and how a run resumes."""
    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", required=True, help="Folder for the model, its results and the checkpoints.")
    group.add_argument(
        "--overwrite_output_dir",
        action="store_true",
        help="Accept a folder that is not empty; an earlier run's checkpoints, log and results in it, and the "
        "README.md of a model that the run does not begin with, are removed once the new run's data and model are "
        "loaded.",
    )
    group.add_argument("--logging_steps", type=int, default=10, help="Log the mean loss of every N steps.")
    group.add_argument(
        "--peak_tflops",
        type=float,
        help="What one device could do in this precision, for train_mfu, from its data sheet (an H100 in bf16: 989); "
        "default: what a large matrix product reaches here.",
    )
    group.add_argument(
        "--checkpointing_steps", metavar="N|epoch", help="Save a checkpoint every N steps or after every epoch."
    )
    group.add_argument(
        "--save_total_limit",
        type=int,
        help="Keep only the last N checkpoints (default: all; each has the weights and the optimiser's state).",
    )
    group.add_argument(
        "--resume_from_checkpoint",
        metavar="PATH|latest",
        help="Go on exactly where a checkpoint left off; latest: the newest complete one in --output_dir. One from "
        "elsewhere needs an empty --output_dir.",
    )
    group.add_argument("--with_tracking", action="store_true", help="Log to the trackers of --report_to.")
    group.add_argument(
        "--report_to", default="tensorboard", help="tensorboard, wandb, trackio, ... or all (with --with_tracking)."
    )
    group.add_argument("--disable_tqdm", action="store_true", help="No progress bars.")


def _add_hub_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where the trained model is pushed."""
    group = parser.add_argument_group("hub")
    group.add_argument("--push_to_hub", action="store_true", help="Push the final model.")
    group.add_argument("--hub_model_id", help="user/name; default: the name of --output_dir under your account.")
    group.add_argument("--hub_private_repo", action="store_true", help="Make the repository private.")
    group.add_argument("--hub_token", help="Token to use instead of the one `hf auth login` stored.")


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the shared arguments against each other and the machine, before anything is downloaded or written.

    Args:
        args: What the `add_*_arguments` of this module parsed. `checkpointing_steps` becomes an int, "epoch" or None.

    Raises:
        ValueError: A value is outside its range; the message holds the flag, the rule and the value.
    """
    _check_ranges(args)
    if args.checkpointing_steps not in (None, "epoch"):
        if not str(args.checkpointing_steps).isdigit() or int(args.checkpointing_steps) < 1:
            raise ValueError(
                f"--checkpointing_steps must be a positive number or 'epoch', got {args.checkpointing_steps!r}"
            )
        args.checkpointing_steps = int(args.checkpointing_steps)
    if args.save_total_limit is not None and args.checkpointing_steps is None:
        raise ValueError("--save_total_limit needs --checkpointing_steps: no checkpoint is saved without it")
    if args.num_warmup_steps is not None and args.warmup_ratio:
        raise ValueError("give --num_warmup_steps or --warmup_ratio, not both")
    if (args.adafactor_scale_parameter or args.adafactor_relative_step) and args.optim != "adafactor":
        raise ValueError("--adafactor_scale_parameter and --adafactor_relative_step need --optim adafactor")
    if args.adafactor_relative_step and (args.num_warmup_steps or args.warmup_ratio or args.lr_scheduler_kwargs):
        raise ValueError("--adafactor_relative_step is a schedule with a warm-up of its own: give no other")
    if args.max_train_minutes is not None and not args.max_train_minutes > 0:
        raise ValueError(f"--max_train_minutes must be more than 0, got {args.max_train_minutes}")
    if not isinstance(args.lr_scheduler_kwargs, dict):
        raise ValueError(f"--lr_scheduler_kwargs must be a JSON object, got {args.lr_scheduler_kwargs!r}")
    # transformers would pass over both without a word.
    if args.lr_scheduler_type == "constant" and (args.num_warmup_steps or args.warmup_ratio):
        raise ValueError("--lr_scheduler_type constant has no warm-up: give constant_with_warmup")
    if args.lr_scheduler_type in ("constant", "constant_with_warmup") and args.lr_scheduler_kwargs:
        raise ValueError(f"--lr_scheduler_type {args.lr_scheduler_type} takes no --lr_scheduler_kwargs")
    if args.mixed_precision == "fp16" and (args.cpu or not torch.accelerator.is_available()):
        raise ValueError("--mixed_precision fp16 needs an accelerator; on the CPU use bf16")
    if args.mixed_precision == "bf16" and (args.cpu or not torch.accelerator.is_available()):
        capabilities = getattr(torch.cpu, "get_capabilities", None)  # older versions of torch lack it
        found = capabilities() if capabilities is not None else None
        if found is not None and not any(found.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")):
            logger.warning(
                "--mixed_precision bf16: this CPU has no bfloat16 instructions; training will be many times slower "
                "than with --mixed_precision no"
            )
    if (args.hub_model_id or args.hub_private_repo) and not args.push_to_hub:
        raise ValueError("--hub_model_id and --hub_private_repo need --push_to_hub")
    if args.resume_from_checkpoint and args.overwrite_output_dir:
        raise ValueError(
            "--resume_from_checkpoint goes on with what --overwrite_output_dir removes from --output_dir: give one"
        )
    if args.with_tracking:
        _check_trackers(args.report_to)


def only_evaluates(args: argparse.Namespace) -> bool:
    """Whether the run has no training step: `--num_train_epochs 0` without `--max_train_steps`."""
    return args.max_train_steps is None and args.num_train_epochs == 0


def _check_trackers(report_to: str) -> None:
    # accelerate itself leaves out a tracker that is not installed without a word.
    known = [str(LoggerType(name)) for name in LoggerType.list()]
    installed = [str(name) for name in get_available_trackers()]
    if report_to not in known:
        raise ValueError(f"--report_to must be one of {', '.join(known)}, got {report_to!r}")
    if not installed or (report_to != "all" and report_to not in installed):
        raise ValueError(
            f"--with_tracking --report_to {report_to}: not installed (pip install "
            f"{'tensorboard' if report_to == 'all' else report_to}); installed: {', '.join(installed) or 'none'}"
        )


def _check_ranges(args: argparse.Namespace) -> None:
    at_least_one = [
        "max_length",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "logging_steps",
        "max_train_steps",
        "max_train_samples",
        "max_eval_samples",
        "eval_steps",
        "save_total_limit",
        "early_stopping_patience",
        "pad_to_multiple_of",
    ]
    at_least_zero = [
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "num_train_epochs",
        "num_warmup_steps",
        "dataloader_num_workers",
        "adam_epsilon",
        "seed",
    ]
    for name in at_least_one:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    for name in at_least_zero:
        value = getattr(args, name, None)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"--{name} must be at least 0, got {value}")
    if args.peak_tflops is not None and not (args.peak_tflops > 0 and math.isfinite(args.peak_tflops)):
        raise ValueError(f"--peak_tflops must be above 0, got {args.peak_tflops}")
    for name in ["dropout_rate", "warmup_ratio", "adam_beta1", "adam_beta2"]:
        value = getattr(args, name, None)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"--{name} must be in [0, 1), got {value}")


def resume_fingerprint(args: argparse.Namespace, own: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments that a resumed run must share with the interrupted one, by name (see `TrainState`).

    Args:
        args: The run's.
        own: Names of further ones, which only this script has.
    """
    return {name: getattr(args, name) for name in (*own, *RESUME_ARGUMENTS) if hasattr(args, name)}
