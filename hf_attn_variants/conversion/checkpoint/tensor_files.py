"""Reads and writes checkpoints tensor by tensor, as safetensors files or (on request) pickle files.

A reader holds at most one tensor, or one chunk of a tensor, in memory. A safetensors file consists of the length of
the header (8 bytes, little-endian), a JSON header with the dtype, shape and byte range of each tensor, and the data.
`safetensors.safe_open` is only used to check the files. It is not used to read tensors because it maps files into
memory. The process would crash (SIGBUS) if a file were truncated while it is read, and the mapped pages count as used
memory.

**Positions.** The number of positions in a checkpoint with learned position embeddings can be increased. "tiled"
repeats the existing embeddings (arXiv 2004.05150, section 5). "interpolated" stretches them to the new number by
interpolating between neighboring positions (arXiv 2306.15595, equation 4, applied to learned positions).
"""

import json
import math
import os
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from ...files import CONFIG_NAME, INDEX_NAME, PICKLE_INDEX_NAME, PICKLE_WEIGHTS_NAME, WEIGHTS_NAME
from ...model_folder import read_json
from ...modeling.fields.field_checks import check_integer_range
from ...modeling.mechanisms.kernels.kernel_table import KERNELS, get_kernel_class
from ...registration import get_variant_config_class
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
SAFETENSORS_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CASTABLE_DTYPES = ("F64", "F32", "F16", "BF16")
CHUNK_BYTES = 16 * 2**20


def get_safetensors_dtype(dtype: torch.dtype) -> str:
    """Return the safetensors name for a torch dtype.

    Raises:
        ValueError: if the format does not support the dtype.
    """
    if dtype not in SAFETENSORS_DTYPE_NAMES:
        raise ValueError(f"`dtype` must be a dtype that safetensors can store, got {dtype}.")
    return SAFETENSORS_DTYPE_NAMES[dtype]


@dataclass(frozen=True)
class TensorEntry:
    """Describes a stored tensor by its file, dtype (safetensors name), shape, and byte range in the file's data."""

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
        """The size of the tensor in bytes."""
        return self.numel * self.itemsize

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes."""
        return TORCH_DTYPES[self.dtype].itemsize

    @property
    def is_floating(self) -> bool:
        """True if the tensor has a floating-point dtype that `--dtype` can convert."""
        return self.dtype in CASTABLE_DTYPES


def check_finite(tensor: torch.Tensor, name: str, location: object = "the model") -> torch.Tensor:
    """Check that all elements of a tensor are finite, and return the unchanged tensor.

    Args:
        tensor: The tensor.
        name: Name of the tensor, for the error message.
        location: The file or model that contains the tensor, for the error message.

    Raises:
        ValueError: if an element is NaN or infinite.
    """
    if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
        lowest, largest = (tensor.float() if tensor.element_size() == 1 else tensor.detach()).aminmax()
        if not (lowest.isfinite() and largest.isfinite()):
            kind = "NaN" if largest.isnan() or lowest.isnan() else "infinite numbers"
            raise ValueError(
                f"The tensor {name!r} in {location} must be finite, got {kind}. Repair the checkpoint or retrain the "
                "model."
            )
    return tensor


def cast_tensor(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert the elements of a tensor to `dtype`.

    Raises:
        ValueError: if a finite element becomes infinite.
    """
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        has_overflowed = torch.isinf(converted) & ~torch.isinf(tensor)
        if has_overflowed.any():
            raise ValueError(f"{name!r} contains values that are too large for {dtype}. Use bfloat16 or float32.")
    return converted


class CheckpointReader(ABC):
    """Reads the tensors in a checkpoint folder one at a time, and checks that they are finite.

    Attributes:
        folder: The checkpoint folder.
        files: Sorted names of the weight files.
        entries: {name: `TensorEntry`} for every tensor, in the order of the files.
        index_metadata: The `metadata` in the index of the shards, or None if there is no index.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        self.folder, self.files, self.index_metadata = folder, files, index_metadata
        self.entries: dict[str, TensorEntry] = {}

    def _add_entries(self, entries: Mapping[str, TensorEntry]) -> None:
        """Add the tensors in a file, after checking that no other file contains a tensor of the same name."""
        for name in entries.keys() & self.entries:
            files = f"{self.entries[name].file} and {entries[name].file}"
            raise ValueError(f"The tensor {name!r} is in both {files} of {self.folder}. Remove one.")
        self.entries |= entries

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into newly allocated memory."""

    def iterate_chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as flat tensors. Subclasses can split a tensor into short chunks."""
        yield self.read(name).flatten()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        return


class SafetensorsReader(CheckpointReader):
    """Reads safetensors files. The constructor checks all headers and file sizes.

    Raises:
        OSError: if a file is missing, truncated or not a safetensors file.
        ValueError: if PyTorch does not support the dtype of a tensor, or if two files contain the same tensor.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        super().__init__(folder, files, index_metadata)
        self._data_starts: dict[str, int] = {}
        self._files = ExitStack()
        for file in files:
            self._data_starts[file], entries = _read_safetensors_header(folder / file)
            self._add_entries(entries)
        self._handles = {file: self._files.enter_context(open(folder / file, "rb")) for file in files}

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into newly allocated memory."""
        entry = self.entries[name]
        return self._read_elements(name, entry.begin, entry.end).reshape(entry.shape)

    def iterate_chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        entry = self.entries[name]
        for begin in range(entry.begin, entry.end, CHUNK_BYTES):
            yield self._read_elements(name, begin, min(begin + CHUNK_BYTES, entry.end))

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self._files.close()

    def _read_elements(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Read a byte range of a tensor as a flat tensor, and check that it is finite."""
        entry = self.entries[name]
        path, dtype, buffer = self.folder / entry.file, TORCH_DTYPES[entry.dtype], bytearray(end - begin)
        handle = self._handles[entry.file]
        handle.seek(self._data_starts[entry.file] + begin)
        if handle.readinto(buffer) != len(buffer):
            raise OSError(f"{path} was truncated while it was being read. Run the command again.")
        elements = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
        return check_finite(elements, name, path)


class PickleReader(CheckpointReader):
    """Reads `torch.save` files with `weights_only=True`, memory-mapped if the file format supports it.

    Raises:
        ValueError: if a file contains objects other than tensors.
    """

    def __init__(self, folder: Path, files: list[str], index_metadata: dict[str, Any] | None = None):
        super().__init__(folder, files, index_metadata)
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors = _load_pickle(folder / file)
            entries = {}
            for name, tensor in tensors.items():
                entries[name] = TensorEntry(file, get_safetensors_dtype(tensor.dtype), tuple(tensor.shape))
            self._add_entries(entries)
            self._tensors |= tensors

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into newly allocated memory."""
        return check_finite(self._tensors[name], name, self.folder / self.entries[name].file).clone()

    def iterate_chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        flat = self._tensors[name].contiguous().reshape(-1)
        for chunk in flat.split(max(1, CHUNK_BYTES // flat.element_size())):
            yield check_finite(chunk, name, self.folder / self.entries[name].file)


def open_checkpoint(folder: str | os.PathLike, allow_pickle: bool = False) -> CheckpointReader:
    """Open the weights in a checkpoint folder, which can be a single file or shards with an index.

    Args:
        folder: Folder with model.safetensors, model.safetensors.index.json and its shards, or pickle files.
        allow_pickle: Whether to read pytorch_model.bin if there is no safetensors file.

    Returns:
        A reader for the tensors, which is also a context manager.

    Raises:
        OSError: if the folder has no weights, or a file is missing, truncated or not a safetensors file.
        ValueError: if an index is invalid, or if the folder only contains pickle files, which are not allowed by
            default.
    """
    folder = Path(folder)
    model_type = (read_json(folder / CONFIG_NAME) or {}).get("model_type")
    reader = _open_weight_files(folder, allow_pickle)
    return SplitTensorsReader(reader, model_type) if model_type in TYPES_WITH_SPLIT_TENSORS else reader


def _open_weight_files(folder: Path, allow_pickle: bool) -> CheckpointReader:
    """Open the weights in a folder, with their names in the files. See `open_checkpoint`."""
    if (folder / WEIGHTS_NAME).is_file():
        return SafetensorsReader(folder, [WEIGHTS_NAME])
    if (folder / INDEX_NAME).is_file():
        return SafetensorsReader(folder, *_read_index(folder / INDEX_NAME))
    pickles = [name for name in (PICKLE_WEIGHTS_NAME, PICKLE_INDEX_NAME) if (folder / name).is_file()]
    if not pickles:
        raise FileNotFoundError(
            f"{folder} must contain {WEIGHTS_NAME} or {INDEX_NAME}. Pass the folder of a safetensors checkpoint."
        )
    if not allow_pickle:
        check_no_pickled_weights(str(folder), pickles)
    if pickles[0] == PICKLE_WEIGHTS_NAME:
        return PickleReader(folder, pickles[:1])
    return PickleReader(folder, *_read_index(folder / PICKLE_INDEX_NAME))


def _read_index(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the sorted shard names and the metadata from an index, after checking that all shards exist."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a valid shard index ({type(error).__name__}: {error}). Download it again."
        ) from error
    for file in files:
        # A path in the index could cause files outside the checkpoint folder to be read or written.
        if not isinstance(file, str) or file in ("", ".", "..") or any(character in file for character in "/\\:\0"):
            raise ValueError(f"Shards in {path} must be files in the same folder, got {file!r}. Correct the index.")
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} shards are missing in {path.parent}: {', '.join(sorted(missing)[:5])}. "
            "Download the checkpoint again."
        )
    metadata = index.get("metadata")
    return sorted(files), metadata if isinstance(metadata, dict) else {}


def _read_safetensors_header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Return the offset of the data in a safetensors file, and its tensors sorted by their byte ranges.

    Raises:
        OSError: if the file is truncated, is a git-lfs pointer, or has an invalid header.
        ValueError: if PyTorch does not support the dtype of a tensor.
    """
    with open(path, "rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise OSError(f"{path} is a git-lfs pointer instead of the file. Run `git lfs pull`.")
        try:
            with safe_open(path, "pt"):  # checks the header, the byte ranges and the size of the file
                length = struct.unpack("<Q", prefix)[0]
        except SafetensorError as error:
            raise OSError(f"{path} is truncated or not a safetensors file ({error}). Download it again.") from error
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = {
        name: TensorEntry(path.name, fields["dtype"], tuple(fields["shape"]), *fields["data_offsets"])
        for name, fields in header.items()
    }
    for name, entry in entries.items():
        if entry.dtype not in TORCH_DTYPES:
            raise ValueError(
                f"{name!r} in {path} must have a dtype that PyTorch supports, got {entry.dtype}. Convert the "
                "original, unquantized model."
            )
    return 8 + length, dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Load a pickle file with `weights_only=True` and return its tensors, {name: tensor}."""
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files written before PyTorch 1.6 are not zip archives and cannot be memory-mapped.
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read with weights_only=True: {error}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError(f"{path} must contain only a model's `state_dict`. Save the `state_dict`.")
    return dict(tensors)


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor, in any order. The constructor writes the header.

    Args:
        path: The file to write, which must not exist.
        entries: {name: dtype and shape} for every tensor.

    Raises:
        KeyError: if a tensor is unknown or written twice.
        ValueError: if a tensor has an unexpected dtype or shape, or if a tensor is missing when `close` is called.

    Example:

    ```py
    >>> path = Path("model.safetensors")
    >>> with SafetensorsWriter(path, {"weight": TensorEntry(path.name, "F32", (2, 3))}) as writer:
    ...     writer.write("weight", torch.zeros(2, 3))
    ```
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]):
        self.path = path
        self._layout: dict[str, TensorEntry] = {}
        # As in the safetensors library, tensors with large elements are written first, so that each tensor is aligned
        # to its element size.
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: -item[1].itemsize):
            self._layout[name] = replace(entry, begin=position, end=position + entry.nbytes)
            position += entry.nbytes
        header = _make_header(self._layout)
        self._start = len(header)
        self._missing = set(self._layout)
        self._file = open(path, "xb")
        self._file.write(header)
        self._file.truncate(self._start + position)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor."""
        entry = self._layout[name]
        if tuple(tensor.shape) != entry.shape or tensor.dtype != TORCH_DTYPES[entry.dtype]:
            raise ValueError(
                f"{name!r} in {self.path.name} must be {entry.dtype} {list(entry.shape)}, got {tensor.dtype} "
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
                f"{name!r} in {self.path.name} must have {entry.end - entry.begin} bytes, got {written} bytes."
            )
        self._missing.remove(name)

    def close(self) -> None:
        """Close the file and check that all tensors were written."""
        self._file.close()
        if self._missing:
            raise ValueError(
                f"Not all tensors were written to {self.path.name} ({len(self._missing)} missing, for example "
                f"{min(self._missing)!r})."
            )

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._file.close()
        if kind is None:
            self.close()


def write_index(path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, Any], total_size: int) -> None:
    """Write the index of a sharded checkpoint.

    The sizes in the metadata of the original index are updated. All other metadata stay unchanged.

    Args:
        path: The file to write.
        entries: All tensors.
        metadata: The metadata of the original index.
        total_size: Total size of all tensors in bytes.
    """
    metadata = dict(metadata) | {"total_size": total_size}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(entry.numel for entry in entries.values())
    index = {"metadata": metadata, "weight_map": {name: entry.file for name, entry in sorted(entries.items())}}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _make_header(layout: Mapping[str, TensorEntry]) -> bytes:
    """Return the header of a safetensors file, including its length."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, entry in layout.items():
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


# Model types whose tensors Transformers renames and splits while it loads a checkpoint.
TYPES_WITH_SPLIT_TENSORS = ("nomic_bert",)


class SplitTensorsReader(CheckpointReader):
    """Reads a checkpoint with the tensors that the model class has after loading. Closing it closes the stored reader.

    Args:
        stored: The reader for the tensors in the files.
        model_type: The model type, whose conversions Transformers lists.
    """

    def __init__(self, stored: CheckpointReader, model_type: str) -> None:
        super().__init__(stored.folder, stored.files, stored.index_metadata)
        self.stored = stored
        self._parts: dict[str, tuple[str, int]] = {}  # the stored name and the index of the part
        conversions = get_checkpoint_conversion_mapping(model_type)
        for stored_name, entry in stored.entries.items():
            names = [stored_name]
            for conversion in conversions:
                # A renaming has one target. A conversion with several targets splits the rows into equal parts.
                if (match := conversion.compiled_sources.search(names[0])) is not None:
                    names = [names[0].replace(match[0], target, 1) for target in conversion.target_patterns]
            shape = (*(rows // len(names) for rows in entry.shape[:1]), *entry.shape[1:])
            self._add_entries(dict.fromkeys(names, replace(entry, shape=shape)))
            self._parts |= {name: (stored_name, index) for index, name in enumerate(names)}

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into newly allocated memory."""
        stored_name, index = self._parts[name]
        tensor, shape = self.stored.read(stored_name), self.entries[name].shape
        return tensor if tensor.shape == shape else tensor.split(shape[0])[index].clone()

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self.stored.__exit__(*exception)


POSITIONS_FIELD, EXTENSION_FIELD = POSITION_FIELDS = "max_position_embeddings", "position_extension"
POSITION_WEIGHT = "embeddings.position_embeddings.weight"
POSITION_EXTENSIONS = ("tiled", "interpolated")
# Buffers in old checkpoints with one element per position. They are skipped because the model class creates them.
POSITION_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Files that contain the maximum input length, each with the name of its field.
MAX_LENGTH_FIELDS = {TOKENIZER_CONFIG_FILE: "model_max_length", "sentence_bert_config.json": "max_seq_length"}


class ExtendedPositionsReader(CheckpointReader):
    """Reads a checkpoint and adds learned positions. The caller must close the original reader."""

    def __init__(self, stored: CheckpointReader, name: str, positions: int, first: int, extension: str) -> None:
        super().__init__(stored.folder, stored.files, stored.index_metadata)
        self.stored, self.name, self.positions, self.first, self.extension = stored, name, positions, first, extension
        self.entries = {key: entry for key, entry in stored.entries.items() if not key.endswith(POSITION_BUFFERS)}
        width = stored.entries[name].shape[1]
        self.entries[name] = replace(stored.entries[name], shape=(positions, width))

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor. In position embeddings [n, D], the unused leading rows stay unchanged."""
        tensor = self.stored.read(name)
        if name != self.name:
            return tensor
        first, others, rows = tensor[: self.first], tensor[self.first :], self.positions - self.first
        if self.extension == "tiled":
            return torch.cat([first, others.repeat(-(-rows // len(others)), 1)[:rows]])
        columns = others.float().T[None]  # [1, D, n]
        interpolated = torch.nn.functional.interpolate(columns, rows, mode="linear", align_corners=True)
        return torch.cat([first, interpolated[0].T.to(others.dtype)])

    def iterate_chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of one tensor as short flat tensors."""
        return self.stored.iterate_chunks(name) if name != self.name else super().iterate_chunks(name)


def extend_positions(
    config: dict[str, Any], reader: CheckpointReader, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckpointReader]:
    """Extend the learned positions of a checkpoint to the number in `fields`.

    Args:
        config: The contents of config.json.
        reader: The reader of the original tensors.
        fields: The conversion fields. As in RoBERTa's configuration, `max_position_embeddings` includes its unused
            leading positions. `position_extension` is one of `POSITION_EXTENSIONS` (if None, "tiled").

    Returns:
        The configuration and the reader with this number of positions. Both are returned unchanged if `fields` does
        not contain `max_position_embeddings`.

    Raises:
        ValueError: if the model does not have learned positions as BERT does, if the number is not larger than before,
            if the extension is unknown, or if the kernel depends on the number of positions (Linformer).
    """
    positions, extension = fields.get(POSITIONS_FIELD), fields.get(EXTENSION_FIELD) or POSITION_EXTENSIONS[0]
    if positions is None:
        return config, reader
    if extension not in POSITION_EXTENSIONS:
        raise ValueError(f"`{EXTENSION_FIELD}` must be one of {', '.join(POSITION_EXTENSIONS)}, got {extension!r}.")
    tables = [name for name in reader.entries if name.endswith(POSITION_WEIGHT)]
    if len(tables) != 1:
        raise ValueError(
            f"`{POSITIONS_FIELD}` is only supported for models with learned positions such as BERT, not for "
            f"{config.get('model_type')!r} checkpoints. Remove it."
        )
    old_positions = reader.entries[tables[0]].shape[0]
    check_integer_range(POSITIONS_FIELD, positions, old_positions + 1)
    kernel = config.get("attention_kernel")
    if kernel in KERNELS and get_kernel_class(kernel).depends_on_positions:
        raise ValueError(
            f"`{POSITIONS_FIELD}` cannot be changed in a model with the kernel {kernel!r}, whose learned sums have "
            f"{old_positions} positions. Remove it."
        )
    extended_reader = ExtendedPositionsReader(reader, tables[0], positions, _count_unused_positions(config), extension)
    return config | {POSITIONS_FIELD: positions}, extended_reader


def update_tokenizer_max_length(stage: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Update the maximum lengths of the tokenizer and of sentence-transformers if the number of positions changed.

    Args:
        stage: The new folder.
        config: The contents of the new config.json.
        fields: The conversion fields.
    """
    if fields.get(POSITIONS_FIELD) is None:
        return
    for file, name in MAX_LENGTH_FIELDS.items():
        path = stage / file
        if (settings := read_json(path)) is not None:
            values = settings | {name: fields[POSITIONS_FIELD] - _count_unused_positions(config)}
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _count_unused_positions(config: Mapping[str, Any]) -> int:
    """Return the number of unused leading positions. RoBERTa counts positions from its padding token id plus 1."""
    after_padding = get_variant_config_class(config.get("model_type", "")).positions_after_padding
    return config.get("pad_token_id", 1) + 1 if after_padding else 0
