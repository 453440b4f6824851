"""The array interface of kernels and array libraries, without torch, CuPy or Triton.

Arrays are PyTorch's, CuPy's, or `Described` arrays, which have no memory and allow launches to be
computed on a machine without a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol

from ficco.core.dtypes import ALL
from ficco.core.errors import EngineError

_BULK_CAPABILITY = _CHAINING_CAPABILITY = 90  # Hopper


class Arrays(Protocol):
    """An array library for one device.

    Attributes:
        device: identifies the device; hashable.
        on_gpu: False for Triton's interpreter.
        processors: number of multiprocessors; None without a GPU.
        capability: 10 x major + minor of the compute capability; 0 for another vendor's GPU.
    """

    device: Any
    on_gpu: bool
    processors: int | None
    capability: int

    def place(self, numbers: Any, dtype: str) -> Any:
        """Return numbers (a nested list, an array) as an array that is ready on return."""

    def empty(self, count: int, dtype: str) -> Any:
        """Return an array of undefined elements."""

    def current(self) -> tuple[int, int]:
        """Return the driver's number of the current device, and its current stream."""

    def capturing(self) -> bool:
        """Return whether the current stream is captured into a graph."""


def has_bulk_loads(arrays: Arrays) -> bool:
    """Return whether kernels may use bulk (TMA) loads: from Hopper on, and in the interpreter."""
    return not arrays.on_gpu or arrays.capability >= _BULK_CAPABILITY


def can_chain(arrays: Arrays) -> bool:
    """Return whether a launch can begin while the one before it ends: from Hopper on.

    Programmatic dependent launch; NVIDIA's CUDA C++ Programming Guide.
    """
    return arrays.on_gpu and arrays.capability >= _CHAINING_CAPABILITY


class Address:
    """Memory with an external owner, in the form of an array argument of kernels."""

    dtype = "int32"

    def __init__(self, at: int) -> None:
        self._at = at

    def data_ptr(self) -> int:
        """Return the device address."""
        return self._at


class Described(NamedTuple):
    """A matrix without memory.

    Attributes:
        at: its address.
        shape: rows and columns.
        strides: in elements.
        dtype: name of the dtype.
    """

    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def data_ptr(self) -> int:
        """Return the address."""
        return self.at

    def stride(self, dim: int) -> int:
        """Return the elements from one row, or column, to the next."""
        return self.strides[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def T(self) -> Described:  # noqa: N802 - the name that arrays use
        """The transposed matrix."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])


class DescribedArrays:
    """See `Arrays`: a GPU that need not exist."""

    on_gpu = True

    def __init__(self, capability: int, processors: int) -> None:
        self.device, self.capability = "none", capability
        self.processors: int | None = processors

    def place(self, numbers: Any, dtype: str) -> Described:
        """See `Arrays.place`."""
        import numpy as np

        return self.empty(int(np.size(numbers)), dtype)

    def empty(self, count: int, dtype: str) -> Described:
        """See `Arrays.empty`."""
        return Described(1 << 40, (count,), (1,), dtype)

    def current(self) -> tuple[int, int]:
        """See `Arrays.current`.

        Raises:
            EngineError: always.
        """
        raise EngineError("there is no device; described arrays cannot be launched")

    def capturing(self) -> bool:
        """See `Arrays.capturing`."""
        return False


class Operand:
    """A call's matrix under one of its names: a caller may pass one array under two."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def data_ptr(self) -> int:
        """Return the address."""
        return address(self.array)

    def stride(self, dim: int) -> int:
        """Return the elements from one row, or column, to the next."""
        return stride(self.array, dim)

    @property
    def T(self) -> Operand:  # noqa: N802 - the name that arrays use
        """The transposed matrix."""
        return Operand(self.array.T)


class Bulk(NamedTuple):
    """A matrix whose blocks a kernel loads in bulk (by TMA).

    Attributes:
        base: the matrix; elements of its rows are adjacent.
        block: rows and columns of a block.
        operand: the operand of the call, if `base` is the operand transposed.
    """

    base: Any
    block: tuple[int, int]
    operand: Any = None


def library_of(device: Any) -> Arrays:
    """Return an array library unchanged, or PyTorch's for a torch.device."""
    if hasattr(device, "processors"):
        library: Arrays = device
        return library
    return _of_torch(device)


@functools.lru_cache(maxsize=64)
def _of_torch(device: Any) -> Arrays:
    from ficco.kernels.torch_arrays import TorchArrays

    return TorchArrays(device)


def dtype_name(of: Any) -> str:
    """Return the name of a dtype, or of an array's dtype."""
    kind = getattr(of, "dtype", of)
    return str(kind).removeprefix("torch.")


def item_bytes(of: Any) -> int:
    """Return the bytes of one element of an array or dtype."""
    return ALL[dtype_name(of)].bytes


def address(array: Any) -> int:
    """Return the address of an array."""
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.data.ptr)


def stride(array: Any, dim: int) -> int:
    """Return the distance from one row (dim 0), or column (dim 1), to the next, in elements."""
    if hasattr(array, "stride"):
        return int(array.stride(dim))
    return int(array.strides[dim]) // int(array.itemsize)


class CallStride(int):
    """The distance between rows of a matrix, or columns, in elements; it knows the matrix."""

    matrix: Any


def call_stride(matrix: Any, dim: int = 0) -> int:
    """Return the stride of a call's matrix as an argument, which may differ between calls."""
    distance = CallStride(stride(matrix, dim))
    distance.matrix = matrix
    return distance


def turned(b: Any) -> int:
    """Return which elements are adjacent: 0, those of a row; 1, those of a column; 2, neither."""
    if stride(b, 1) == 1:
        return 0
    return 1 if stride(b, 0) == 1 else 2


def weight_strides(b: Any) -> tuple[int, int]:
    """Return the strides of a weight's rows and columns as arguments; 0 for one that is 1.

    A library reads a contiguous copy of a weight of which neither is 1, so no plan has such calls.
    """
    way = turned(b)
    if way == 2:
        return stride(b, 0), stride(b, 1)
    return (0, call_stride(b, 1)) if way else (call_stride(b, 0), 0)
