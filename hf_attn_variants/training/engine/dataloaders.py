"""Batches whose order is a function of the seed and the epoch alone, so that a run can resume anywhere in an epoch."""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset
from transformers.trainer_pt_utils import get_length_grouped_indices

from .checkpoints import STOP_SIGNALS
from .settings import DataSettings, FineTuningSettings

__all__ = [
    "IGNORED_LABEL",
    "EpochSampler",
    "Rows",
    "TrainingBatches",
    "create_eval_dataloader",
    "create_stream_dataloader",
    "create_train_dataloader",
    "prepare_eval_dataloader",
    "prepare_train_dataloader",
    "restore_row_order",
]


class Rows(Protocol):
    """Examples by index."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one."""


@dataclass(frozen=True)
class TrainingBatches:
    """A run's training batches.

    Attributes:
        loader: yields them; prepared by accelerate.
        start_epoch: is told the epoch that begins.
        count: how many each process sees in an epoch; None for a stream, whose length nobody knows.
        examples: how many there are in an epoch; None for a stream.
        seek: where to go on in a resumed epoch, see `TrainingLoop`; None: batches are read again.
    """

    loader: Any
    start_epoch: Callable[[int], None]
    count: int | None = None
    examples: int | None = None
    seek: Callable[[int, list[int]], None] | None = None


# The label of a token that is not to be predicted: torch's own default.
IGNORED_LABEL = -100


class EpochSampler(Sampler[int]):
    """Shuffles example indices by (seed, epoch), optionally in batches of examples of like length.

    It keeps no generator: after `start_epoch(n)` it yields the n-th order however often it is iterated. The method is
    not called `set_epoch`, which accelerate calls with a count of its own that a resumed dataloader does not continue.

    Args:
        group_lengths: tokens of each example, to group by length in batches of `batch_size`; None shuffles freely.
    """

    def __init__(self, length: int, seed: int, group_lengths: Sequence[int] | None = None, batch_size: int = 1):
        if length < 1:
            raise ValueError("there are no training examples")
        self.length, self.seed, self.batch_size = length, seed, batch_size
        self.group_lengths = list(group_lengths) if group_lengths is not None else None
        self.epoch = 0

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch whose order `__iter__` yields (counted from 0)."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # Not seed + epoch: the orders of seed 1 would be those of seed 0 an epoch later.
        seed = int(torch.randint(2**62, (self.epoch + 1,), generator=torch.Generator().manual_seed(self.seed))[-1])
        generator = torch.Generator().manual_seed(seed)
        if self.group_lengths is None:
            return iter(torch.randperm(self.length, generator=generator).tolist())
        indices = get_length_grouped_indices(self.group_lengths, self.batch_size, generator=generator)
        return iter(self._shuffle_batches(indices, generator))

    def _shuffle_batches(self, indices: list[int], generator: torch.Generator) -> list[int]:
        # Fifty batches at a time they come from long to short; a model would learn long texts and forget short ones in
        # turns. The longest batch stays first: memory that is too small fails at once. An incomplete one stays last.
        size = self.batch_size
        batches = [indices[start : start + size] for start in range(0, len(indices), size)]
        shuffled = torch.randperm(max(len(indices) // size - 1, 0), generator=generator) + 1
        order = [0, *shuffled.tolist(), *([len(batches) - 1] if len(indices) % size and len(batches) > 1 else [])]
        return [index for number in order for index in batches[number]]


def create_train_dataloader(
    data: Dataset,
    sampler: EpochSampler,
    batch_size: int,
    collate: Callable[[list], Any],
    seed: int,
    num_workers: int = 0,
) -> DataLoader:
    """Make a training dataloader that draws nothing from the global random state, so that dropout resumes exactly.

    `collate` must be a function of the examples alone: batches are prepared ahead of the step that uses them.
    """
    return _make_dataloader(data, seed, num_workers, batch_size=batch_size, sampler=sampler, collate_fn=collate)


def prepare_train_dataloader(
    settings: FineTuningSettings,
    accelerator: Accelerator,
    rows: Rows,
    collate: Callable[[list], Any],
    lengths: Callable[[], Sequence[int]],
) -> tuple[DataLoader | list, EpochSampler]:
    """Make the prepared training dataloader that the settings ask for, and the sampler that knows its epochs.

    Without rows (a run that only evaluates) there are no batches. `lengths` is called where it groups rows.
    """
    batch_size, seed = settings.per_device_train_batch_size, settings.seed
    group_lengths = lengths() if settings.group_by_length else None
    sampler = EpochSampler(max(len(rows), 1), seed, group_lengths, batch_size * accelerator.num_processes)
    if not len(rows):
        return [], sampler
    data: Any = rows  # torch takes all that has these two methods
    loader = create_train_dataloader(data, sampler, batch_size, collate, seed, settings.dataloader_num_workers)
    return accelerator.prepare(loader), sampler


def create_stream_dataloader(
    accelerator: Accelerator, stream: IterableDataset, seed: int, num_workers: int = 0
) -> DataLoader:
    """Make a prepared dataloader of a stream of batches that are each process's own, with 0 workers or 1.

    accelerate's own preparation would read on the main process alone, fill the last batch up with rows of the first,
    and draw from the random state that dropout uses.
    """
    return prepare_data_loader(
        _make_dataloader(stream, seed, num_workers, batch_size=None),
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        rng_types=[],
        dispatch_batches=False,
    )


def create_eval_dataloader(
    data: Dataset, batch_size: int, collate: Callable[[list], Any], num_workers: int = 0
) -> DataLoader:
    """Make a dataloader in the data's own order, which leaves the global random state alone as well."""
    return _make_dataloader(data, 0, num_workers, batch_size=batch_size, collate_fn=collate)


def prepare_eval_dataloader(
    settings: DataSettings,
    accelerator: Accelerator,
    rows: Rows,
    lengths: Sequence[int],
    collate: Callable[[list], Any],
) -> tuple[DataLoader, list[int]]:
    """Make a prepared dataloader of rows, longest first: little padding, and memory that is too small fails at once.

    Return it and the numbers of the rows in its order, for `restore_row_order`.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    data: Any = rows
    loader = create_eval_dataloader(
        Subset(data, order), settings.per_device_eval_batch_size, collate, settings.dataloader_num_workers
    )
    return accelerator.prepare(loader), order


def restore_row_order(found: Tensor, order: Sequence[int]) -> np.ndarray:
    """Return what `prepare_eval_dataloader`'s rows gave, a first dimension of rows, in the rows' own order."""
    restored = np.empty(found.shape, dtype=found.numpy().dtype)
    restored[list(order)] = found.numpy()
    return restored


def _make_dataloader(data: Dataset, seed: int, num_workers: int, **options: Any) -> DataLoader:
    on_gpu = bool(PartialState._shared_state) and PartialState().device.type == "cuda"
    return DataLoader(
        data,
        num_workers=num_workers,
        worker_init_fn=_ignore_stop_signals,
        # Without a generator of its own, each new iterator draws a seed from the one dropout uses.
        generator=torch.Generator().manual_seed(seed),
        pin_memory=on_gpu and torch.cuda.is_available(),  # a GPU that the run does not use is left alone
        **options,
    )


def _ignore_stop_signals(worker: int) -> None:
    # They are sent to all processes of a job, and the loop needs its workers until it has saved a checkpoint.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
