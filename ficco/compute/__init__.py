"""Compute libraries: GEMMs and reductions, one library per module, without order or lanes.

`Compute` runs immediately, on host memory. `DeviceCompute` enqueues on the library's current
stream, on GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ficco.errors import InputError
from ficco.kernels.native_launch import LaunchSpec
from ficco.tables import GatedPart, WholeTable, WindowRelease

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Compute",
    "DeviceCompute",
    "DeviceKernels",
    "GatedOperands",
    "OneKernelOperands",
    "OneKernelOutput",
    "OneKernelWindows",
    "PoolOperands",
    "Product",
    "Slots",
    "SumOperands",
    "WholeOperands",
    "named",
]


class Product(NamedTuple):
    """A library's function for products of whole matrices.

    Attributes:
        function: enqueues a product of two matrices in the argument `out`, as torch.mm does.
        setting: functions that return and set a setting of the library, which must be off in a
            call; see `ficco.engines.call_steps.Step`. None: there is none.
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


class GatedOperands(NamedTuple):
    """Handles of the operands of a gated GEMM.

    Attributes:
        own: matrix of the parts that do not wait, or None.
        window: matrix of the other parts, or None.
        b: the second operand.
        bias: one row that is added to every row, or None.
        c: target of the product.
        partial: target of pushed parts, if other parts go to c; else None.
        recv: receive buffer of rows that are added to own parts, or None.
        words: this rank's signal words of the call's window copy, int32.
        copy: the number of that copy.
    """

    own: Any | None
    window: Any | None
    b: Any
    bias: Any | None
    c: Any
    partial: Any | None
    recv: Any | None
    words: Any
    copy: Any


class DeviceKernels(Protocol):
    """Ficco's own kernels, which libraries lack or which native code launches.

    A gated GEMM is one launch over parts whose rows are still arriving.
    """

    def prepare(  # noqa: PLR0913 - a launch has as many facts
        self,
        parts: Sequence[GatedPart],
        n: int,
        k: int,
        dtype: str,
        timeout_s: float,
        stop_word: Callable[[], int],
        begun: bool = False,
        release: WindowRelease | None = None,
        missed_word: int = 0,
        leaves: int = 0,
    ) -> Any:
        """Return the argument of `arm`, for launches on the current device.

        Args:
            parts: in the order of their computation.
            n: columns of the product.
            k: depth.
            dtype: dtype of all matrices.
            timeout_s: time limit of a wait for a word; after it the part is NaN.
            stop_word: returns the address of a word in device memory. While the word is not 0,
                launches do not wait, and their waiting parts are NaN.
            begun: whether parts accumulate into their targets.
            release: the words by which the launch releases the window when it ends; a part must
                read the window. None: the launch does not release it.
            missed_word: address at which the launch reports the word that it missed; 0: it
                reports none.
            leaves: multiprocessors that launches leave free.

        Raises:
            InputError: the current stream is captured into a graph.
        """

    def arm(self, prepared: Any, operands: GatedOperands) -> Callable[[], None]:
        """Load the kernel of one launch over all parts, and return a function that enqueues it.

        Call it before a stream waits for a peer: loading may wait for streams.
        """

    def place(self, b: Any) -> tuple[int, int, bool]:
        """Return an operand b's address, its pitch in bytes, and whether it is column-major."""

    def described(
        self, prepared: Any, operands: GatedOperands, places: GatedOperands
    ) -> LaunchSpec | None:
        """Load the kernel, like `arm`, and describe the launch for native code.

        Args:
            prepared: the result of `prepare`.
            operands: the operands of a call.
            places: places of the operands in calls, see `ficco.kernels.native_launch`.

        Returns:
            The launch for all calls whose operands have this layout; None: there is no launch.

        Raises:
            EngineError: native code cannot launch the kernel; use `arm`.
        """

    def prepare_one_kernel(
        self,
        table: WholeTable,
        windows: OneKernelWindows,
        digest: int,
        timeout_s: float,
        missed_word: int,
        stop_word: Callable[[], int],
    ) -> Any:
        """Return the argument of `arm_one_kernel`: a whole call in one launch.

        Args:
            table: table of the plan.
            windows: the windows or mailboxes that calls use, by the plan.
            digest: digest of the plan.
            timeout_s: time limit of a wait for a word; results that depend on the word are then
                NaN.
            missed_word: address at which the launch reports the word that it missed.
            stop_word: returns the address of a word that is 1 when the launch must give up.

        Raises:
            InputError: the current stream is captured into a graph.
        """

    def arm_one_kernel(
        self, prepared: Any, operands: WholeOperands, copy: int
    ) -> Callable[[], None]:
        """Load the kernel and return a function that enqueues the launch, like `arm`."""

    def described_one_kernel(
        self, prepared: Any, operands: WholeOperands, places: WholeOperands
    ) -> LaunchSpec:
        """Load the kernel and describe the launch, like `described`."""

    def prepare_pool(
        self, dims: Sequence[int], modes: Sequence[str], columns: Sequence[int], dtype: str
    ) -> Any:
        """Return the argument of `arm_pool`: bags of several tables in one launch.

        Args:
            dims: columns of each table.
            modes: how each table is pooled, see `ficco.problem.MODES`.
            columns: the result's first column of each table.
            dtype: of the tables.

        Raises:
            InputError: the current stream is captured into a graph.
        """

    def arm_pool(self, prepared: Any, operands: PoolOperands, first: int) -> Callable[[], None]:
        """Load the kernel and return a function that enqueues the launch, like `arm`.

        first: the first bag; y of the operands has a row for each bag.
        """

    def described_pool(
        self, prepared: Any, operands: PoolOperands, places: PoolOperands, first: int
    ) -> LaunchSpec | None:
        """Load the kernel and describe the launch, like `described`."""

    def described_sum(
        self, operands: SumOperands, places: SumOperands, count: int, distance: int, own_at: int
    ) -> LaunchSpec | None:
        """Load and describe the kernel of `DeviceCompute.sum`, like `described`.

        Args:
            operands: the operands of a call.
            places: places of the operands in calls.
            count: number of slots.
            distance: rows from one slot to the next.
            own_at: number of the slot before which the own part is added.
        """


class OneKernelOutput(NamedTuple):
    """Handles of one output's operands in a call that is one kernel, or their places.

    Attributes:
        w: the weight that x is multiplied with.
        bias: one row, or None.
        y: target of the result.
    """

    w: Any
    bias: Any | None
    y: Any


class OneKernelOperands(NamedTuple):
    """Handles of the operands of a call that is one kernel, or their places.

    Attributes:
        x: the first operand.
        outputs: products of the table, in its order; exactly one unless the kernel gathers.
        kept: target of the gathered x, or None.
    """

    x: Any
    outputs: Sequence[OneKernelOutput]
    kept: Any | None = None


class PoolOperands(NamedTuple):
    """Handles of the operands of a launch that pools bags of several tables, or their places.

    Attributes:
        tables: the rank's tables.
        indices: per table, one row with the lookups of all bags.
        offsets: per table, one row with the first lookup of each bag.
        y: target of the result.
        weights: per table, one row with a float32 weight per lookup, or None.
    """

    tables: Sequence[Any]
    indices: Sequence[Any]
    offsets: Sequence[Any]
    y: Any
    weights: Sequence[Any]

    @classmethod
    def of_names(cls, of: Callable[[str], Any], modes: Sequence[str]) -> PoolOperands:
        """Return `of` applied to the names of the buffers of tables with these modes."""
        tables, indices, offsets = (
            [of(f"{name}{i}") for i in range(len(modes))]
            for name in ("table", "indices", "offsets")
        )
        weights = [
            of(f"weights{i}") if mode == "weighted" else None for i, mode in enumerate(modes)
        ]
        return cls(tables, indices, offsets, of("y0"), weights)


WholeOperands = OneKernelOperands | PoolOperands


class SumOperands(NamedTuple):
    """Handles of the operands of a sum over ranks, or their places.

    Attributes:
        slots: the first slot.
        own: the own part.
        bias: one row, or None.
        target: target of the sum.
    """

    slots: Any
    own: Any
    bias: Any | None
    target: Any


class OneKernelWindows(NamedTuple):
    """Addresses of all ranks' windows or mailboxes.

    Attributes:
        words, data: addresses of the words and of the data, by copy and rank.
        counts: address of this rank's call counts of its mailbox; 0 for windows.
    """

    words: Sequence[Sequence[int]]
    data: Sequence[Sequence[int]]
    counts: int = 0


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
