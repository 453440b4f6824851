"""Checks of the arrays that a user passes: their library, dtype, shape and byte order.

Arrays are NumPy's, or those of a compatible library. This module loads neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ficco.core.dtypes import DTYPES, INDEX_DTYPES
from ficco.core.errors import InputError
from ficco.operators.problem_checks import MOST
from ficco.operators.shapes import check_bias

Array = Any


class Library(Protocol):
    """A library of arrays that have NumPy's dtypes, shapes and strides."""

    @property
    def immediate(self) -> bool:
        """Whether values can be read without waiting for a device; else they are not read."""

    @property
    def device(self) -> str:
        """The driver's name of its devices; empty if there are none."""

    @property
    def gates(self) -> bool:
        """Whether gated GEMMs are available for its arrays."""

    @property
    def gpu(self) -> tuple[int, int] | None:
        """Compute capability and multiprocessors of its GPUs; None if it has no GPUs."""

    def refusal(self, array: Any, rank: int) -> str | None:
        """Return why a rank cannot use an array, as text to follow its name; None: it can."""

    def contiguous(self, array: Any) -> Any:
        """Return an array with contiguous rows."""

    def new(self, shape: tuple[int, int], dtype: Any, rank: int) -> Any:
        """Return a new array for a rank."""

    def placed(self, array: Any, rank: int) -> Any:
        """Return a NumPy array in a rank's memory."""

    def repeated(self, shape: tuple[int, int], dtype: Any, rank: int, row: Any = None) -> Any:
        """Return a new array for a rank, each row of which is `row` [1, columns]; None: zeros."""


def integer_row(array: Any, name: str, rank: int, library: Library) -> Array:
    """Return a one-dimensional array of int32 or int64 as [1, count]."""
    _check_library(array, name, rank, library)
    if array.dtype.name not in INDEX_DTYPES or array.ndim != 1:
        raise InputError(
            f"{name}: {array.dtype.name} of shape {list(array.shape)} found; a one-dimensional "
            "int32 or int64 array is needed"
        )
    return _row(array, library)


def weight_row(array: Any, name: str, count: int, rank: int, library: Library) -> Array:
    """Return a one-dimensional float32 array of `count` weights as [1, count]."""
    _check_library(array, name, rank, library)
    if array.dtype.name != "float32" or array.shape != (count,):
        raise InputError(
            f"{name}: {array.dtype.name} of shape {list(array.shape)} found; a float32 array of "
            f"shape [{count}] is needed, one weight per index"
        )
    return _row(array, library)


def _row(array: Array, library: Library) -> Array:
    if array.size == 1:  # a view of a single element keeps any stride
        array = array.copy()
    row: Array = library.contiguous(array).reshape(1, -1)
    return row


def matrices(arrays: Sequence[Any], name: str, library: Library) -> list[Array]:
    """Check a matrix of every rank."""
    return [matrix(array, f"{name}[{rank}]", rank, library) for rank, array in enumerate(arrays)]


def matrix(array: Any, name: str, rank: int, library: Library) -> Array:
    """Check that an array is a matrix of a known dtype, in the library's memory of a rank."""
    _check_library(array, name, rank, library)
    if array.dtype.name not in DTYPES:
        raise InputError(
            f"{name}: dtype {array.dtype.name} found; it is one of {', '.join(DTYPES)} "
            "(bfloat16 from ml_dtypes)"
        )
    if not array.dtype.isnative:
        raise InputError(f"{name}: its bytes are not in this machine's order; convert it first")
    if array.ndim != 2:
        raise InputError(f"{name}: shape {array.shape} found; a matrix is needed")
    checked: Array = array
    return checked


def _check_library(array: Any, name: str, rank: int, library: Library) -> None:
    refusal = library.refusal(array, rank)
    if refusal is not None:
        raise InputError(name + refusal)


def entry_name(list_name: str, rank: int, index: int, entry: Any) -> str:
    """Return the name in messages of an entry of a rank, which may be one of several."""
    return f"{list_name}[{rank}]" + (f"[{index}]" if isinstance(entry, (tuple, list)) else "")


def listed(entry: Any) -> Sequence[Any]:
    """Return an entry of a rank as a sequence."""
    return entry if isinstance(entry, (tuple, list)) else (entry,)


def row_contiguous(x: Array, library: Library) -> Array:
    """Return x, or a copy if a copy engine cannot read its rows."""
    row_bytes = x.shape[1] * x.itemsize
    fits = x.strides[1] == x.itemsize and (x.strides[0] >= row_bytes or x.shape[0] <= 1)
    if fits and x.strides[0] >= 0:
        return x
    copied: Array = library.contiguous(x)
    return copied


def common_dtype(arrays: Sequence[Array], names: str) -> Any:
    """Return the dtype of all arrays."""
    dtype = arrays[0].dtype
    dtypes = sorted({array.dtype.name for array in arrays})
    if len(dtypes) > 1:
        raise InputError(f"{names} are {' and '.join(dtypes)}; give one dtype")
    return dtype


def check_same_dtype(array: Array, dtype: Any, name: str) -> None:
    """Reject an array whose dtype differs from that of xs[0]."""
    if array.dtype != dtype:
        raise InputError(f"{name} is {array.dtype.name}, xs[0] is {dtype.name}; give one dtype")


def equal_columns(arrays: Sequence[Array], name: str, shape: str) -> None:
    """Reject matrices with different numbers of columns."""
    for rank, array in enumerate(arrays):
        if array.shape[1] != arrays[0].shape[1]:
            raise InputError(
                f"{name}[{rank}] has {array.shape[1]} columns, {name}[0] has "
                f"{arrays[0].shape[1]}; all are [{shape}]"
            )


def check_most(arguments: str, **sizes: int) -> None:
    """Reject sizes above MOST, by name, such as m, n and k; `arguments` are the arrays' names."""
    for name, size in sizes.items():
        if size > MOST:
            raise InputError(f"{arguments} have {name}={size}; {name} may be at most {MOST}")


def biases_of(bias: Sequence[Any] | None, weights: list[list[Array]], flat: bool = False) -> Any:
    """Return, per rank, a list with a bias or None per weight (`flat`: one entry per rank)."""
    biases: list[list[Any]] = [[None] * len(entry) for entry in weights]
    if bias is not None:
        if not isinstance(bias, (tuple, list)):
            raise InputError(
                f"bias: {type(bias).__name__} found; give a list with an entry per rank"
            )
        if len(bias) != len(weights):
            raise InputError(f"bias has {len(bias)} entries, the node has {len(weights)} ranks")
        for rank, entry in enumerate(bias):
            entries = list(entry) if isinstance(entry, (tuple, list)) else [entry]
            if len(entries) != len(weights[rank]):
                raise InputError(
                    f"bias[{rank}] has {len(entries)} entries, ws[{rank}] has {len(weights[rank])}"
                )
            biases[rank] = entries
    return [entry[0] for entry in biases] if flat else biases


def bias_rows(
    biases: list[Any], columns: Sequence[int], dtype: Any, library: Library
) -> list[Array] | None:
    """Return every rank's bias as [1, n_r], or None if no rank has one."""
    if all(bias is None for bias in biases):
        return None
    rows = []
    for rank, bias in enumerate(biases):
        if bias is None:
            raise InputError("bias: some ranks have one and some have none")
        _check_library(bias, f"bias[{rank}]", rank, library)
        check_same_dtype(bias, dtype, f"bias[{rank}]")
        check_bias(bias, f"bias[{rank}]", columns[rank])
        rows.append(library.contiguous(bias).reshape(1, -1))
    return rows
