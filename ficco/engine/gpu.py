"""The engine of GPUs: one rank's program on streams, copy engines and a compute library.

A call runs on the caller's stream, which gets the launches. The other lanes are separate streams,
forked from the caller's stream and joined to it again. One native call enqueues everything between
two launches. The host never waits for the device.

    caller's stream   fork | waits | gemm | waits | gemm | ... | clear, free | join
    push lanes             | free, entered | copy data copy data ...  |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ficco import _native
from ficco.core.dtypes import ELEMENT_BYTES
from ficco.engine import bound_program
from ficco.engine.compute import DeviceCompute
from ficco.engine.devices import Device
from ficco.engine.launches import Launches
from ficco.engine.library_calls import Call, View, call_of, target_of
from ficco.engine.library_steps import LibrarySteps, has_steps
from ficco.engine.prepared import Between, CallSlots, Leader, PreparedCall
from ficco.engine.window_layout import COPIES, Window
from ficco.plan import Region, has_mailbox, window_places
from ficco.plan.timeline import Span
from ficco.program import Copy, Experts, Gated, Gemm, OneKernel, Program, operands_of
from ficco.program.encoding import Segment, encode

_OWN = (Experts, Gated, OneKernel)  # works that no library does


class BoundProgram(bound_program.BoundProgram):
    """A rank's program, bound to a window."""

    def __init__(
        self,
        program: Program,
        device: Device,
        window: Window,
        compute: DeviceCompute,
        digest: int,
    ) -> None:
        super().__init__(program, compute)
        self._device, self._window = device, window  # which keeps the memory alive
        mailbox = has_mailbox(program.buffers)
        self._places = {} if mailbox else window_places(program.buffers)[0]
        encoded = encode(program)
        self._count = len(encoded.slots)
        self._leading, self._segments = encoded.leading, encoded.segments
        self._calls = {
            entry.row: call_of(entry.launch.work, self._buffers)
            for entry in (*self._leading, *self._segments)
            if not (isinstance(entry.launch.work, _OWN) and entry.launch.by == "native")
        }
        counts = (encoded.segment_count, encoded.row_count, len(encoded.slots))
        if program.target.wait == "kernel":  # kernels that wait poll the stop word
            device.stop_word(compute)
        self._native = _native.GpuProgram(
            device.native, window.native, encoded.ops, encoded.windows, counts, digest
        )
        self._handles = [self._window_handles(copy) for copy in range(COPIES)]
        self._launches = None
        has_kernels = program.target.kernels or program.target.gathers
        if compute.kernels is not None and has_kernels:
            self._launches = Launches(
                program, encoded, compute, self._native, window, device, digest
            )
            window.recent.append(self._launches)
        # Slots of buffers that are passed to a call or allocated for it.
        own = [(name, slot) for (rank, name), slot in encoded.slots.items() if rank == program.rank]
        # A kernel that runs a whole call needs no memory for workspaces that no library reads.
        works = [launch.work for launch in program.launches]
        read = {r.buffer for work in works if isinstance(work, Gemm) for r in operands_of(work)}
        whole = any(isinstance(work, OneKernel) for work in works)
        spaces = [buffer for buffer in program.buffers if buffer.role == "workspace"]
        self._workspaces = [b for b in spaces if not whole or b.name in read]
        unused = {b.name for b in spaces if b not in self._workspaces}
        self._numbers = {n: slot for n, slot in own if n not in {*self._places, *unused}}
        placed = set() if self._launches is None else self._launches.placed
        self._slots = [(slot, name) for name, slot in self._numbers.items() if slot not in placed]
        self._held = False  # whether the window holds the launches
        self._views: list[dict[Region, Any]] = [{}, {}]  # of windows, by copy of the call
        self._weights = [b.name for b in program.buffers if b.role == "weight"]
        self._adjacent = () if program.target.copies_2d else _copied_whole(program)
        self._dtype = next(b.dtype for b in program.buffers if b.role == "output")

    def _window_handles(self, copy: int) -> dict[tuple[str, int], Any]:
        """Return handles of the own window buffers for a call on `copy`, by name and shift."""
        handles = {}
        for name, place in self._places.items():
            buffer = self._buffers[name]
            for shift in range(buffer.copies):
                address = self._window.own(copy ^ shift) + place
                handles[name, shift] = self._compute.at(
                    address, buffer.rows, buffer.cols, buffer.dtype
                )
        return handles

    @property
    def captured(self) -> bool:
        """See `bound_program.BoundProgram.captured`."""
        return self._native.captured

    @property
    def launch_count(self) -> int:
        """Number of launches of a call."""
        return len(self._leading) + len(self._segments)

    @property
    def library_calls(self) -> int:
        """Number of a call's launches that a library makes."""
        native = 0 if self._launches is None else len(self._launches.native)
        return self.launch_count - native

    def run(self, arrays: Mapping[str, Any], copy: int, traced: bool = False) -> bool:
        """Enqueue one call on the library's current stream, on the current device.

        Args:
            arrays: inputs, weights and outputs by buffer name, of the plan's shapes and dtypes;
                inputs that copies read have unit stride along rows. Where copies need adjacent
                rows, other inputs and outputs are copied.
            copy: the window copy of this call.
            traced: whether to record times, for `spans`.

        Returns:
            True: the call is enqueued.

        Raises:
            RuntimeError: the group has failed; no wait and no send was enqueued.
            GpuError: a driver call failed; the group has then failed, too.
        """
        native, launches = self._native, self._launches
        local, addresses, pitches = self._placed(arrays)
        try:
            armed: dict[int, Callable[[], None]] = {}
            whole = launches is not None and launches.suit(addresses, pitches)
            if launches is not None and not whole:
                with self._device.preparing():
                    armed = launches.ready(self._view(local, copy), copy, addresses, pitches)
                whole = len(launches.native) == len(self._segments)
            if whole and not self._leading:
                native.call(copy, self._compute.stream(), traced, addresses, pitches)
            else:
                native.start(copy, self._compute.stream(), traced, addresses, pitches)
                self._submit(self._view(local, copy), armed, traced)
                native.finish()
            self._unpack(local, arrays)
        except BaseException:
            native.abandon()
            raise
        finally:
            if not self._held and launches is not None and native.captured:
                self._window.held.append(launches)
                self._held = True
        return True

    def prepared_call(
        self, arrays: Mapping[str, Any], lengths: Sequence[str]
    ) -> PreparedCall | None:
        """Return a prepared call for matrices laid out as `arrays`, which `run` has used.

        Its `run` takes tensors in the order of `arrays`, and the lengths of the rows `lengths`,
        which may differ from call to call. Returns None if Python must launch a part
        of the call. Enqueues and allocates nothing.
        """
        launches = self._launches
        if launches is None or not self._is_repeatable(launches.native):
            return None
        if not all(self._compute.reads(arrays[name]) for name in self._weights):
            return None  # the library reads a copy of the weight
        if not all(self._is_packed(name, arrays[name]) for name in self._adjacent):
            return None  # copy engines read a copy of the input
        state, parts = launches.state, (self._native, launches, self._compute)
        library: Leader | Between | None = None
        if self._leading:
            library = self._leader(list(arrays))
        elif len(launches.native) < len(self._segments):
            library = self._between(list(arrays), launches.native)
        slots = CallSlots(self._numbers, self._count, self._workspaces)
        prepared = PreparedCall(*parts, arrays, lengths, slots, self._window, library)
        # None: another thread has run with matrices of another layout meanwhile.
        return prepared if launches.state is state else None

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Load the kernels of calls with such arrays, as no capture may; enqueue nothing."""
        self._loaded(arrays)

    def _loaded(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Load the kernels of calls with such arrays; return a call's matrices by name."""
        local, addresses, pitches = self._placed(arrays)
        if self._launches is not None:
            with self._device.preparing():
                self._launches.ready(self._view(local, 0), 0, addresses, pitches)
        return local

    def rehearse(self, arrays: Mapping[str, Any]) -> None:
        """Load all kernels of calls with such arrays: run the library's calls into scratch memory.

        A library may load a kernel at the kernel's first launch. Outputs hold arbitrary values
        afterwards.
        """
        compute, launches, local = self._compute, self._launches, self._loaded(arrays)
        for name in self._places:
            buffer = self._buffers[name]
            local[name] = compute.empty(buffer.rows, buffer.cols, buffer.dtype)
        view = self._view(local, 0)
        native = frozenset[int]() if launches is None else launches.native
        launched = {self._segments[number].row for number in native}
        with compute.exact(self._dtype):
            for row, call in self._calls.items():
                if row not in launched:
                    call(compute, view)

    def _placed(self, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[int], list[int]]:
        """Return a call's matrices by name, and their addresses and pitches by slot."""
        compute = self._compute
        local = dict(arrays)
        for name in self._adjacent:
            local[name] = self._packed(name, local[name])
        for name in self._weights:
            local[name] = compute.operand(local[name])
        for buffer in self._workspaces:
            local[buffer.name] = compute.empty(buffer.rows, buffer.cols, buffer.dtype)
        addresses, pitches = [0] * self._count, [0] * self._count
        for slot, name in self._slots:
            addresses[slot], pitches[slot] = compute.place(local[name])
        if self._launches is not None:
            self._launches.place(local, addresses, pitches)
        return local, addresses, pitches

    def _is_packed(self, name: str, given: Any) -> bool:
        buffer = self._buffers[name]
        _, pitch = self._compute.place(given)
        return buffer.rows <= 1 or pitch == buffer.cols * ELEMENT_BYTES[buffer.dtype]

    def _packed(self, name: str, given: Any) -> Any:
        """Return a matrix whose rows are adjacent: the given one, or a new one for it.

        It is a copy of an input, and holds arbitrary values for an output.
        """
        if self._is_packed(name, given):
            return given
        buffer, compute = self._buffers[name], self._compute
        packed = compute.empty(buffer.rows, buffer.cols, buffer.dtype)
        if buffer.role == "input":
            compute.reduce([given], packed)
        return packed

    def _unpack(self, local: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Store the outputs that were packed where the caller wants them."""
        for name in self._adjacent:
            if self._buffers[name].role == "output" and local[name] is not arrays[name]:
                self._compute.reduce([local[name]], arrays[name])

    def _leader(self, names: Sequence[str]) -> Leader:
        """Return the launches before a call that is one kernel; they take whole matrices.

        names: of the call's matrices, in the order in which calls give them.
        """
        works = [entry.launch.work for entry in self._leading]
        planned = [self._library_steps(names, copy) for copy in range(COPIES)]
        for steps in planned:
            for work in works:
                steps.add(work)
        first, second = (steps.call_steps() for steps in planned)
        stored = [self._buffers[target_of(work).buffer] for work in works]
        return Leader((first, second), any(buffer.role == "output" for buffer in stored))

    def _is_repeatable(self, native: frozenset[int]) -> bool:
        """Return whether native code and steps of a library can enqueue the whole call.

        native: numbers of the segments whose launch native code makes.
        """
        others = [entry for i, entry in enumerate(self._segments) if i not in native]
        if self._leading:
            return not others
        return all(has_steps(entry.launch.work) for entry in others)

    def _between(self, names: Sequence[str], native: frozenset[int]) -> Between:
        """Return what a library enqueues between native launches.

        Args:
            names: of the call's matrices, in the order in which calls give them.
            native: as for `_is_repeatable`.
        """
        given = [*names, *(b.name for b in self._workspaces if b.name in self._numbers)]
        planned = [self._library_steps(given, copy) for copy in range(COPIES)]
        segments: list[tuple[int, int] | None] = []
        for number, entry in enumerate(self._segments):
            if number in native:
                segments.append(None)
                continue
            for steps in planned:
                steps.add(entry.launch.work)
            segments.append((planned[0].count, entry.mark))
        first, second = (steps.call_steps() for steps in planned)
        return Between((first, second), segments)

    def _library_steps(self, names: Sequence[str], copy: int) -> LibrarySteps:
        """Return a plan without steps, for calls on a window copy with these inputs."""
        window = self._view({}, copy)
        return LibrarySteps(names, self._buffers, self._places, window, self._compute, self._dtype)

    def _view(self, local: dict[str, Any], copy: int) -> View:
        """Return a function that maps a region to its handle in this call."""
        windows, views, part = self._handles[copy], self._views[copy], self._compute.part

        def view(region: Region) -> Any:
            handle = local.get(region.buffer)
            if handle is not None:  # a batch may have fewer lookups than the plan
                row0, row1, col0, col1 = region[2:6]
                return part(handle, row0, row1, col0, min(col1, handle.shape[1]))
            cached = views.get(region)
            if cached is None:
                cached = views[region] = part(windows[region.buffer, region.copy], *region[2:6])
            return cached

        return view

    def _submit(self, view: View, armed: dict[int, Callable[[], None]], traced: bool) -> None:
        """Enqueue all segments, the launches before them and those between them."""
        native, launches = self._native, self._launches
        by_native = frozenset[int]() if launches is None else launches.native
        with self._compute.exact(self._dtype):
            for entry in self._leading:
                self._launch(entry, self._calls[entry.row], view, traced)
            for number, entry in enumerate(self._segments):
                native.submit(number)
                if number in by_native:
                    native.launch(number)
                    continue
                launch = armed.get(number)
                call = self._calls[entry.row] if launch is None else _called(launch)
                self._launch(entry, call, view, traced)
                if entry.mark >= 0:
                    native.mark(entry.mark)
        native.submit(len(self._segments))

    def _launch(self, entry: Segment, call: Call, view: View, traced: bool) -> None:
        if traced:
            self._native.stamp(entry.row, False)
        call(self._compute, view)
        if traced:
            self._native.stamp(entry.row, True)

    def spans(self) -> list[Span]:
        """Return the spans of the last traced call once it has ended, in monotonic clock time.

        The device's clock is aligned with the host's after the call, to about 10 us.
        """
        times: npt.NDArray[np.int64] = self._native.times()
        return bound_program.spans_of(self.program, self.rows, times)


def _copied_whole(program: Program) -> tuple[str, ...]:
    """Return the inputs and outputs of which a copy moves several rows at once."""
    given = {buffer.name for buffer in program.buffers if buffer.role in ("input", "output")}
    found = {
        region.buffer
        for entry in program.entries
        if isinstance(entry, Copy)
        for region in (entry.source, entry.target)
        if region.rank == program.rank and region.rows > 1 and region.buffer in given
    }
    return tuple(sorted(found))


def _called(launch: Callable[[], None]) -> Call:
    """Return a launch that is ready as a function of any arrays."""
    return lambda compute, view: launch()
