"""Prepared calls: repeated calls with matrices of an earlier layout, which read only addresses.

Most of a call's host time is spent in Python. A prepared call is a shorter path for calls that
native code launches whole. A front end stores a call, with a weak reference to its PreparedCall.
The runtime stores the PreparedCall with the bound program, so that both end together, for example
when windows grow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ficco import _native
from ficco.compute import DeviceCompute
from ficco.dtypes import ELEMENT_BYTES
from ficco.engines.launches import Launches
from ficco.kernels.arrays import item_bytes
from ficco.plan import Buffer

__all__ = ["CallSlots", "Leader", "PreparedCall"]

_LENGTHS = ("indices", "weights")  # names of buffers with an element per lookup


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

    Attributes:
        enqueue: enqueues them, from the call's matrices in the order of the addresses, and the
            window copy.
        stores_results: whether a product is stored in a result.
    """

    enqueue: Callable[[Sequence[Any], int], None]
    stores_results: bool


class PreparedCall:
    """A call of a bound program that can be repeated with other matrices of the same layout.

    It keeps the plan's window, so callers that do not hold the plan must reference it weakly.

    Args:
        program: the plan's native program.
        launches: the plan's launches.
        compute: the library of the matrices.
        arrays: matrices by name, in the order of the addresses that `run` takes.
        slots: the slots of the call's addresses.
        window: the plan's window.
        leader: the library's products before the launch; None if there are none.

    Attributes:
        window, leader: as above.
        call: the call that this belongs to; set by the runtime.
    """

    __slots__ = (
        "__weakref__", "_compute", "_launches", "_program", "_rows", "_slots", "_state",
        "_workspaces", "call", "leader", "window",
    )  # fmt: skip

    def __init__(
        self,
        program: Any,
        launches: Launches,
        compute: DeviceCompute,
        arrays: Mapping[str, Any],
        slots: CallSlots,
        window: Any,
        leader: Leader | None,
    ) -> None:
        self._program, self._launches, self._compute = program, launches, compute
        numbers, total, workspaces = slots
        self._workspaces = [b for b in workspaces if b.name in numbers]
        addresses, pitches = [0] * total, [0] * total  # pitches in bytes; unused for windows
        placed = [numbers.get(name, -1) for name in arrays]
        for name, slot in zip(arrays, placed, strict=True):
            if slot >= 0:
                addresses[slot], pitches[slot] = compute.place(arrays[name])
        for buffer in self._workspaces:
            placed.append(numbers[buffer.name])
            pitches[placed[-1]] = buffer.cols * ELEMENT_BYTES[buffer.dtype]
        launches.place(arrays, addresses, pitches)
        self._slots = _native.PreparedSlots(placed, pitches)
        self._rows = [
            (numbers[name], item_bytes(arrays[name]))
            for name in arrays
            if name.startswith(_LENGTHS)
        ]
        self._state = launches.state
        self.window, self.leader = window, leader
        self.call: Any = None

    @property
    def stale(self) -> bool:
        """Whether the plan now launches kernels for matrices of another layout."""
        return self._launches.state is not self._state

    def follow(self, stream: int) -> bool:
        """Put a stream behind the last call, for the library's products of this call.

        Returns:
            False if nothing was enqueued and the call must take the full path.
        """
        return not self.stale and bool(self._program.follow(stream))

    def end(self, stream: int) -> None:
        """Let later calls wait for products behind which no launch was enqueued."""
        with contextlib.suppress(RuntimeError):  # the device may be lost
            self._program.end(stream)

    def run(
        self, addresses: Sequence[int], copy: int, stream: int, lengths: Sequence[int] = ()
    ) -> bool:
        """Enqueue a call on a stream of the current device, behind its products.

        Args:
            addresses: addresses of the matrices, in the order of the slots.
            copy: the window copy of this call.
            stream: driver handle of the library's current stream.
            lengths: elements of the rows with an element per lookup, in their order.

        Returns:
            False if no launch was enqueued and the call must take the full path. The products are
            made again then.

        Raises:
            RuntimeError: the group has failed; no wait and no send was enqueued.
            GpuError: a driver call failed; the group has then failed, too.
        """
        if self._launches.state is not self._state:
            return False
        if self._rows:
            for (slot, size), length in zip(self._rows, lengths, strict=True):
                self._slots.set_pitch(slot, length * size)  # says where the last bag ends
        workspaces = []  # kept until the call is enqueued; stream order protects them afterwards
        if self._workspaces:
            workspaces = [self._compute.empty(b.rows, b.cols, b.dtype) for b in self._workspaces]
            addresses = [*addresses, *(self._compute.place(array)[0] for array in workspaces)]
        try:
            followed = self.leader is not None
            return bool(self._program.call_prepared(copy, stream, addresses, self._slots, followed))
        except BaseException:
            self._program.abandon()
            raise
