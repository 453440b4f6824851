"""Compute libraries: GEMMs and reductions, one library per module, without order or lanes.

`Compute` runs immediately, on host memory. `DeviceCompute` enqueues on the library's current
stream, on GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ficco.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ficco.kernels.native_launch import LaunchSpec
    from ficco.kernels.records import Operands, Record, Setting
    from ficco.program import Work


class Product(NamedTuple):
    """A library's function for products of whole matrices.

    Attributes:
        function: enqueues a product of two matrices in the argument `out`, as torch.mm does.
        setting: functions that return and set a setting of the library, which must be off in a
            call; see `ficco.engine.repeated_calls.Step`. None: there is none.
    """

    function: Callable[..., Any]
    setting: tuple[Callable[[], Any], Callable[..., None]] | None


class Compute(Protocol):
    """A library's handles and operations. Handles are sliced as h[r0:r1, c0:c1] and have `.T`.

    All sums are float32. Results in a narrower dtype are rounded once, to nearest even.
    """

    name: str

    def handle(self, array: npt.NDArray[Any], operand: bool = False) -> Any:
        """Return a handle of an array; `operand`: a weight that several GEMMs read whole."""

    def gemm(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        """Store a.b (+ c) (+ each of `add`) in c; terms of `add` may have one row."""

    def reduce(self, sources: list[Any], target: Any) -> None:
        """Store the sum of sources, in order, in the target; a source may have a single row."""

    def bag(
        self, table: Any, indices: Any, offsets: Any, bags: tuple[int, int], target: Any,
        weights: Any = None, mean: bool = False,
    ) -> None:  # fmt: skip
        """Store the sums of bags [first, past last) in the target, one row per bag.

        Bag i sums table rows indices[offsets[i] : offsets[i+1]]; the last bag ends with indices.
        With `weights` (float32, one per index) each row is multiplied by its weight. With `mean`
        each sum is divided by its number of rows; an empty bag is 0.
        """


class Slots(NamedTuple):
    """Matrices of one shape at equal distances in a larger matrix.

    Attributes:
        first: handle of the first matrix.
        number: number of matrices.
        distance: rows of the larger matrix from one to the next.
    """

    first: Any
    number: int
    distance: int


class DeviceKernels(Protocol):
    """Ficco's own kernels, which libraries lack or which native code launches.

    Operands are handles by name, see `ficco.kernels.records`; with them are "words": this rank's
    signal words of the call's window copy, int32.
    """

    def record(self, work: Work) -> Record:
        """Return the record of a work's kernel."""

    def prepare(self, work: Work, setting: Setting) -> Any:
        """Return the argument of `arm`, for launches of a work on the current device.

        Raises:
            InputError: the current stream is captured into a graph.
        """

    def arm(self, prepared: Any, operands: Operands, copy: int) -> Callable[[], None]:
        """Load the kernel of one launch, and return a function that enqueues it.

        Call it before a stream waits for a peer: loading may wait for streams.

        Args:
            prepared: the result of `prepare`.
            operands: of a call.
            copy: the window copy of the call.
        """

    def place(self, b: Any) -> tuple[int, int, bool]:
        """Return a weight's address, its pitch in bytes, and whether it is column-major."""

    def described(self, prepared: Any, operands: Operands, places: Operands) -> LaunchSpec | None:
        """Load the kernel, like `arm`, and describe the launch for native code.

        Args:
            prepared: the result of `prepare`.
            operands: of a call.
            places: places of the operands in calls, see `ficco.kernels.native_launch`.

        Returns:
            The launch for all calls whose operands have this layout; None: there is no launch.

        Raises:
            EngineError: native code cannot launch the kernel; use `arm`.
        """


class DeviceCompute(Protocol):
    """A library that enqueues on GPUs. Handles are matrices, sliced as h[r0:r1, c0:c1], with `.T`.

    All sums are float32. Results in a narrower dtype are rounded once, to nearest even. No method
    waits for a device, except for a library's own initialization at its first call.

    Attributes:
        kernels: ficco's own kernels for its handles, or None.
    """

    name: str
    kernels: DeviceKernels | None

    def stream(self) -> int:
        """Return the driver's handle of the current stream."""

    def exact(self, dtype: str) -> AbstractContextManager[None]:
        """Force GEMMs of a dtype to sum in float32 inside the block."""

    def product(self, dtype: str) -> Product:
        """Return how out = a . b is enqueued in repeated calls, for a dtype of all three.

        It sums in float32, as `gemm` does inside of `exact`, and takes the host less time.
        """

    def part(self, handle: Any, row0: int, row1: int, col0: int, col1: int) -> Any:
        """Return handle[row0:row1, col0:col1], as fast as the library can."""

    def empty(self, rows: int, cols: int, dtype: str) -> Any:
        """Return a new matrix on the current device, for use on the current stream."""

    def at(self, address: int, rows: int, cols: int, dtype: str) -> Any:
        """Return a handle of memory on the current device that the caller keeps alive."""

    def place(self, handle: Any) -> tuple[int, int]:
        """Return a matrix's address and the bytes from one row to the next."""

    def reads(self, handle: Any) -> bool:
        """Return whether GEMMs read a weight without a copy."""

    def operand(self, handle: Any) -> Any:
        """Return a weight in a form that GEMMs read directly; a copy if necessary."""

    def gemm(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        """Store a.b (+ c) (+ each of `add`) in c; terms of `add` may have one row."""

    def gemms(self, a: Slots, b: Any, c: Slots, accumulate: bool, add: list[Any]) -> None:
        """Run `gemm` for matrices at equal distances, with common b and `add`, in one launch."""

    def reduce(self, sources: list[Any], target: Any) -> None:
        """Store the sum of sources, in order, in the target; a source may have a single row."""

    def sum(self, slots: Slots, own: Any, own_at: int, bias: Any | None, target: Any) -> None:
        """Store the sum of slots, with `own` before slot `own_at`, and the bias in the target."""

    def bag(
        self, table: Any, indices: Any, offsets: Any, bags: tuple[int, int], target: Any,
        weights: Any = None, mean: bool = False,
    ) -> None:  # fmt: skip
        """Store the sums of bags [first, past last) in the target, like `Compute.bag`."""

    def fill_nan(self, handle: Any) -> None:
        """Fill a matrix with NaN."""


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a Problem's dtype name."""
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def named(name: str) -> Compute:
    """Return a compute library by name.

    Raises:
        InputError: the library is unknown or not installed.
    """
    if name == "numpy":
        from ficco.engine.compute.numpy import NumpyCompute

        return NumpyCompute()
    if name == "torch":
        try:
            from ficco.engine.compute.torch import TorchCompute
        except ModuleNotFoundError as missing:
            raise InputError(
                f"compute='torch' needs {missing.name}, which is not installed; "
                "pip install 'ficco[torch]', or use compute='numpy'"
            ) from None
        return TorchCompute()
    raise InputError(f"compute={name!r} is unknown; it is 'numpy' or 'torch'")
