"""What a way of pretraining is: how blocks of tokens become examples, their loss, and the sums they are scored by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..engine.dataloaders import TrainingBatches, create_stream_dataloader
from ..engine.losses import Objective
from ..engine.settings import TrainingSettings
from .text_shards import TextSource
from .text_stream import TextStream

__all__ = ["BlockPreparation", "PreparedBlocks", "PretrainingTask", "stream_batches"]


class BlockPreparation(Protocol):
    """Makes an example of a block of tokens."""

    block_length: int
    separator: int  # the token that ends each article

    @property
    def takes_other_block(self) -> bool:
        """Whether it is called with another block of the text as well, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Return arrays of one shape for every block; `key` and the run's seed alone decide what is random.

        Called with `block`, its `key` and, where it takes one, another block or None.
        """


class PreparedBlocks(Dataset):
    """Held-out blocks, prepared in the same way at every evaluation, and in every run of one seed."""

    def __init__(self, blocks: Sequence[np.ndarray], prepare: BlockPreparation):
        self.blocks, self.prepare = blocks, prepare

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not self.prepare.takes_other_block:
            return self.prepare(self.blocks[index], (0, index))
        # From far away: text nearby may be of the same article.
        other = self.blocks[(index + len(self) // 2) % len(self)] if len(self) > 1 else None
        return self.prepare(self.blocks[index], (0, index), other)


@dataclass(frozen=True)
class PretrainingTask:
    """What is special about a way of pretraining.

    Attributes:
        name: shown above the curves.
        row_sums: (model, batch) -> of each example the sum of its items' losses, how many of them are right, and how
            many there are [b, 3]; with a sentence task also those three of its pair [b, 6].
        items: what the number of items is called among the metrics.
        shuffle: a batch -> the same with its words in another order, always the same one.
        results: entries that `all_results.json` gets besides the shared ones.
        without_context: what a model is called that does not read its context.
    """

    name: str
    prepare: BlockPreparation
    objective: Objective
    row_sums: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    items: str
    shuffle: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    results: dict[str, Any] = field(default_factory=dict)
    without_context: str = "unigram"


def stream_batches(
    settings: TrainingSettings,
    accelerator: Accelerator,
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    prepare: BlockPreparation,
    window: int,
) -> TrainingBatches:
    """Make the training batches of a stream of text, shuffled within windows of so many blocks; see `TextStream`."""
    stream = TextStream(
        sources,
        tokenizer,
        prepare.block_length,
        prepare.separator,
        prepare,
        settings.per_device_train_batch_size,
        settings.seed,
        window,
        accelerator.process_index,
        accelerator.num_processes,
        prepare.takes_other_block,
    )
    loader = create_stream_dataloader(accelerator, stream, settings.seed, settings.dataloader_num_workers)
    return TrainingBatches(loader, stream.start_epoch, seek=stream.seek)
