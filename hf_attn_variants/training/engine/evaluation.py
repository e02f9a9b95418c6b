"""One pass of a model over rows that it is evaluated or predicts on, on every process."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...errors import NonFiniteLossError
from .dataloaders import in_rows_order
from .settings import OutputSettings
from .tracking import progress_bar

__all__ = ["Scores", "run_rows"]


class Scores:
    """Computes dev metrics when called, and keeps them; what an `Evaluator` is made of.

    Args:
        compute: returns the dev metrics, by name without "eval_".
    """

    def __init__(self, compute: Callable[[], dict[str, float]]):
        self.compute = compute
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        start = time.perf_counter()
        self.metrics = self.compute()
        self.seconds = time.perf_counter() - start
        return dict(self.metrics)


@torch.no_grad()
def run_rows(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader,
    order: Sequence[int],
    outputs: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
    name: str,
    settings: OutputSettings,
) -> list[np.ndarray]:
    """Run a model over the rows of `prepare_eval_dataloader`.

    Args:
        accelerator, model: the run's.
        loader, order: the batches, and which rows they hold.
        outputs: a batch -> tensors [b, ...] of one shape beyond b for all batches.
        name: what the progress bar says.
        settings: the run's: whether there is a bar.

    Returns:
        Each of the tensors for all rows, in the rows' own order.

    Raises:
        NonFiniteLossError: if some of them are NaN or infinite: the likeliest of these is the first class or word, and
            would be scored as an answer. Minus infinity is what there is no choice for.
    """
    model.eval()
    gathered: list[Any] = []
    for batch in progress_bar(
        accelerator, settings.disable_tqdm, iterable=loader, desc=f"Running {name}", leave=False
    ):
        # Rows repeated to fill the last batch of each process are left out again.
        gathered.append([part.cpu() for part in accelerator.gather_for_metrics(outputs(batch))])
    parts = [torch.cat(each) for each in zip(*gathered, strict=True)]
    _check_numbers(parts, name)
    return [in_rows_order(part, order) for part in parts]


def _check_numbers(parts: Sequence[Tensor], name: str) -> None:
    """Check that no row has an output that is NaN or infinite; minus infinity stands for none."""
    bad_parts = [part.isnan() | part.isposinf() for part in parts]
    rows = torch.stack([part.flatten(1).any(1) if part.dim() > 1 else part for part in bad_parts]).any(0)
    if bad := int(rows.sum()):
        raise NonFiniteLossError(
            f"the model's outputs are NaN or infinite for {bad} of {len(rows)} rows of {name}: no scores are made. "
            "Its weights have NaN in them, or its numbers grow too large: try --mixed_precision no"
        )
