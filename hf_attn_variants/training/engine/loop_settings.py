"""How long and in what rhythm a run trains, and what a resumed run must share with the interrupted one."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

from .settings import TrainingSettings, warmup_steps

__all__ = ["LoopSettings", "greater_is_better", "total_training_steps"]

# The dev metrics that fall as a model gets better; all others rise.
FALLING_METRICS = re.compile(
    r"(\w+_)?(loss|perplexity|ppl|nll|cross_entropy|brier|[wctm]er|wil|r?mse|s?mape|mae|mase|error|distance|divergence)"
    r"(_mm|_rate|_score)?",
    re.IGNORECASE,
)


def greater_is_better(metric: str) -> bool:
    """Return whether a dev metric, named without "eval_", is to be raised."""
    return FALLING_METRICS.fullmatch(metric) is None


@dataclass(frozen=True)
class LoopSettings:
    """How long and in what rhythm a run trains; a field that a setting is named like has its value.

    Attributes:
        total_steps: optimiser steps.
        metric_for_best_model: the dev metric that tells the best weights, without "eval_".
        greater_is_better: whether it rises as the model gets better.
        keep_best: whether the weights of the best evaluation are kept, and the run ends with them.
        fingerprint: what a resumed run must share beyond what the loop knows (see `TrainState`).
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
    def from_settings(
        cls,
        settings: TrainingSettings,
        total_steps: int,
        default_metric: str,
        fingerprint: dict[str, Any],
        dev_fingerprint: dict[str, Any],
        **others: Any,
    ) -> "LoopSettings":
        """Make the loop's settings of a run's.

        Args:
            settings: of the run.
            total_steps: optimiser steps.
            default_metric: the dev metric that tells the best weights where the settings name none.
            fingerprint: what tells this run's training data from others.
            dev_fingerprint: what tells its dev data and their scoring from others; a resumed run must share it where
                the best weights are kept.
            **others: fields that are not as the settings have them.

        Raises:
            ValueError: if the warm-up is longer than the run.
        """
        keep_best = settings.keeps_best_weights
        metric = (settings.metric_for_best_model or default_metric).removeprefix("eval_")
        rises = settings.greater_is_better
        own = {
            "total_steps": total_steps,
            "metric_for_best_model": metric,
            "greater_is_better": greater_is_better(metric) if rises is None else rises,
            "keep_best": keep_best,
            "fingerprint": {
                **fingerprint,
                **(dev_fingerprint if keep_best else {}),
                **settings.resume_values(with_best_weights=keep_best),
                "warm-up steps": warmup_steps(settings, total_steps),
            },
            **others,
        }
        names = {each.name for each in dataclasses.fields(cls)} - own.keys()
        return cls(**{name: getattr(settings, name) for name in names}, **own)


def total_training_steps(
    batches_per_epoch: int | None, accumulation: int, epochs: float | None, max_steps: int | None
) -> int:
    """Return the optimiser steps of a run.

    Args:
        batches_per_epoch: batches that each process sees in an epoch; None for a stream of unknown length.
        accumulation: batches a step; the last step of an epoch may have fewer.
        epochs: epochs, a fraction allowed.
        max_steps: overrides `epochs`.

    Raises:
        ValueError: if the length is unknown and no maximum is given.
    """
    if max_steps is not None:
        return max_steps
    if epochs == 0:
        return 0
    if batches_per_epoch is None or epochs is None:
        raise ValueError("a stream has no length: give --max_train_steps")
    return math.ceil(epochs * math.ceil(batches_per_epoch / accumulation))
