"""Dataloaders whose order depends only on the seed and the epoch, so that a run can resume anywhere in an epoch."""

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
    """A collection of examples that is accessed by index."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the example with this index."""


@dataclass(frozen=True)
class TrainingBatches:
    """The training batches of a run.

    Attributes:
        loader: Yields the batches; prepared by Accelerate.
        start_epoch: Called with the number of the epoch when it starts.
        count: The number of batches per process and epoch. None for a stream of unknown length.
        examples: The number of examples per epoch. None for a stream.
        seek: Continues in the middle of an epoch; see `TrainingLoop`. None: the batches are read again and skipped.
    """

    loader: Any
    start_epoch: Callable[[int], None]
    count: int | None = None
    examples: int | None = None
    seek: Callable[[int, list[int]], None] | None = None


# The label of tokens without a loss, as in PyTorch's cross-entropy.
IGNORED_LABEL = -100


class EpochSampler(Sampler[int]):
    """Shuffles example indices by seed and epoch, optionally in batches of examples of similar length.

    The sampler has no random state: after `start_epoch(n)` each iteration yields the n-th order. The method is not
    called `set_epoch`, because Accelerate calls a method of that name with its own count, which starts again at 0 in
    a resumed run.

    Args:
        length: The number of examples.
        seed: The random seed.
        group_lengths: The number of tokens of each example, to group examples by length. None: no groups.
        batch_size: The size of the batches in which examples are grouped.

    Example:
        ```python
        sampler = EpochSampler(length=1000, seed=42)
        sampler.start_epoch(3)
        order = list(sampler)
        ```
    """

    def __init__(self, length: int, seed: int, group_lengths: Sequence[int] | None = None, batch_size: int = 1):
        if length < 1:
            raise ValueError("There are no training examples.")
        self.length, self.seed, self.batch_size = length, seed, batch_size
        self.group_lengths = list(group_lengths) if group_lengths is not None else None
        self.epoch = 0

    def start_epoch(self, epoch: int) -> None:
        """Select the epoch (from 0) whose order the sampler yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # Not seed + epoch, because seed 1 would then have the orders of seed 0 one epoch later.
        seed = int(torch.randint(2**62, (self.epoch + 1,), generator=torch.Generator().manual_seed(self.seed))[-1])
        generator = torch.Generator().manual_seed(seed)
        if self.group_lengths is None:
            return iter(torch.randperm(self.length, generator=generator).tolist())
        indices = get_length_grouped_indices(self.group_lengths, self.batch_size, generator=generator)
        return iter(self._shuffle_batches(indices, generator))

    def _shuffle_batches(self, indices: list[int], generator: torch.Generator) -> list[int]:
        """Shuffle the batches of indices that are grouped by length."""
        # Within groups of fifty batches, the lengths decrease. Without shuffling, the model would see long and short
        # texts in turns and forget one while it learns the other. The longest batch stays first, so that a lack of
        # memory shows at once, and an incomplete batch stays last.
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
    """Create a training dataloader that does not use the global random state, so that dropout resumes exactly.

    `collate` must depend only on the examples, because batches are prepared before the step that uses them.
    """
    return _make_dataloader(data, seed, num_workers, batch_size=batch_size, sampler=sampler, collate_fn=collate)


def prepare_train_dataloader(
    settings: FineTuningSettings,
    accelerator: Accelerator,
    rows: Rows,
    collate: Callable[[list], Any],
    lengths: Callable[[], Sequence[int]],
) -> tuple[DataLoader | list, EpochSampler]:
    """Create and prepare the training dataloader for the settings.

    Args:
        settings: The settings of the run.
        accelerator: The accelerator of the run.
        rows: The training examples.
        collate: Makes a batch from a list of examples.
        lengths: Returns the length of each example. It is called only if `group_by_length` is set.

    Returns:
        The dataloader (an empty list if there are no rows, in a run that only evaluates) and its sampler.
    """
    batch_size, seed = settings.per_device_train_batch_size, settings.seed
    group_lengths = lengths() if settings.group_by_length else None
    sampler = EpochSampler(max(len(rows), 1), seed, group_lengths, batch_size * accelerator.num_processes)
    if not len(rows):
        return [], sampler
    data: Any = rows  # PyTorch accepts any object with these two methods
    loader = create_train_dataloader(data, sampler, batch_size, collate, seed, settings.dataloader_num_workers)
    return accelerator.prepare(loader), sampler


def create_stream_dataloader(
    accelerator: Accelerator, stream: IterableDataset, seed: int, num_workers: int = 0
) -> DataLoader:
    """Create and prepare a dataloader for a stream of batches in which each process has its own batches.

    `num_workers` is 0 or 1. Accelerate's preparation is not used, because it would read only on the main process, fill
    the last batch with rows of the first one, and use the random state of dropout.
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
    """Create a dataloader in the order of the data, which does not use the global random state."""
    return _make_dataloader(data, 0, num_workers, batch_size=batch_size, collate_fn=collate)


def prepare_eval_dataloader(
    settings: DataSettings,
    accelerator: Accelerator,
    rows: Rows,
    lengths: Sequence[int],
    collate: Callable[[list], Any],
) -> tuple[DataLoader, list[int]]:
    """Create and prepare a dataloader with the longest rows first.

    This order needs little padding, and a lack of memory shows at once.

    Returns:
        The dataloader, and the indices of the rows in its order, for `restore_row_order`.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    data: Any = rows
    loader = create_eval_dataloader(
        Subset(data, order), settings.per_device_eval_batch_size, collate, settings.dataloader_num_workers
    )
    return accelerator.prepare(loader), order


def restore_row_order(outputs: Tensor, order: Sequence[int]) -> np.ndarray:
    """Return outputs for the rows of `prepare_eval_dataloader` in the original order of the rows.

    Args:
        outputs: [rows, ...], in the order of the dataloader.
        order: The indices of the rows in the order of the dataloader.
    """
    restored = np.empty(outputs.shape, dtype=outputs.numpy().dtype)
    restored[list(order)] = outputs.numpy()
    return restored


def _make_dataloader(data: Dataset, seed: int, num_workers: int, **options: Any) -> DataLoader:
    """Create a dataloader with its own random generator and workers that ignore stop signals."""
    on_gpu = bool(PartialState._shared_state) and PartialState().device.type == "cuda"
    return DataLoader(
        data,
        num_workers=num_workers,
        worker_init_fn=_ignore_stop_signals,
        # Without its own generator, each new iterator would draw a seed from the random state of dropout.
        generator=torch.Generator().manual_seed(seed),
        pin_memory=on_gpu and torch.cuda.is_available(),  # do not touch a GPU that the run does not use
        **options,
    )


def _ignore_stop_signals(worker: int) -> None:
    """Ignore SIGTERM and Ctrl-C in a dataloader worker."""
    # All processes of a job receive them, but the loop needs its workers until it has saved a checkpoint.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
