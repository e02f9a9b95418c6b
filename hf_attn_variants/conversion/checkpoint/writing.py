"""A safetensors file written tensor by tensor, and the index of several; `reading` tells of the format."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .entries import TORCH_DTYPES, TensorEntry, element_size

__all__ = ["SafetensorsWriter", "write_index"]


class SafetensorsWriter:
    """Writes one safetensors file tensor by tensor, in any order; the header is written first.

    Args:
        path: the file; must not exist.
        tensors: every tensor's dtype (safetensors name) and shape, by name.
        metadata: the header's strings.

    Raises:
        ValueError: for a tensor that is unknown, written twice, of another dtype or shape, or (at `close`) missing.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
    ):
        self.path = path
        self._layout: dict[str, TensorEntry] = {}
        # Wide elements first, as the format's own serialiser does: each tensor starts on a multiple of its element.
        position = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -element_size(item[1][0])):
            begin, position = position, position + math.prod(shape) * element_size(dtype)
            self._layout[name] = TensorEntry(path.name, dtype, tuple(shape), begin, position)
        header = _header_bytes(self._layout, metadata or {})
        self._start = len(header)
        self._missing = set(self._layout)
        self._file = open(path, "xb")
        self._file.write(header)
        self._file.truncate(self._start + position)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor."""
        entry = self._layout.get(name)
        if entry is not None and (tuple(tensor.shape) != entry.shape or tensor.dtype != TORCH_DTYPES.get(entry.dtype)):
            raise ValueError(
                f"{self.path.name}: {name!r} was announced as {entry.dtype} {list(entry.shape)} and came as "
                f"{tensor.dtype} {list(tensor.shape)}."
            )
        self.write_chunks(name, [tensor.detach().to("cpu").contiguous().reshape(-1)])

    def write_chunks(self, name: str, chunks: Iterable[torch.Tensor]) -> None:
        """Write a tensor's elements, given as flat tensors one after another."""
        if name not in self._missing:
            state = "written twice" if name in self._layout else "not in the header"
            raise ValueError(f"{self.path.name}: tensor {name!r} is {state}.")
        entry = self._layout[name]
        self._file.seek(self._start + entry.begin)
        written = 0
        for chunk in chunks:
            written += self._file.write(chunk.view(torch.uint8).numpy().data)
        if written != entry.end - entry.begin:
            raise ValueError(
                f"{self.path.name}: {name!r} has {entry.end - entry.begin} bytes, {written} were written."
            )
        self._missing.discard(name)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
        if self._missing:
            raise ValueError(
                f"{self.path.name}: {len(self._missing)} tensors were not written, e.g. {min(self._missing)!r}."
            )

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._file.close()
        if kind is None:
            self.close()


def write_index(path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, Any], size: int) -> None:
    """Write the index of a sharded checkpoint of `size` bytes.

    The sizes that the source's `metadata` tells are brought up to date, the rest of it is kept.
    """
    metadata = dict(metadata) | {"total_size": size}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(entry.numel for entry in entries.values())
    index = {"metadata": metadata, "weight_map": {name: entry.file for name, entry in sorted(entries.items())}}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header_bytes(layout: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in layout.items():
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
