"""Compute: "run this GEMM, this reduction". One library a module; nothing about order or lanes.

`Compute` runs when it is called, on the host's memory. `DeviceCompute` enqueues on the stream that
is the library's current one, on a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ficco.errors import InputError
from ficco.kernels.gated_parts import GatedPart, WindowRelease
from ficco.kernels.native_launch import LaunchSpec
from ficco.kernels.one_kernel_all_reduce_table import OneKernelTable
from ficco.kernels.one_kernel_gather_table import GatherTable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Compute",
    "DeviceCompute",
    "DeviceKernels",
    "DirectOperands",
    "DirectOutput",
    "DirectWindows",
    "GatedOperands",
    "Slots",
    "SumOperands",
    "named",
]


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


class Slots(NamedTuple):
    """Matrices of one shape that lie at equal distances in a larger one.

    Attributes:
        first: handle of the first.
        number: how many.
        distance: from one to the next, in rows of the larger matrix.
    """

    first: Any
    number: int
    distance: int


class GatedOperands(NamedTuple):
    """Handles of what a gated GEMM works on.

    Attributes:
        own: what parts read that are there already, or None.
        window: what the other parts read, or None.
        b: the operand.
        bias: one row that is added to every row, or None.
        c: takes the product.
        partial: takes parts that are pushed, if others go to c; else None.
        landing: what peers push that is added to own parts, or None.
        words: this rank's words of the window copy that the call uses, int32.
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
    """Kernels of ficco's own: what native code launches, and what libraries do not have.

    A gated GEMM is one launch over parts whose rows are still arriving.
    """

    def prepare(
        self,
        parts: Sequence[GatedPart],
        n: int,
        k: int,
        dtype: str,
        timeout_s: float,
        stop_word: Callable[[], int],
        begun: bool = False,
        release: WindowRelease | None = None,
    ) -> Any:
        """Return what `arm` takes, for launches on the current device.

        Args:
            parts: in the order in which they are to be made.
            n: columns of the product.
            k: depth.
            dtype: of all matrices.
            timeout_s: how long a launch waits for a word at most; its part is NaN then.
            stop_word: gives the address of a word in device memory; while it is not 0, launches
                wait for nothing, and their parts are NaN.
            begun: whether parts are added to what their targets hold.
            release: the words by which the launch gives the window back when it ends, of which a
                part has rows; None: it does not.

        Raises:
            InputError: the current stream is captured into a graph.
        """

    def arm(self, prepared: Any, operands: GatedOperands) -> Callable[[], None]:
        """Load what one launch over all parts needs, and return what enqueues it.

        To be called before a stream waits for what a peer does: loading may wait for streams.
        """

    def place(self, b: Any) -> tuple[int, int, bool]:
        """Return an operand b's address, the bytes from one row to the next as it lies in memory,
        and whether such a row is a column of b.
        """  # noqa: D205

    def described(
        self, prepared: Any, operands: GatedOperands, places: GatedOperands
    ) -> LaunchSpec | None:
        """Load what a launch needs, as `arm`, and say how native code launches it.

        Args:
            prepared: by `prepare`.
            operands: of a call.
            places: where calls have them, as `ficco.kernels.native_launch` names places.

        Returns:
            The launch for all calls whose operands are laid out alike; None: nothing is launched.

        Raises:
            EngineError: it is unknown how; `arm` has to do.
        """

    def prepare_one_kernel(
        self,
        table: OneKernelTable | GatherTable,
        windows: OneKernelWindows,
        digest: int,
        timeout_s: float,
        missed_word: int,
        stop_word: Callable[[], int],
    ) -> Any:
        """Return what `arm_direct` takes: a whole call in one launch, on the current device.

        Args:
            table: of the plan.
            windows: that calls use, or mailboxes; the plan says which.
            digest: of the plan.
            timeout_s: how long a launch waits for a word at most; what depends on it is NaN then.
            missed_word: address of where the launch tells which word it missed.
            stop_word: returns the address of a word that is 1 when the launch is to give up.

        Raises:
            InputError: the current stream is captured into a graph.
        """

    def arm_one_kernel(
        self, prepared: Any, operands: OneKernelOperands, copy: int
    ) -> Callable[[], None]:
        """Load what the launch needs, and return what enqueues it, as `arm`."""

    def described_one_kernel(
        self, prepared: Any, operands: OneKernelOperands, places: OneKernelOperands
    ) -> LaunchSpec:
        """Load and say the same of it as `described`."""

    def described_sum(
        self, operands: SumOperands, places: SumOperands, count: int, distance: int, own_at: int
    ) -> LaunchSpec | None:
        """Load and say the same of `DeviceCompute.sum`.

        Args:
            operands: of a call.
            places: where calls have them.
            count: slots.
            distance: from one to the next, in rows.
            own_at: the slot before which the own part is added.
        """


class OneKernelOutput(NamedTuple):
    """Handles of what belongs to one output of a direct call, or the places of them.

    Attributes:
        w: that x is multiplied with.
        bias: one row, or None.
        y: takes the result.
    """

    w: Any
    bias: Any | None
    y: Any


class OneKernelOperands(NamedTuple):
    """Handles of what a direct call works on, or the places of them.

    Attributes:
        x: what is multiplied.
        outputs: products of the table, in its order; one for all that is no gather.
        kept: takes the gathered x, or None.
    """

    x: Any
    outputs: Sequence[OneKernelOutput]
    kept: Any | None = None


class SumOperands(NamedTuple):
    """Handles of what a sum over ranks works on, or the places of them.

    Attributes:
        slots: the first of them.
        own: the own part.
        bias: one row, or None.
        target: takes the sum.
    """

    slots: Any
    own: Any
    bias: Any | None
    target: Any


class OneKernelWindows(NamedTuple):
    """Addresses of all ranks' windows or mailboxes, by copy and rank: of words, and of data.

    And where this rank counts calls on its mailbox; 0 for windows.
    """

    words: Sequence[Sequence[int]]
    data: Sequence[Sequence[int]]
    counts: int = 0


class DeviceCompute(Protocol):
    """A library that enqueues on GPUs. Handles are matrices, sliced as h[r0:r1, c0:c1], with `.T`.

    All sums are float32; what is stored in a narrower dtype is rounded once, to nearest even.
    Nothing here waits for a device, but for what a library does at its first call.

    Attributes:
        kernels: of ficco's own, for its handles; None: there are none.
    """

    name: str
    kernels: DeviceKernels | None

    def stream(self) -> int:
        """Return the driver's handle of the current stream."""

    def exact(self, dtype: str) -> AbstractContextManager[None]:
        """Hold GEMMs of a dtype to float32 sums while inside, where less may be allowed."""

    def part(self, handle: Any, row0: int, row1: int, col0: int, col1: int) -> Any:
        """Return handle[row0:row1, col0:col1], as fast as the library can."""

    def empty(self, rows: int, cols: int, dtype: str) -> Any:
        """Return a new matrix on the current device, to be used on the current stream."""

    def at(self, address: int, rows: int, cols: int, dtype: str) -> Any:
        """Return a handle of memory on the current device that somebody else keeps."""

    def place(self, handle: Any) -> tuple[int, int]:
        """Return a matrix's address and the bytes from one row to the next."""

    def reads(self, handle: Any) -> bool:
        """Return whether GEMMs read a weight as it is."""

    def operand(self, handle: Any) -> Any:
        """Return a weight in a form that GEMMs read as it is; a copy where there is none."""

    def gemm(self, a: Any, b: Any, c: Any, accumulate: bool, add: list[Any]) -> None:
        """Store a.b (+ c) (+ each of `add`) in c; terms of `add` may have one row."""

    def gemms(self, a: Slots, b: Any, c: Slots, accumulate: bool, add: list[Any]) -> None:
        """Do that for matrices at equal distances, which share b and `add`, in one launch."""

    def reduce(self, sources: list[Any], target: Any) -> None:
        """Put the sum of sources, in order, into the target; one may have a single row."""

    def sum(self, slots: Slots, own: Any, own_at: int, bias: Any | None, target: Any) -> None:
        """Put slots, with `own` before slot number `own_at`, and the bias, into the target."""

    def bag(
        self, table: Any, indices: Any, offsets: Any, bags: tuple[int, int], target: Any
    ) -> None:
        """Put the sums of bags [first, past last) into the target, as `Compute.bag` does."""

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
