"""What a checkpoint holds of each tensor, and the dtypes that safetensors files know."""

import math
from dataclasses import dataclass

import torch

__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "TensorEntry", "cast", "checked_finite", "dtype_name", "element_size"]

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
