"""Calls of matrices that lie as those of an earlier call did: nothing but addresses is looked at.

What a call costs the host is Python's for the larger part; this is the shorter way, for calls that
native code launches whole. A front end remembers a call, and weakly its PreparedCall; the runtime
keeps that beside the bound plan, so that it goes with the plan, when windows grow, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ficco.compute import DeviceCompute
from ficco.engines.launches import Launches
from ficco.plan import ELEMENT_BYTES, Buffer

__all__ = ["PreparedCall"]


class PreparedCall:
    """A call of a bound plan, to be made again with other matrices, laid out as its own were.

    To be held weakly by whoever does not hold the plan, whose window it keeps.

    Args:
        program: the plan's native program.
        launches: the plan's.
        compute: the library whose matrices they are.
        arrays: matrices by name, in the order in which `run` is told where others begin.
        numbers: slots of what is given or allocated for a call, by name; not all has one.
        count: how many slots there are, with those of windows.
        workspaces: what may be allocated for a call.
        window: the plan's.
        before: enqueues what the library makes before the launch, given the call's matrices by
            name; None: there is nothing.

    Attributes:
        window, before: as above.
        call: for the runtime, which keeps there whose call it is.
    """

    __slots__ = (
        "__weakref__", "_compute", "_launches", "_pitches", "_program", "_slots", "_state",
        "_workspaces", "before", "call", "window",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - a call has as many facts
        self,
        program: Any,
        launches: Launches,
        compute: DeviceCompute,
        arrays: Mapping[str, Any],
        numbers: Mapping[str, int],
        count: int,
        workspaces: Sequence[Buffer],
        window: Any,
        before: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        self._program, self._launches, self._compute = program, launches, compute
        self._slots = [numbers.get(name, -1) for name in arrays]
        self._workspaces = [(b, numbers[b.name]) for b in workspaces if b.name in numbers]
        addresses, self._pitches = [0] * count, [0] * count  # bytes; windows' are not looked at
        for buffer, slot in self._workspaces:
            self._pitches[slot] = buffer.cols * ELEMENT_BYTES[buffer.dtype]
        for name, slot in zip(arrays, self._slots, strict=True):
            if slot >= 0:
                addresses[slot], self._pitches[slot] = compute.place(arrays[name])
        launches.place(arrays, addresses, self._pitches)
        self._state = launches.state
        self.window, self.before = window, before
        self.call: Any = None

    @property
    def stale(self) -> bool:
        """Whether the plan launches kernels for matrices that lie otherwise now."""
        return self._launches.state is not self._state

    def run(
        self,
        addresses: Sequence[int],
        copy: int,
        stream: int,
        matrices: Mapping[str, Any],
    ) -> bool:
        """Enqueue a call on a stream of the current device; False: nothing is, it needs a look.

        Args:
            addresses: of the matrices, in the order of the slots.
            copy: the window copy of this call.
            stream: the library's current one, as the driver knows it.
            matrices: by name, if something is made `before` the launch; else empty.

        Raises:
            RuntimeError: the group has failed; nothing was enqueued that waits or is sent.
            GpuError: the driver refuses something; the group has failed then.
        """
        if self._launches.state is not self._state:
            return False
        given = [0] * len(self._pitches)
        for slot, address in zip(self._slots, addresses, strict=True):
            if slot >= 0:
                given[slot] = address
        made = []  # in stream order it is used until the call has ended
        for buffer, slot in self._workspaces:
            made.append(self._compute.empty(buffer.rows, buffer.cols, buffer.dtype))
            given[slot] = self._compute.place(made[-1])[0]
        if self.before is not None:
            if not self._program.can_call_prepared(stream, given, self._pitches):
                return False
            self.before(matrices)
        try:
            return bool(self._program.call_prepared(copy, stream, given, self._pitches))
        except BaseException:
            self._program.abandon()
            raise
