"""Which attentions are recorded in one pass over a calibration, so that what is recorded fits into memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..attention_modules import AttentionModule

__all__ = ["recorded_together"]

# What recorded inputs may take; more modules than fit into it are recorded in several passes over the text.
MAX_RECORDED_BYTES = 3 * 2**30


def recorded_together(
    modules: list[AttentionModule], model_class: Any, config: Any, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[list[AttentionModule]]:
    """Split the modules so that what is recorded for each part fits into `MAX_RECORDED_BYTES`.

    An attention's own inputs count for each, the encoder's outputs once for all cross-attentions.
    """
    read, written = map(sum, zip(*map(_positions, batches), strict=True))

    def size(module: AttentionModule, others: list[AttentionModule]) -> int:
        own = (written if module.site.stack == "decoder" else read) * model_class.module_runs(config, module.name)
        is_first = module.site.is_cross_attention and not any(other.site.is_cross_attention for other in others)
        return (own + (read if is_first else 0)) * config.hidden_size * 4

    group: list[AttentionModule] = []
    total = 0
    for module in modules:
        if group and total + size(module, group) > MAX_RECORDED_BYTES:
            yield group
            group, total = [], 0
        total += size(module, group)
        group.append(module)
    if group:
        yield group


def _positions(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return how many positions the encoder (or the only stack) and the decoder read of a batch.

    Of audio's features [b, bins, frames] the encoder reads every other frame.
    """
    audio = batch.get("input_features")
    read = batch["input_ids"].numel() if audio is None else audio[:, 0].numel() // 2
    return read, batch["decoder_input_ids"].numel() if "decoder_input_ids" in batch else read
