"""Checkpoints read and written tensor by tensor: safetensors files, or pickles read on request.

No reader holds more than one tensor, or one chunk of it, in memory. The safetensors format: 8 bytes of header length
(little-endian), a JSON header with each tensor's dtype, shape and byte range, then the bytes. `safetensors.safe_open`
would do less here: it maps files, so a file cut while it is read ends the process (SIGBUS) and its pages count as
memory; its errors do not tell a short file from a long one; and it slices rows, where packed dtypes need bytes.
"""

import json
import math
import os
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from ...files import INDEX_NAME, PICKLE_INDEX_NAME, PICKLE_WEIGHTS_NAME, WEIGHTS_NAME
from .source import check_no_pickle

__all__ = [
    "DTYPE_NAMES",
    "TORCH_DTYPES",
    "CheckpointReader",
    "SafetensorsWriter",
    "TensorEntry",
    "cast",
    "checked_finite",
    "dtype_name",
    "element_size",
    "open_checkpoint",
    "write_index",
]

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CASTABLE = ("F64", "F32", "F16", "BF16")
CHUNK_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype.

    Raises:
        ValueError: if the format has none.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"safetensors cannot store tensors of {dtype}.")
    return DTYPE_NAMES[dtype]


def element_size(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        ValueError: for a dtype that cannot be written.
    """
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"tensors of dtype {dtype} cannot be written.")
    return TORCH_DTYPES[dtype].itemsize


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, dtype by its safetensors name, shape, and its range of bytes in the file's data."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes; a ValueError for a dtype that cannot be written."""
        return self.numel * element_size(self.dtype)

    @property
    def is_floating(self) -> bool:
        """Whether the elements are floating-point numbers of a type that `--dtype` converts."""
        return self.dtype in CASTABLE


def checked_finite(tensor: torch.Tensor, name: str, place: object = "the model") -> torch.Tensor:
    """Return a tensor whose numbers are all finite.

    Raises:
        ValueError: for one that holds NaN or infinite numbers, of which no conversion makes anything.
    """
    if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
        lowest, largest = (tensor.float() if tensor.element_size() == 1 else tensor.detach()).aminmax()
        if not (lowest.isfinite() and largest.isfinite()):
            kind = "NaN" if largest.isnan() or lowest.isnan() else "infinite numbers"
            raise ValueError(f"{place}: the tensor {name!r} holds {kind}; mend the checkpoint, or train it again.")
    return tensor


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert a tensor's elements to `dtype`.

    Raises:
        ValueError: if a finite number becomes infinite.
    """
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        overflowed = torch.isinf(converted) & ~torch.isinf(tensor)
        if overflowed.any():
            raise ValueError(f"{name!r} holds numbers too large for {dtype}; choose bfloat16 or float32.")
    return converted


class CheckpointReader(ABC):
    """The tensors of a checkpoint folder, read one at a time; a ValueError for one that is not finite.

    Attributes:
        folder: the checkpoint's folder.
        files: the weight files in order.
        entries: every tensor's `TensorEntry` by name, in the order of the files.
        index_metadata: the index's `metadata`, or None where the weights are one file.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        self.folder, self.files, self.index_metadata = folder, files, index_metadata
        self.entries: dict[str, TensorEntry] = {}

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in memory of its own."""

    @abstractmethod
    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield one tensor's elements as short flat tensors (uint8 where torch has no such dtype)."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SafetensorsReader(CheckpointReader):
    """Reads safetensors files; every header and file size is checked before the first tensor is read.

    Raises:
        OSError: for a file that is missing or shorter than its header says.
        ValueError: for a header or an index that is not one.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        super().__init__(folder, files, index_metadata)
        self._data_starts: dict[str, int] = {}
        self._handles: dict[str, BufferedReader] = {}
        for file in files:
            start, entries = _read_safetensors_header(folder / file)
            self._data_starts[file] = start
            for name, entry in entries.items():
                if name in self.entries:
                    raise ValueError(
                        f"{folder}: tensor {name!r} is in both {self.entries[name].file} and {file}; remove one."
                    )
                self.entries[name] = entry

    def read(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        if entry.dtype not in TORCH_DTYPES:
            raise ValueError(f"{self.folder / entry.file}: {name!r} has dtype {entry.dtype}, which torch cannot read.")
        elements = self._elements(entry, entry.begin, entry.end, TORCH_DTYPES[entry.dtype])
        return checked_finite(elements, name, self.folder / entry.file).reshape(entry.shape)

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        entry = self.entries[name]
        dtype = TORCH_DTYPES.get(entry.dtype, torch.uint8)
        for begin in range(entry.begin, entry.end, CHUNK_BYTES):
            elements = self._elements(entry, begin, min(begin + CHUNK_BYTES, entry.end), dtype)
            yield checked_finite(elements, name, self.folder / entry.file)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _elements(self, entry: TensorEntry, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        handle = self._handles.get(entry.file)
        if handle is None:
            handle = self._handles[entry.file] = open(self.folder / entry.file, "rb")
        buffer = bytearray(end - begin)
        handle.seek(self._data_starts[entry.file] + begin)
        if handle.readinto(buffer) != len(buffer):
            raise OSError(f"{self.folder / entry.file} became shorter while it was read.")
        return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)


class PickleReader(CheckpointReader):
    """Reads `torch.save` files with `weights_only=True`, memory-mapped where their format allows it.

    Raises:
        ValueError: for a file that holds more than tensors.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        super().__init__(folder, files, index_metadata)
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            for name, tensor in _load_pickle(folder / file).items():
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError(f"{folder / file}: {name!r} is a {type(tensor).__name__}, not a tensor.")
                if name in self.entries:
                    raise ValueError(f"{folder}: tensor {name!r} is in both {self.entries[name].file} and {file}.")
                self.entries[name] = TensorEntry(file, dtype_name(tensor.dtype), tuple(tensor.shape))
                self._tensors[name] = tensor

    def read(self, name: str) -> torch.Tensor:
        return checked_finite(self._tensors[name], name, self.folder / self.entries[name].file).clone()

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        flat = self._tensors[name].contiguous().reshape(-1)
        for chunk in flat.split(max(1, CHUNK_BYTES // flat.element_size())):
            yield checked_finite(chunk, name, self.folder / self.entries[name].file)

    def close(self) -> None:
        self._tensors.clear()


def open_checkpoint(folder: str | os.PathLike, allow_pickle: bool = False) -> CheckpointReader:
    """Open the weights of a checkpoint folder: one safetensors file, or shards with an index.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and its shards, or their pickle twins.
        allow_pickle: read pytorch_model.bin where there is no safetensors file.

    Raises:
        OSError: for a folder without weights, a missing or a truncated file.
        ValueError: for a corrupt header or index, or a pickle that was not allowed.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_NAME).is_file():
        return SafetensorsReader(folder, [WEIGHTS_NAME])
    if (folder / INDEX_NAME).is_file():
        return SafetensorsReader(folder, *_read_index(folder / INDEX_NAME))
    pickles = [name for name in (PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME) if (folder / name).is_file()]
    if not pickles:
        raise FileNotFoundError(
            f"{folder} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}: not a safetensors checkpoint."
        )
    if not allow_pickle:
        check_no_pickle(str(folder), pickles)
    if pickles[0] == PICKLE_WEIGHTS_NAME:
        return PickleReader(folder, pickles[:1])
    return PickleReader(folder, *_read_index(folder / PICKLE_INDEX_NAME))


def _read_index(path: Path) -> tuple[list[str], dict[str, Any]]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of shards ({type(error).__name__}: {error}).") from error
    for file in files:
        # A path in an index would let a checkpoint read, and its conversion write, outside its folder.
        if not isinstance(file, str) or file in ("", ".", "..") or any(character in file for character in "/\\:\0"):
            raise ValueError(f"{path} names the shard {file!r}; a shard must be a file in the same folder.")
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path.parent}: {len(missing)} of {len(files)} shards are missing: {', '.join(sorted(missing)[:5])}; "
            "download the checkpoint again."
        )
    metadata = index.get("metadata")
    return sorted(files), metadata if isinstance(metadata, dict) else {}


def _read_safetensors_header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if length < 0:
            raise OSError(f"{path} is truncated: {size} bytes are no safetensors file; download it again.")
        if prefix.startswith(b"version "):
            raise OSError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull`.")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header would be {length} bytes long.")
        if 8 + length > size:
            raise OSError(f"{path} is truncated inside its header ({size} bytes); download it again.")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {
            name: TensorEntry(path.name, fields["dtype"], tuple(fields["shape"]), *fields["data_offsets"])
            for name, fields in header.items()
        }
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
        data_end = _checked_data_end(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} has a corrupt header ({type(error).__name__}: {error}); download it again."
        ) from error
    expected = 8 + length + data_end
    if size < expected:
        raise OSError(f"{path} is truncated: {size:,} bytes of {expected:,}; download it again.")
    if size > expected:
        raise ValueError(f"{path} is {size:,} bytes long, its header describes {expected:,}; download it again.")
    return 8 + length, entries


def _checked_data_end(entries: Mapping[str, TensorEntry]) -> int:
    position = 0
    for name, entry in entries.items():
        if type(entry.begin) is not int or type(entry.end) is not int:
            raise ValueError(f"the bytes of {name!r} are [{entry.begin!r:.40}, {entry.end!r:.40}), no whole numbers")
        if not isinstance(entry.dtype, str) or not all(type(n) is int and n >= 0 for n in entry.shape):
            raise ValueError(f"{name!r} has dtype {entry.dtype!r} and shape {entry.shape!r}")
        if entry.begin != position or entry.end < entry.begin:
            raise ValueError(
                f"the bytes of {name!r} are [{entry.begin}, {entry.end}), expected to start at {position}"
            )
        if entry.dtype in TORCH_DTYPES and entry.end - entry.begin != entry.nbytes:
            raise ValueError(f"{name!r} has {entry.end - entry.begin} bytes for {entry.dtype} {list(entry.shape)}")
        position = entry.end
    return position


def _load_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files from before torch 1.6 are no zip archives and cannot be mapped.
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read with weights_only=True: {reason}") from error
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{path} holds a {type(tensors).__name__}, not the tensors of a model by name.")
    return tensors


class SafetensorsWriter:
    """Writes one safetensors file tensor by tensor, in any order; the header is written first.

    Args:
        path: the file; must not exist.
        tensors: every tensor's dtype (safetensors name) and shape, by name.
        metadata: the header's strings.

    Raises:
        KeyError: for a tensor that is unknown or written twice.
        ValueError: for a tensor of another dtype or shape, or (at `close`) a missing one.
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
        entry = self._layout[name]
        if tuple(tensor.shape) != entry.shape or tensor.dtype != TORCH_DTYPES.get(entry.dtype):
            raise ValueError(
                f"{self.path.name}: {name!r} was announced as {entry.dtype} {list(entry.shape)} and came as "
                f"{tensor.dtype} {list(tensor.shape)}."
            )
        self.write_chunks(name, [tensor.detach().to("cpu").contiguous().reshape(-1)])

    def write_chunks(self, name: str, chunks: Iterable[torch.Tensor]) -> None:
        """Write a tensor's elements, given as flat tensors one after another."""
        entry = self._layout[name]
        self._file.seek(self._start + entry.begin)
        written = 0
        for chunk in chunks:
            written += self._file.write(chunk.view(torch.uint8).numpy().data)
        if written != entry.end - entry.begin:
            raise ValueError(
                f"{self.path.name}: {name!r} has {entry.end - entry.begin} bytes, {written} were written."
            )
        self._missing.remove(name)

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
