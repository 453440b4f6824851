"""The CUDA engine: one rank's plan on streams, copy engines and a compute library.

A call runs on the caller's stream, which gets the compute. The other lanes are separate streams,
forked from the caller's stream and joined to it again. One native call enqueues everything between
two compute steps. The host never waits for the device.

    caller's stream   fork | waits | gemm | waits | gemm | ... | clear, free | join
    push lanes             | free, entered | copy data copy data ...  |
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.compute import DeviceCompute
from ficco.dtypes import ELEMENT_BYTES
from ficco.engines.gating import steps_within
from ficco.engines.launches import Launches, Whole, warn_of_streams
from ficco.engines.one_kernel import is_one_launch, made_before, table_of
from ficco.engines.prepared import PreparedCall
from ficco.engines.rows import COMPUTE, encode, encode_whole, trace_rows
from ficco.engines.window_layout import COPIES, Window
from ficco.engines.work import View, calls_of
from ficco.errors import EngineError, ScheduleError
from ficco.plan import SIGNALS_PER_COPY, RankPlan, Region, Step, has_mailbox, window_places
from ficco.schedule import Schedule
from ficco.timeline import Span

try:
    from ficco import _native
except ImportError as missing:
    raise EngineError(
        f"the native core cannot be loaded ({missing}); install ficco (pip install .) and run it "
        "from outside its source folder"
    ) from missing

__all__ = [
    "BoundPlan",
    "Device",
    "GpuError",
    "capabilities",
    "check_runs",
    "device_count",
    "served_version",
    "shares_one_queue",
]

GpuError = _native.GpuError
_SETTLES_WITHIN_S = 5.0

device_count = _native.cuda_device_count


def served_version() -> str:
    """Return the CUDA version that the driver supports, as "13.0".

    Raises:
        GpuError: there is no driver, or it is too old.
    """
    version = _native.cuda_driver_version()
    return f"{version // 1000}.{version % 1000 // 10}"


def shares_one_queue() -> bool:
    """Return whether all streams of the process share one hardware queue."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class Capabilities(NamedTuple):
    """What a device can do; see `capabilities`.

    Attributes:
        name, major, minor: the device, and its compute capability.
        pci: PCI domain, bus and device; the same in processes that number devices differently.
        copy_engines: number of asynchronous copy engines.
        flush_remote_writes: whether a stream wait can order writes by other devices.
        batch_copy_12_8, batch_copy_13_0: whether the driver has cuMemcpyBatchAsync with the
            signature of CUDA 12.8 or 13.0.
        peers: per device, whether this device can access its memory.
    """

    name: str
    major: int
    minor: int
    pci: tuple[int, int, int]
    copy_engines: int
    flush_remote_writes: bool
    batch_copy_12_8: bool
    batch_copy_13_0: bool
    peers: Sequence[bool]


def capabilities(device: int) -> Capabilities:
    """Return what a device can do.

    Raises:
        GpuError: there is no driver, it is too old, or it has no such device.
    """
    return Capabilities(*_native.cuda_capabilities(device))


class Device:
    """One rank's GPU: its streams and their watchdog.

    Args:
        ordinal: the driver's number of the device.
        group: tracks which ranks have failed or are present; its own windows are not used.
        rank: the rank of the device.

    Raises:
        GpuError: a driver call fails.
    """

    def __init__(self, ordinal: int, group: _native.Group, rank: int) -> None:
        self.ordinal, self.group, self.rank = ordinal, group, rank
        gpu = _native.open_cuda(ordinal)
        if gpu.no_store:
            warn_of_streams(ordinal, gpu.no_store)
        self.native = _native.GpuRank(gpu, group, rank)
        self._stop: Any = None

    def stop_word(self, compute: DeviceCompute) -> int:
        """Return the address of a word that becomes 1 when the group fails; kernels poll it."""
        if self._stop is None:
            self._stop = compute.empty(1, 1, "int32")
            compute.reduce([], self._stop)  # 0
            address, _ = compute.place(self._stop)
            self.native.set_stop_word(address)
            weakref.finalize(self, self.native.set_stop_word, 0)
        address, _ = compute.place(self._stop)
        return address

    def forget(self, window: Window) -> None:
        """Stop the watchdog's use of a window that has no enqueued calls left.

        Call this before the window's memory is freed: the watchdog writes there when the group
        fails.

        Raises:
            GpuError: a read of the window does not end in time; the memory must not be freed.
        """
        self.native.forget(window.native)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Suspend the peers' timeout while this rank prepares a call, which may compile kernels."""
        self.group.set_preparing(self.rank, True)
        try:
            yield
        finally:
            self.group.set_preparing(self.rank, False)

    def follow(self, stream: int) -> None:
        """Make a stream of the device wait for the end of this rank's last call."""
        self.native.follow(stream)

    def settle(self) -> None:
        """Wait until the group knows the failure that an ended kernel has reported."""
        if not self.native.missed:
            return
        limit = time.monotonic() + _SETTLES_WITHIN_S
        while self.native.missed and self.group.failure() is None and time.monotonic() < limit:
            time.sleep(1e-3)


def check_runs(schedule: Schedule, compute: DeviceCompute) -> None:
    """Check that a schedule can run with a library's arrays on every rank.

    Only the schedule is read, so that all ranks refuse it alike, whatever their own plans need.

    Raises:
        ScheduleError: the schedule cannot run; the message names one that can.
    """
    if schedule.sums == "within" and shares_one_queue():
        raise ScheduleError(
            "sums='within': a launch waits for results of peers' kernels, and with "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 their copies would queue after it in the one hardware "
            "queue; unset it, or use sums='apart'"
        )
    if compute.kernels is not None:
        return
    for axis, value, needs, nearest in (
        ("transport", "sm", "a kernel that stores at peers", "dma"),
        ("compute", "gated", "a kernel that waits for chunks", "per_chunk"),
    ):
        if getattr(schedule, axis) == value:
            raise ScheduleError(
                f"{axis}={value!r} needs {needs}, but arrays of {compute.name} have none; "
                f"the nearest that works is {axis}={nearest!r}"
            )


class BoundPlan:
    """A rank's plan, bound to a window and ready to run with any matrices of its shapes.

    Attributes:
        rows: the meaning of each row of the trace.
    """

    def __init__(
        self, plan: RankPlan, device: Device, window: Window, compute: DeviceCompute, digest: int
    ) -> None:
        self.plan, self._compute, self._device = plan, compute, device
        self.rows = trace_rows(plan)
        self._window = window  # keeps the memory alive
        self._item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in plan.buffers}
        self._places = {} if has_mailbox(plan) else window_places(plan.buffers)[0]
        stores = is_one_launch(plan)
        lanes = _lanes(plan.steps)
        within = set() if stores or compute.kernels is None else steps_within(plan)
        encoded = (
            encode_whole(plan) if stores else encode(plan, lanes, one_launch=True, within=within)
        )
        self._count = len(encoded.slots)
        table, kept = table_of(plan) if stores else (None, "")
        self._before = made_before(plan, table)
        self._made_before = table.outputs if self._before and table is not None else ()
        self._works = [
            (work, self._before if stores else [] if work.step.parts else calls_of(plan, work))
            for work in encoded.works
        ]
        self._native = _native.GpuProgram(
            device.native,
            window.native,
            encoded.ops,
            encoded.windows,
            (encoded.segments, len(self.rows), len(encoded.slots)),
            digest,
        )
        self._handles = [self._window_handles(copy) for copy in range(COPIES)]
        words = [
            compute.at(window.words[copy][window.rank], 1, SIGNALS_PER_COPY, "int32")
            for copy in range(COPIES)
        ]
        self._launches = None
        if compute.kernels is not None:
            timeout_s, whole = device.group.timeout_s, None

            def stop_word() -> int:
                return device.stop_word(compute)

            if table is not None:
                places = window.mail if has_mailbox(plan) else window.windows
                prepared = compute.kernels.prepare_one_kernel(
                    table, places, digest, timeout_s, device.native.missed_word, stop_word
                )
                whole = Whole(prepared, table.outputs, kept)
            self._launches = Launches(
                plan, encoded.works, encoded.slots, compute.kernels, self._native, words,
                window.words, whole, timeout_s, stop_word,
            )  # fmt: skip
            window.recent.append(self._launches)
        # Slots of buffers that are passed to a call or allocated for it.
        own = [(name, slot) for (rank, name), slot in encoded.slots.items() if rank == plan.rank]
        # A single launch stores its results for peers directly and needs no workspace.
        self._workspaces = [b for b in plan.buffers if b.role == "workspace" and not stores]
        unused = {b.name for b in plan.buffers if b.role == "workspace" and stores}
        elsewhere = {*self._places, *unused}
        self._numbers = {name: slot for name, slot in own if name not in elsewhere}
        placed = set() if self._launches is None else self._launches.placed
        self._slots = [(slot, name) for name, slot in self._numbers.items() if slot not in placed]
        self._held = False  # whether the window holds the launches
        self._views: list[dict[Region, Any]] = [{}, {}]  # of windows, by copy of the call
        self._weights = [b.name for b in plan.buffers if b.role == "weight"]
        self._dtype = next(b.dtype for b in plan.buffers if b.role == "output")

    def _window_handles(self, copy: int) -> dict[tuple[str, int], Any]:
        """Return handles of the own window buffers for a call on `copy`, by name and shift."""
        handles = {}
        for name, place in self._places.items():
            buffer = self.plan.buffer(name)
            for shift in range(buffer.copies):
                address = self._window.own(copy ^ shift) + place
                handles[name, shift] = self._compute.at(
                    address, buffer.rows, buffer.cols, buffer.dtype
                )
        return handles

    @property
    def captured(self) -> bool:
        """Whether a graph has captured a call of the plan, so that its window must stay."""
        return self._native.captured

    def run(self, arrays: Mapping[str, Any], copy: int, traced: bool = False) -> None:
        """Enqueue one call on the library's current stream, on the current device.

        Args:
            arrays: inputs, weights and outputs by buffer name, of the plan's shapes and dtypes;
                inputs that copies read have unit stride along rows.
            copy: the window copy of this call.
            traced: whether to record times, for `spans`.

        Raises:
            RuntimeError: the group has failed; no wait and no send was enqueued.
            GpuError: a driver call failed; the group has then failed, too.
        """
        compute, native, launches = self._compute, self._native, self._launches
        local, addresses, pitches = self._placed(arrays)
        by_python = traced and bool(self._before)  # so that the product before it is timed, too
        try:
            if launches is None or by_python or not launches.suit(addresses, pitches):
                self._run_by_steps(local, addresses, pitches, copy, traced, by_python)
            else:
                if self._before:
                    self._make_before(self._view(local, copy))
                native.call(copy, compute.stream(), traced, addresses, pitches)
        except BaseException:
            native.abandon()
            raise
        finally:
            if not self._held and launches is not None and native.captured:
                self._window.held.append(launches)
                self._held = True

    def prepared_call(self, arrays: Mapping[str, Any]) -> PreparedCall | None:
        """Return a prepared call for matrices laid out as `arrays`, which `run` has used.

        Its `run` takes addresses in the order of `arrays`. Returns None if native code does not
        launch the whole call. Enqueues and allocates nothing.
        """
        launches = self._launches
        if launches is None or len(launches.native) < len(self._works):
            return None
        if not all(self._compute.reads(arrays[name]) for name in self._weights):
            return None  # the library reads a copy of the weight
        state, parts = launches.state, (self._native, launches, self._compute)
        before = self._make_before_again if self._before else None
        prepared = PreparedCall(
            *parts, arrays, self._numbers, self._count, self._workspaces, self._window, before
        )
        # None: another thread has run with matrices of another layout meanwhile.
        return prepared if launches.state is state else None

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Load the kernels of calls with such arrays, as no capture may; enqueue nothing."""
        local, addresses, pitches = self._placed(arrays)
        if self._launches is not None:
            with self._device.preparing():
                self._launches.ready(self._view(local, 0), 0, addresses, pitches)

    def rehearse(self, arrays: Mapping[str, Any]) -> None:
        """Load all kernels of calls with such arrays: run the library's calls into scratch memory.

        A library may load a kernel at the kernel's first launch. Outputs hold arbitrary values
        afterwards.
        """
        self.load(arrays)
        compute, launches = self._compute, self._launches
        local, _, _ = self._placed(arrays)
        for name in self._places:
            buffer = self.plan.buffer(name)
            local[name] = compute.empty(buffer.rows, buffer.cols, buffer.dtype)
        view = self._view(local, 0)
        native = frozenset[int]() if launches is None else launches.native
        with compute.exact(self._dtype):
            for number, (_, calls) in enumerate(self._works):
                for call in calls if self._before or number not in native else ():
                    call(compute, view)

    def _placed(self, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[int], list[int]]:
        """Return a call's matrices by name, and their addresses and pitches by slot."""
        compute = self._compute
        local = dict(arrays)
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

    def _run_by_steps(
        self,
        local: dict[str, Any],
        addresses: list[int],
        pitches: list[int],
        copy: int,
        traced: bool,
        by_python: bool,
    ) -> None:
        """Enqueue a call that native code does not launch as a whole, or not yet."""
        compute, native, launches = self._compute, self._native, self._launches
        view, by_kernels = self._view(local, copy), frozenset[int]()
        armed: dict[int, list[Callable[[], None]]] = {}
        if launches is not None:
            with self._device.preparing():
                armed = launches.ready(view, copy, addresses, pitches, by_python)
            by_kernels = by_kernels if by_python else launches.native
        if len(by_kernels) == len(self._works):
            self._make_before(view)
            native.call(copy, compute.stream(), traced, addresses, pitches)
            return
        native.start(copy, compute.stream(), traced, addresses, pitches)
        with compute.exact(self._dtype):
            self._submit(view, by_kernels, armed, traced)
        native.finish()

    def _make_before_again(self, matrices: Mapping[str, Any]) -> None:
        gemm, x = self._compute.gemm, matrices["x"]
        with self._compute.exact(self._dtype):
            for names in self._made_before:
                w = matrices[names.w]
                gemm(x, w.T if names.turned else w, matrices[names.y], False, [])

    def _make_before(self, view: View) -> None:
        with self._compute.exact(self._dtype):
            for call in self._before:
                call(self._compute, view)

    def _view(self, local: dict[str, Any], copy: int) -> View:
        """Return a function that maps a region to its handle in this call."""
        windows, views, part = self._handles[copy], self._views[copy], self._compute.part

        def view(region: Region) -> Any:
            handle = local.get(region.buffer)
            if handle is not None:
                return part(handle, *region[2:6])
            cached = views.get(region)
            if cached is None:
                cached = views[region] = part(windows[region.buffer, region.copy], *region[2:6])
            return cached

        return view

    def _submit(
        self,
        view: View,
        by_kernels: frozenset[int],
        armed: dict[int, list[Callable[[], None]]],
        traced: bool,
    ) -> None:
        compute, native = self._compute, self._native
        for segment, (work, calls) in enumerate(self._works):
            native.submit(segment)
            if segment in by_kernels:
                native.launch(segment)
                continue
            if traced:
                native.stamp(work.row, False)
            for call in calls:
                call(compute, view)
            for launch in armed.get(segment, ()):
                launch()
            if traced:
                native.stamp(work.row, True)
            if work.mark >= 0:
                native.mark(work.mark)
        native.submit(len(self._works))

    def fill_nan(self, arrays: Mapping[str, Any]) -> None:
        """Fill the outputs with NaN, for a call that was not enqueued."""
        for buffer in self.plan.buffers:
            if buffer.role == "output" and buffer.name in arrays:
                self._compute.fill_nan(arrays[buffer.name])

    def spans(self) -> list[Span]:
        """Return the spans of the last traced call once it has ended, in monotonic clock time.

        The device's clock is aligned with the host's after the call, to about 10 us.
        """
        times: npt.NDArray[np.int64] = self._native.times()
        spans = []
        for row, (begin, end) in zip(self.rows, times.tolist(), strict=True):
            if not end:
                continue
            step = row.step
            moved = sum(
                region.area * self._item[region.buffer]
                for region in step.writes
                if row.kind == "copy"
            )
            spans.append(
                Span(self.plan.rank, step.lane, row.name, row.kind, step.unit,
                     begin / 1e3, end / 1e3, moved)
            )  # fmt: skip
        return spans


def _lanes(steps: Sequence[Step]) -> dict[str, int]:
    """Number the lanes that get a stream; the lane with compute uses the caller's stream."""
    computing: dict[str, str] = {}
    for step in steps:
        if step.kind == "collective":
            raise EngineError(f"step {step.id!r}: the CUDA engine has no collective steps")
        if step.kind in COMPUTE:
            computing.setdefault(step.lane, step.id)
    if len(computing) > 1:
        raise EngineError(
            f"compute in the lanes {sorted(computing)}; the CUDA engine computes on the caller's "
            "stream, so put it into one lane"
        )
    lanes: dict[str, int] = {}
    for step in steps:
        if step.lane not in computing:
            lanes.setdefault(step.lane, len(lanes))
    return lanes
