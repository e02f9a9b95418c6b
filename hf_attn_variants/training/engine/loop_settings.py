"""How long and in what rhythm a run trains, and by what a resumed run is known to be the same."""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .arguments import resume_fingerprint
from .optimization import warmup_steps

__all__ = ["LoopSettings", "total_training_steps"]

# What else decides the weights a run ends with where the best of its evaluations are kept.
BEST_WEIGHTS_ARGUMENTS = (
    "eval_steps",
    "max_eval_samples",
    "validation_file",
    "validation_source_file",
    "validation_target_file",
    "text_columns",
    "source_column",
    "target_column",
    "length_penalty",
    "no_repeat_ngram_size",
    "n_best_size",
    "max_answer_length",
    "null_score_diff_threshold",
)


@dataclass(frozen=True)
class LoopSettings:
    """How long and in what rhythm a run trains; the fields are the scripts' flags of the same names.

    Attributes:
        greater_is_better: Whether `metric_for_best_model` is to be raised.
        keep_best: Keep the weights of the best evaluation and end with them.
        fingerprint: Further settings that a resumed run must share (see `TrainState`).
    """

    output_dir: str
    total_steps: int
    max_train_minutes: float | None = None
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    logging_steps: int = 10
    eval_steps: int | None = None
    checkpointing_steps: int | str | None = None
    save_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    early_stopping_patience: int | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool = True
    keep_best: bool = False
    peak_tflops: float | None = None
    disable_tqdm: bool = False
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        total_steps: int,
        default_metric: str,
        greater_is_better: Callable[[str], bool],
        data: dict[str, Any],
        resume_arguments: Iterable[str] = (),
        evaluation: dict[str, Any] | None = None,
        **others: Any,
    ) -> "LoopSettings":
        """Takes the fields that `args` has from it, and makes the others of what a script says of itself.

        Args:
            args: Of `arguments.add_shared_arguments`.
            total_steps: Optimiser steps.
            default_metric: The dev metric that chooses the best weights where `--metric_for_best_model` names none.
            greater_is_better: Whether the metric of a name (without "eval_") is to be raised.
            data: What tells this run's training data from others, for the fingerprint.
            resume_arguments: Names of the script's own arguments that a resumed run must share.
            evaluation: What tells this run's dev data and its scoring from others, for the fingerprint where the best
                weights are kept.
            **others: Fields that are not as `args` has them.

        Raises:
            ValueError: The warm-up is longer than the run.
        """
        metric = (args.metric_for_best_model or default_metric).removeprefix("eval_")
        keep_best = args.metric_for_best_model is not None or args.early_stopping_patience is not None
        fields = {
            "total_steps": total_steps,
            "metric_for_best_model": metric,
            "greater_is_better": greater_is_better(metric),
            "keep_best": keep_best,
            "fingerprint": {
                **data,
                **(evaluation if keep_best and evaluation else {}),
                **resume_fingerprint(args, (*resume_arguments, *(BEST_WEIGHTS_ARGUMENTS if keep_best else ()))),
                "warm-up steps": warmup_steps(args, total_steps),
            },
            **others,
        }
        names = cls.__dataclass_fields__.keys() - fields.keys()
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)}, **fields)


def total_training_steps(
    batches_per_epoch: int | None, accumulation: int, epochs: float, max_steps: int | None
) -> int:
    """Counts the optimiser steps of a run.

    Args:
        batches_per_epoch: Batches each process sees in an epoch; None for a stream of unknown length.
        accumulation: Batches a step; the last step of an epoch may have fewer.
        epochs: Epochs, a fraction allowed.
        max_steps: Overrides `epochs`.

    Raises:
        ValueError: The length is unknown and no maximum is given.
    """
    if max_steps is not None:
        return max_steps
    if epochs == 0:
        return 0
    if batches_per_epoch is None:
        raise ValueError("a stream has no length: give --max_train_steps")
    return math.ceil(epochs * math.ceil(batches_per_epoch / accumulation))
