"""More positions for a checkpoint that has learned ones: those it has, repeated or stretched.

"tiled": those there are, again and again (arXiv 2004.05150, section 5). "interpolated": stretched to the new number,
each new one between two old neighbours in proportion (arXiv 2306.15595, equation 4, of learned positions).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from ..model_history import read_json
from ..modeling.fields.field_checks import check_size
from ..modeling.mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ..registration import variant_config_class
from .checkpoint.tensor_files import CheckpointReader

__all__ = ["EXTENSIONS", "FIELDS", "lengthen_tokenizer", "with_positions"]

FIELD, EXTENSION = FIELDS = "max_position_embeddings", "position_extension"
WEIGHT = "embeddings.position_embeddings.weight"
EXTENSIONS = ("tiled", "interpolated")
# Buffers of old checkpoints, as long as the positions; they are left out, for models make them.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# The files beside a model that say how many tokens it reads, each with its field.
LENGTHS = {TOKENIZER_CONFIG_FILE: "model_max_length", "sentence_bert_config.json": "max_seq_length"}


class LongerCheckpoint(CheckpointReader):
    """A checkpoint with more learned positions than its files have; the files stay its reader's to close."""

    def __init__(self, stored: CheckpointReader, name: str, positions: int, first: int, extension: str) -> None:
        super().__init__(stored.folder, stored.files, stored.index_metadata)
        self.stored, self.name, self.positions, self.first, self.extension = stored, name, positions, first, extension
        self.entries = {each: entry for each, entry in stored.entries.items() if not each.endswith(BUFFERS)}
        width = stored.entries[name].shape[1]
        self.entries[name] = replace(stored.entries[name], shape=(positions, width))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor; of the positions [n, D] the first ones as they are, the others extended."""
        tensor = self.stored.read(name)
        if name != self.name:
            return tensor
        first, others = tensor[: self.first], tensor[self.first :]
        extend = _tiled if self.extension == "tiled" else _interpolated
        return torch.cat([first, extend(others, self.positions - self.first)])

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield one tensor's elements as short flat tensors."""
        return self.stored.chunks(name) if name != self.name else iter([self.read(name).flatten()])

    def close(self) -> None:
        """Do nothing."""


def _tiled(table: torch.Tensor, rows: int) -> torch.Tensor:
    return table.repeat(-(-rows // table.shape[0]), 1)[:rows]


def _interpolated(table: torch.Tensor, rows: int) -> torch.Tensor:
    # The first row and the last one stay.
    columns = table.float().T[None]  # [1, D, n]
    stretched = torch.nn.functional.interpolate(columns, rows, mode="linear", align_corners=True)
    return stretched[0].T.contiguous().to(table.dtype)


def with_positions(
    config: dict[str, Any], reader: CheckpointReader, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckpointReader]:
    """Return a checkpoint's configuration and tensors with as many positions as `fields` ask for, if they do.

    Args:
        config: its config.json.
        reader: its tensors.
        fields: of a conversion; `max_position_embeddings` counts as the configuration does, RoBERTa's first ones
            among them, which no token has. `position_extension` is one of `EXTENSIONS`; None = "tiled".

    Raises:
        ValueError: for a model without learned positions like BERT's, a number that is not larger than it has, an
            unknown extension, or one without a number, and for linformer, whose sums are over those there are.
    """
    positions, extension = (fields.get(name) for name in FIELDS)
    if extension is not None and extension not in EXTENSIONS:
        names = ", ".join(f'"{name}"' for name in EXTENSIONS)
        raise ValueError(f"`{EXTENSION}` must be one of {names}; got {extension!r}.")
    if positions is None:
        if extension is not None:
            raise ValueError(f"`{EXTENSION}` says how positions are made more: give `{FIELD}` too; got {extension!r}.")
        return config, reader
    tables = [name for name in reader.entries if name.endswith(WEIGHT)]
    if len(tables) != 1:
        raise ValueError(
            f"`{FIELD}` is for the learned positions of BERT and its relatives, which {config.get('model_type')!r} "
            "checkpoints have not."
        )
    now = reader.entries[tables[0]].shape[0]
    check_size(FIELD, positions, now + 1)
    kernel = config.get("attention_kernel")
    if kernel in KERNELS and kernel_class(kernel).counts_tokens:
        raise ValueError(f"`{FIELD}` cannot change in a model with {kernel}, which has learned sums over {now}.")
    longer = LongerCheckpoint(reader, tables[0], positions, _without_token(config), extension or EXTENSIONS[0])
    return config | {FIELD: positions}, longer


def lengthen_tokenizer(stage: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Let the tokenizer beside a converted model, and sentence-transformers, read as many tokens as it has positions.

    Args:
        stage: the new folder.
        config: the new config.json.
        fields: of the conversion.
    """
    if fields.get(FIELD) is None:
        return
    for file, name in LENGTHS.items():
        path = stage / file
        if (found := read_json(path)) is not None:
            values = found | {name: fields[FIELD] - _without_token(config)}
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _without_token(config: Mapping[str, Any]) -> int:
    """Return how many positions no token has: RoBERTa numbers them from behind the padding token's number on."""
    after_padding = variant_config_class(config.get("model_type", "")).positions_after_padding
    return config.get("pad_token_id", 1) + 1 if after_padding else 0
