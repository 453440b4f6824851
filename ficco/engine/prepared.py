"""Prepared calls: repeats with tensors of an earlier layout, of which only addresses are read.

Most of a call's host time is spent in Python. A prepared call is a shorter path for calls that
native code enqueues whole. A front end stores a call, with a weak reference to its PreparedCall.
The runtime stores the PreparedCall with the bound program, so that both end together, for example
when windows grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ficco import _native
from ficco.core.dtypes import ELEMENT_BYTES
from ficco.engine.compute import DeviceCompute
from ficco.engine.launches import Launches
from ficco.engine.repeated_calls import CallSteps
from ficco.kernels.arrays import item_bytes
from ficco.plan import Buffer


class CallSlots(NamedTuple):
    """The slots of a call's addresses.

    Attributes:
        numbers: slots, by name, of buffers that are passed or allocated; some have none.
        total: number of slots, with those of windows.
        workspaces: buffers that may be allocated for a call.
    """

    numbers: Mapping[str, int]
    total: int
    workspaces: Sequence[Buffer]


class Leader(NamedTuple):
    """The products of a call that a library makes before native code launches the rest.

    The results may be allocated while the device multiplies.

    Attributes:
        steps: enqueue them, for each window copy. Inputs are the call's matrices in the order of
            the addresses; results that are not allocated yet are None.
        stores_results: whether a product is stored in a result.
    """

    steps: tuple[CallSteps, CallSteps]
    stores_results: bool


class Between(NamedTuple):
    """The work of a library between native launches.

    Attributes:
        steps: enqueue it, for each window copy. Inputs are the call's matrices, in the order of
            the addresses, and then the workspaces.
        segments: for each segment the number of steps until its work is enqueued, and the row to
            mark then, or -1; None: native code launches it.
    """

    steps: tuple[CallSteps, CallSteps]
    segments: list[tuple[int, int] | None]


class Results(NamedTuple):
    """How the results of a call are allocated.

    Attributes:
        new: has no inputs, and allocates the results on the current device.
        matrices: takes the results, and returns matrices in their memory; None: they are matrices.
    """

    new: CallSteps
    matrices: CallSteps | None


class PreparedCall:
    """A call of a bound program that can be repeated with other matrices of the same layout.

    It keeps the plan's window, so callers that do not hold the plan must reference it weakly.
    Matrices of its calls are tensors of PyTorch.

    Args:
        program: the plan's native program.
        launches: the plan's launches.
        compute: the library of the matrices.
        arrays: matrices by name, in the order in which calls give them: results are last.
        lengths: names of the rows whose length may differ from call to call.
        slots: the slots of the call's addresses.
        window: the plan's window.
        library: what a library enqueues: products before the launch, or work between launches;
            None if native code launches everything.

    Attributes:
        window: as above.
        by_library: whether a library reads matrices of the call.
        run: enqueues a call; see `_native.PreparedCall.run`.
        call: the call that this belongs to; set by the runtime.
    """

    __slots__ = ("__weakref__", "_native", "by_library", "call", "run", "window")

    def __init__(
        self,
        program: Any,
        launches: Launches,
        compute: DeviceCompute,
        arrays: Mapping[str, Any],
        lengths: Sequence[str],
        slots: CallSlots,
        window: Any,
        library: Leader | Between | None,
    ) -> None:
        numbers, total, workspaces = slots
        addresses, pitches = [0] * total, [0] * total  # pitches in bytes; unused for windows
        placed = [numbers.get(name, -1) for name in arrays]
        for name, slot in zip(arrays, placed, strict=True):
            if slot >= 0:
                addresses[slot], pitches[slot] = compute.place(arrays[name])
        allocated = []
        for buffer in workspaces:
            if buffer.name in numbers:
                placed.append(numbers[buffer.name])
                pitches[placed[-1]] = buffer.cols * ELEMENT_BYTES[buffer.dtype]
                allocated.append(partial(_workspace, compute, buffer))
        launches.place(arrays, addresses, pitches)
        rows = [(numbers[name], item_bytes(arrays[name])) for name in lengths]
        self._native = _native.PreparedCall(
            program, (placed, pitches, rows), (launches, launches.state), allocated,
            library if isinstance(library, Leader) else None,
            library if isinstance(library, Between) else None,
        )  # fmt: skip
        self.run, self.by_library, self.window = self._native.run, library is not None, window
        self.call: Any = None

    @property
    def stale(self) -> bool:
        """Whether the plan now launches kernels for matrices of another layout."""
        return not self._native.is_valid

    @property
    def begun(self) -> bool:
        """Whether the last call of `run` has raised while it enqueued work, and the call failed."""
        return self._native.begun


def _workspace(compute: DeviceCompute, buffer: Buffer) -> tuple[Any, int]:
    """Allocate a workspace on the current device; return it and its address."""
    matrix = compute.empty(buffer.rows, buffer.cols, buffer.dtype)
    return matrix, compute.place(matrix)[0]
