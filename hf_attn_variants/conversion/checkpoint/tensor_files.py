"""Reading and writing checkpoints tensor by tensor: safetensors files, or pickles on request.

A reader holds at most one tensor, or one chunk of it, in memory. A safetensors file consists of 8 bytes with the
length of the header (little-endian), a JSON header with the dtype, shape and byte range of each tensor, and the bytes.
`safetensors.safe_open` is not used for three reasons. It maps files into memory, so a file that is truncated during
reading ends the process (SIGBUS), and its pages count as memory. Its errors do not distinguish a file that is too
short from one that is too long. It slices rows, and packed dtypes need bytes.

**Positions.** A checkpoint with learned position embeddings can get more positions. "tiled" repeats the existing ones
(arXiv 2004.05150, section 5). "interpolated" stretches them to the new number: each new position lies between two old
neighbors (arXiv 2306.15595, equation 4, applied to learned positions).
"""

import json
import math
import os
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from ...files import INDEX_NAME, PICKLE_INDEX_NAME, PICKLE_WEIGHTS_NAME, WEIGHTS_NAME
from ...model_folder import read_json
from ...modeling.fields.field_checks import check_size
from ...modeling.mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ...registration import variant_config_class
from .source import check_no_pickled_weights

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
MAX_HEADER_BYTES = 100_000_000  # the limit of the format


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype.

    Raises:
        ValueError: if the format does not support the dtype.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"`dtype` must be a dtype that safetensors can store, got {dtype}.")
    return DTYPE_NAMES[dtype]


def element_size(dtype: str) -> int:
    """Return the size of one element in bytes.

    Raises:
        ValueError: if tensors of this dtype cannot be written.
    """
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"Tensors of dtype {dtype} cannot be written. Convert the original, unquantized model.")
    return TORCH_DTYPES[dtype].itemsize


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor: file, dtype (safetensors name), shape, and byte range in the data of the file."""

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
        """The size of the tensor in bytes. Raises `ValueError` if its dtype cannot be written."""
        return self.numel * element_size(self.dtype)

    @property
    def is_floating(self) -> bool:
        """Whether the elements are floating-point numbers of a dtype that `--dtype` converts."""
        return self.dtype in CASTABLE


def check_finite(tensor: torch.Tensor, name: str, location: object = "the model") -> torch.Tensor:
    """Return a tensor after checking that its elements are finite.

    Args:
        tensor: The tensor.
        name: Its name, for the message.
        location: The file or model that contains it, for the message.

    Raises:
        ValueError: if an element is NaN or infinite.
    """
    if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
        lowest, largest = (tensor.float() if tensor.element_size() == 1 else tensor.detach()).aminmax()
        if not (lowest.isfinite() and largest.isfinite()):
            kind = "NaN" if largest.isnan() or lowest.isnan() else "infinite numbers"
            raise ValueError(
                f"{location}: the tensor {name!r} must be finite, got {kind}. Repair the checkpoint or train it again."
            )
    return tensor


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert the elements of a tensor to `dtype`.

    Raises:
        ValueError: if a finite number becomes infinite.
    """
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        overflowed = torch.isinf(converted) & ~torch.isinf(tensor)
        if overflowed.any():
            raise ValueError(f"{name!r} contains numbers that are too large for {dtype}. Use bfloat16 or float32.")
    return converted


class CheckpointReader(ABC):
    """A reader of the tensors of a checkpoint folder. It reads one tensor at a time and checks that it is finite.

    Attributes:
        folder: Folder of the checkpoint.
        files: Names of the weight files in order.
        entries: {name: `TensorEntry`} for every tensor, in the order of the files.
        index_metadata: The `metadata` of the index, or None if there is one weight file.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        self.folder, self.files, self.index_metadata = folder, files, index_metadata
        self.entries: dict[str, TensorEntry] = {}

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in its own memory."""

    @abstractmethod
    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors (uint8 if torch does not have the dtype)."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SafetensorsReader(CheckpointReader):
    """A reader of safetensors files. It checks all headers and file sizes before it reads the first tensor.

    Raises:
        OSError: if a file is missing or shorter than its header says.
        ValueError: if a header or an index is invalid.
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
                        f"{folder}: the tensor {name!r} is in both {self.entries[name].file} and {file}. Remove one."
                    )
                self.entries[name] = entry

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in its own memory."""
        entry = self.entries[name]
        if entry.dtype not in TORCH_DTYPES:
            raise ValueError(
                f"{self.folder / entry.file}: {name!r} must have a dtype that torch can read, got {entry.dtype}. "
                "Convert the original, unquantized model."
            )
        elements = self._read_elements(entry, entry.begin, entry.end, TORCH_DTYPES[entry.dtype])
        return check_finite(elements, name, self.folder / entry.file).reshape(entry.shape)

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors (uint8 if torch does not have the dtype)."""
        entry = self.entries[name]
        dtype = TORCH_DTYPES.get(entry.dtype, torch.uint8)
        for begin in range(entry.begin, entry.end, CHUNK_BYTES):
            elements = self._read_elements(entry, begin, min(begin + CHUNK_BYTES, entry.end), dtype)
            yield check_finite(elements, name, self.folder / entry.file)

    def close(self) -> None:
        """Close the files."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _read_elements(self, entry: TensorEntry, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Read a byte range as a flat tensor."""
        handle = self._handles.get(entry.file)
        if handle is None:
            handle = self._handles[entry.file] = open(self.folder / entry.file, "rb")
        buffer = bytearray(end - begin)
        handle.seek(self._data_starts[entry.file] + begin)
        if handle.readinto(buffer) != len(buffer):
            raise OSError(f"{self.folder / entry.file} was truncated while it was read. Repeat the command.")
        return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)


class PickleReader(CheckpointReader):
    """A reader of `torch.save` files with `weights_only=True`, memory-mapped if their format supports it.

    Raises:
        ValueError: if a file contains other objects than tensors.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        super().__init__(folder, files, index_metadata)
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            for name, tensor in _load_pickle(folder / file).items():
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError(
                        f"{folder / file}: {name!r} must be a tensor, got {type(tensor).__name__}. Save only the "
                        "`state_dict` of the model."
                    )
                if name in self.entries:
                    raise ValueError(
                        f"{folder}: the tensor {name!r} is in both {self.entries[name].file} and {file}. Remove one."
                    )
                self.entries[name] = TensorEntry(file, dtype_name(tensor.dtype), tuple(tensor.shape))
                self._tensors[name] = tensor

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in its own memory."""
        return check_finite(self._tensors[name], name, self.folder / self.entries[name].file).clone()

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        flat = self._tensors[name].contiguous().reshape(-1)
        for chunk in flat.split(max(1, CHUNK_BYTES // flat.element_size())):
            yield check_finite(chunk, name, self.folder / self.entries[name].file)

    def close(self) -> None:
        """Release the tensors."""
        self._tensors.clear()


def open_checkpoint(folder: str | os.PathLike, allow_pickle: bool = False) -> CheckpointReader:
    """Open the weights of a checkpoint folder: one safetensors file, or shards with an index.

    Args:
        folder: Folder with model.safetensors, or with model.safetensors.index.json and its shards, or with pickles.
        allow_pickle: Whether to read pytorch_model.bin if there is no safetensors file.

    Returns:
        A reader of the tensors. It is a context manager.

    Raises:
        OSError: if the folder has no weights, or a file is missing or truncated.
        ValueError: if a header or an index is invalid, or the weights are pickles that are not allowed.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_NAME).is_file():
        return SafetensorsReader(folder, [WEIGHTS_NAME])
    if (folder / INDEX_NAME).is_file():
        return SafetensorsReader(folder, *_read_index(folder / INDEX_NAME))
    pickles = [name for name in (PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME) if (folder / name).is_file()]
    if not pickles:
        raise FileNotFoundError(
            f"{folder} must contain {WEIGHTS_NAME} or {INDEX_NAME}. Give the folder of a safetensors checkpoint."
        )
    if not allow_pickle:
        check_no_pickled_weights(str(folder), pickles)
    if pickles[0] == PICKLE_WEIGHTS_NAME:
        return PickleReader(folder, pickles[:1])
    return PickleReader(folder, *_read_index(folder / PICKLE_INDEX_NAME))


def _read_index(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the sorted shards and the metadata of an index, after checking that all shards exist."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be an index of shards ({type(error).__name__}: {error}). Download it again."
        ) from error
    for file in files:
        # With a path in its index, a checkpoint could be read, and its conversion be written, outside its folder.
        if not isinstance(file, str) or file in ("", ".", "..") or any(character in file for character in "/\\:\0"):
            raise ValueError(f"{path}: a shard must be a file in the same folder, got {file!r}. Correct the index.")
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path.parent}: {len(missing)} of {len(files)} shards are missing: {', '.join(sorted(missing)[:5])}. "
            "Download the checkpoint again."
        )
    metadata = index.get("metadata")
    return sorted(files), metadata if isinstance(metadata, dict) else {}


def _read_safetensors_header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Return the position of the data in a safetensors file, and its tensors in the order of their bytes.

    Raises:
        OSError: if the file is truncated or a git-lfs pointer.
        ValueError: if its header is invalid, or does not match its size.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if length < 0:
            raise OSError(f"{path} is truncated: {size} bytes are too few for a safetensors file. Download it again.")
        if prefix.startswith(b"version "):
            raise OSError(f"{path} is a git-lfs pointer instead of the file. Run `git lfs pull`.")
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} is not a safetensors file: its header would have {length} bytes. Download it again."
            )
        if 8 + length > size:
            raise OSError(f"{path} is truncated inside its header ({size} bytes). Download it again.")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {
            name: TensorEntry(path.name, fields["dtype"], tuple(fields["shape"]), *fields["data_offsets"])
            for name, fields in header.items()
        }
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
        data_end = _check_byte_ranges(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} has a corrupt header ({type(error).__name__}: {error}). Download it again."
        ) from error
    expected = 8 + length + data_end
    if size < expected:
        raise OSError(f"{path} is truncated: {size:,} bytes of {expected:,}. Download it again.")
    if size > expected:
        raise ValueError(f"{path} has {size:,} bytes, but its header describes {expected:,}. Download it again.")
    return 8 + length, entries


def _check_byte_ranges(entries: Mapping[str, TensorEntry]) -> int:
    """Check that the byte ranges of tensors are valid and contiguous, and return the end of the last one.

    Raises:
        ValueError: if they are not.
    """
    position = 0
    for name, entry in entries.items():
        if type(entry.begin) is not int or type(entry.end) is not int:
            raise ValueError(
                f"the byte range of {name!r} is [{entry.begin!r:.40}, {entry.end!r:.40}), not two integers"
            )
        if not isinstance(entry.dtype, str) or not all(type(n) is int and n >= 0 for n in entry.shape):
            raise ValueError(f"{name!r} has dtype {entry.dtype!r} and shape {entry.shape!r}")
        if entry.begin != position or entry.end < entry.begin:
            raise ValueError(
                f"the byte range of {name!r} is [{entry.begin}, {entry.end}), expected to start at {position}"
            )
        if entry.dtype in TORCH_DTYPES and entry.end - entry.begin != entry.nbytes:
            raise ValueError(f"{name!r} has {entry.end - entry.begin} bytes for {entry.dtype} {list(entry.shape)}")
        position = entry.end
    return position


def _load_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    """Load a pickle with `weights_only=True` and return its tensors, {name: tensor}."""
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files from before torch 1.6 are not zip archives and cannot be memory-mapped.
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read with weights_only=True: {reason}") from error
    if not isinstance(tensors, Mapping):
        raise ValueError(
            f"{path} must contain the `state_dict` of a model, got {type(tensors).__name__}. Save the `state_dict`."
        )
    return tensors


class SafetensorsWriter:
    """A writer of one safetensors file, tensor by tensor in any order. It writes the header first.

    Args:
        path: The file. It must not exist.
        tensors: {name: (dtype as a safetensors name, shape)} for every tensor.
        metadata: Strings for the header.

    Raises:
        KeyError: if a tensor is unknown or written twice.
        ValueError: if a tensor has another dtype or shape, or (at `close`) is missing.

    Example:

    ```py
    >>> with SafetensorsWriter(Path("model.safetensors"), {"weight": ("F32", (2, 3))}) as writer:
    ...     writer.write("weight", torch.zeros(2, 3))
    ```
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
    ):
        self.path = path
        self._layout: dict[str, TensorEntry] = {}
        # Large elements first, as in the format's own library, so that each tensor is aligned to its element size.
        position = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -element_size(item[1][0])):
            begin, position = position, position + math.prod(shape) * element_size(dtype)
            self._layout[name] = TensorEntry(path.name, dtype, tuple(shape), begin, position)
        header = _make_header(self._layout, metadata or {})
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
                f"{self.path.name}: {name!r} must be {entry.dtype} {list(entry.shape)}, got {tensor.dtype} "
                f"{list(tensor.shape)}."
            )
        self.write_chunks(name, [tensor.detach().to("cpu").contiguous().reshape(-1)])

    def write_chunks(self, name: str, chunks: Iterable[torch.Tensor]) -> None:
        """Write the elements of a tensor from consecutive flat tensors."""
        entry = self._layout[name]
        self._file.seek(self._start + entry.begin)
        written = 0
        for chunk in chunks:
            written += self._file.write(chunk.view(torch.uint8).numpy().data)
        if written != entry.end - entry.begin:
            raise ValueError(
                f"{self.path.name}: {name!r} must have {entry.end - entry.begin} bytes, got {written} bytes."
            )
        self._missing.remove(name)

    def close(self) -> None:
        """Close the file and check that all tensors were written."""
        self._file.close()
        if self._missing:
            raise ValueError(
                f"{self.path.name}: all tensors must be written, but {len(self._missing)} are missing, for example "
                f"{min(self._missing)!r}."
            )

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._file.close()
        if kind is None:
            self.close()


def write_index(path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, Any], size: int) -> None:
    """Write the index of a sharded checkpoint of `size` bytes.

    The sizes in the `metadata` of the original index are updated. Its other values do not change.

    Args:
        path: The file to write.
        entries: All tensors.
        metadata: The metadata of the original index.
        size: Size of all tensors in bytes.
    """
    metadata = dict(metadata) | {"total_size": size}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(entry.numel for entry in entries.values())
    index = {"metadata": metadata, "weight_map": {name: entry.file for name, entry in sorted(entries.items())}}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _make_header(layout: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file, including its length."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in layout.items():
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


POSITIONS_FIELD, EXTENSION_FIELD = POSITION_FIELDS = "max_position_embeddings", "position_extension"
POSITION_WEIGHT = "embeddings.position_embeddings.weight"
EXTENSIONS = ("tiled", "interpolated")
# Buffers of old checkpoints with one element per position. They are left out because models create them.
POSITION_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Files with the maximum length of inputs, each with the name of its field.
LENGTH_FIELDS = {TOKENIZER_CONFIG_FILE: "model_max_length", "sentence_bert_config.json": "max_seq_length"}


class ExtendedPositionsReader(CheckpointReader):
    """A reader of a checkpoint that adds learned positions. The caller closes the files of the original reader."""

    def __init__(self, stored: CheckpointReader, name: str, positions: int, first: int, extension: str) -> None:
        super().__init__(stored.folder, stored.files, stored.index_metadata)
        self.stored, self.name, self.positions, self.first, self.extension = stored, name, positions, first, extension
        self.entries = {key: entry for key, entry in stored.entries.items() if not key.endswith(POSITION_BUFFERS)}
        width = stored.entries[name].shape[1]
        self.entries[name] = replace(stored.entries[name], shape=(positions, width))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor. The position embeddings [n, D] keep their first rows; the other rows are extended."""
        tensor = self.stored.read(name)
        if name != self.name:
            return tensor
        first, others = tensor[: self.first], tensor[self.first :]
        extend = _repeat_rows if self.extension == "tiled" else _interpolate_rows
        return torch.cat([first, extend(others, self.positions - self.first)])

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        return self.stored.chunks(name) if name != self.name else iter([self.read(name).flatten()])

    def close(self) -> None:
        """Do nothing, because the caller closes the files."""


def _repeat_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat the rows of a table [n, D] until there are `rows` of them."""
    return table.repeat(-(-rows // table.shape[0]), 1)[:rows]


def _interpolate_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Interpolate a table [n, D] linearly to `rows` rows; the first and the last row do not change."""
    columns = table.float().T[None]  # [1, D, n]
    stretched = torch.nn.functional.interpolate(columns, rows, mode="linear", align_corners=True)
    return stretched[0].T.contiguous().to(table.dtype)


def extend_positions(
    config: dict[str, Any], reader: CheckpointReader, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckpointReader]:
    """Return the configuration and the reader of a checkpoint with the number of positions that `fields` contain.

    Args:
        config: The contents of config.json.
        reader: The reader of the tensors.
        fields: The fields of a conversion. `max_position_embeddings` includes the first positions of RoBERTa that no
            token uses, as in its configuration. `position_extension` is one of `EXTENSIONS` (None: "tiled").

    Returns:
        The configuration and the reader, both unchanged if `fields` do not contain `max_position_embeddings`.

    Raises:
        ValueError: if the model has no learned positions like BERT, the number is not larger than before, the
            extension is unknown or has no number, or the model is a Linformer, whose learned sums have a fixed length.
    """
    positions, extension = (fields.get(name) for name in POSITION_FIELDS)
    if extension is not None and extension not in EXTENSIONS:
        names = ", ".join(f'"{name}"' for name in EXTENSIONS)
        raise ValueError(f"`{EXTENSION_FIELD}` must be one of {names}, got {extension!r}.")
    if positions is None:
        if extension is not None:
            raise ValueError(
                f"`{EXTENSION_FIELD}` needs `{POSITIONS_FIELD}`, got {extension!r} without it. Give both."
            )
        return config, reader
    tables = [name for name in reader.entries if name.endswith(POSITION_WEIGHT)]
    if len(tables) != 1:
        raise ValueError(
            f"`{POSITIONS_FIELD}` must only be given for models with learned positions like BERT, got a "
            f"{config.get('model_type')!r} checkpoint. Leave it out."
        )
    old_positions = reader.entries[tables[0]].shape[0]
    check_size(POSITIONS_FIELD, positions, old_positions + 1)
    kernel = config.get("attention_kernel")
    if kernel in KERNELS and kernel_class(kernel).counts_tokens:
        raise ValueError(
            f"`{POSITIONS_FIELD}` must not change in a model with the kernel {kernel!r}, whose learned sums have "
            f"{old_positions} positions. Leave it out."
        )
    longer = ExtendedPositionsReader(
        reader, tables[0], positions, _count_unused_positions(config), extension or EXTENSIONS[0]
    )
    return config | {POSITIONS_FIELD: positions}, longer


def update_tokenizer_length(stage: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Write the number of positions into the files of the tokenizer and of sentence-transformers, if it was changed.

    Args:
        stage: The new folder.
        config: The new config.json.
        fields: The fields of the conversion.
    """
    if fields.get(POSITIONS_FIELD) is None:
        return
    for file, name in LENGTH_FIELDS.items():
        path = stage / file
        if (settings := read_json(path)) is not None:
            values = settings | {name: fields[POSITIONS_FIELD] - _count_unused_positions(config)}
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _count_unused_positions(config: Mapping[str, Any]) -> int:
    """Return the number of first positions that no token uses: RoBERTa starts after the index of the padding token."""
    after_padding = variant_config_class(config.get("model_type", "")).positions_after_padding
    return config.get("pad_token_id", 1) + 1 if after_padding else 0
