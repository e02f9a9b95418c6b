"""One pass of a model over rows that it is evaluated or predicts on, on every process."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
    """
    model.eval()
    gathered: list[Any] = []
    for batch in progress_bar(
        accelerator, settings.disable_tqdm, iterable=loader, desc=f"Running {name}", leave=False
    ):
        # Rows repeated to fill the last batch of each process are left out again.
        gathered.append([part.cpu() for part in accelerator.gather_for_metrics(outputs(batch))])
    return [in_rows_order(torch.cat(parts), order) for parts in zip(*gathered, strict=True)]
