"""GEMMs and reductions by NumPy. 16-bit operands are widened to float32, which BLAS supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ficco.operators.arrays import Library

Array = npt.NDArray[Any]


class NumpyCompute:
    """See `ficco.engine.compute.Compute`. Handles are arrays."""

    name = "numpy"

    def handle(self, array: Array, operand: bool = False) -> Array:
        """Return the array; a 16-bit operand is widened here, once for all its GEMMs."""
        return _wide(array) if operand else array

    def gemm(self, a: Array, b: Array, c: Array, accumulate: bool, add: list[Array]) -> None:
        """See `Compute.gemm`."""
        if c.dtype == np.float32 and not accumulate and not add and a.dtype == np.float32:
            np.matmul(a, _wide(b), out=c)
            return
        total = np.matmul(_wide(a), _wide(b))
        if accumulate:
            total += c
        for term in add:
            total += _wide(term)
        c[...] = total

    def reduce(self, sources: list[Array], target: Array) -> None:
        """See `Compute.reduce`."""
        if not sources:
            target[...] = 0
            return
        total = np.array(np.broadcast_to(sources[0], target.shape), np.float32)
        for term in sources[1:]:
            total += _wide(term)
        target[...] = total

    def bag(
        self, table: Array, indices: Array, offsets: Array, bags: tuple[int, int], target: Array,
        weights: Array | None = None, mean: bool = False,
    ) -> None:  # fmt: skip
        """See `Compute.bag`."""
        first, last = bags
        ends = np.append(offsets[first : last + 1], indices.size)[: last - first + 1]
        rows = _wide(table[indices[ends[0] : ends[-1]]])
        if weights is not None:
            rows = rows * weights[ends[0] : ends[-1], None]
        total = np.zeros(target.shape, np.float32)
        full = np.flatnonzero(np.diff(ends))  # reduceat would assign an empty bag the next row
        if full.size:
            total[full] = np.add.reduceat(rows, ends[full] - ends[0], axis=0)
        if mean:
            total /= np.maximum(np.diff(ends), 1).astype(np.float32)[:, None]
        target[...] = total


def _wide(array: Array) -> Array:
    return array if array.dtype == np.float32 else array.astype(np.float32)


class _Numpy:
    """See `Library`. All ranks have the same memory."""

    immediate = True
    device = ""
    gates = True
    gpu: tuple[int, int] | None = None

    def refusal(self, array: Any, rank: int) -> str | None:
        if not isinstance(array, np.ndarray):
            return f": {type(array).__name__} found; a NumPy array is needed"
        if isinstance(array, np.ma.MaskedArray):
            return " is masked; fill it first, a GEMM would ignore the mask"
        return None

    def contiguous(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def placed(self, array: Any, rank: int) -> Any:
        return array

    def new(self, shape: tuple[int, int], dtype: npt.DTypeLike, rank: int) -> Any:
        return np.empty(shape, dtype)

    def repeated(
        self, shape: tuple[int, int], dtype: npt.DTypeLike, rank: int, row: Any = None
    ) -> Any:
        array = np.zeros(shape, dtype)
        if row is not None:
            array[...] = row
        return array


NUMPY: Library = _Numpy()
