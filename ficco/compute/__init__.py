"""Compute: "run this GEMM, this reduction". One library a module; nothing about order or lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ficco.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Compute", "named"]


class Compute(Protocol):
    """A library's handles and operations. Handles are sliced as h[r0:r1, c0:c1] and have `.T`.

    All sums are float32; what is stored in a narrower dtype is rounded once, to nearest even.
    """

    name: str

    def handle(self, array: npt.NDArray[Any], operand: bool = False) -> Any:
        """Return a handle of an array; `operand`: a weight, read whole by several GEMMs."""

    def gemm(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        """Store a.b (+ c) (+ each of `add`) in c; terms of `add` may have one row."""

    def reduce(self, sources: list[Any], target: Any) -> None:
        """Put the sum of sources, in order, into the target; one may have a single row."""

    def bag(
        self, table: Any, indices: Any, offsets: Any, bags: tuple[int, int], target: Any
    ) -> None:
        """Put the sums of bags [first, past last) into the target, a row each.

        Bag i sums table rows indices[offsets[i] : offsets[i+1]]; the last bag runs to the end.
        """


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a Problem's dtype name."""
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def named(name: str) -> Compute:
    """Return a compute library by name.

    Raises:
        InputError: it is unknown or not installed.
    """
    if name == "numpy":
        from ficco.compute.numpy import NumpyCompute

        return NumpyCompute()
    if name == "torch":
        try:
            from ficco.compute.torch import TorchCompute
        except ModuleNotFoundError as missing:
            raise InputError(
                f"compute='torch' needs {missing.name}, which is not installed; "
                "pip install 'ficco[torch]', or use compute='numpy'"
            ) from None
        return TorchCompute()
    raise InputError(f"compute={name!r} is unknown; it is 'numpy' or 'torch'")
