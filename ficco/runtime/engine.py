"""What ranks run on, the host or GPUs: their windows, bound programs and devices.

A runtime has one engine, which is all that differs between the host and GPUs. All that differs
between vendors is `Gpus.vendor`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from ficco.core.call_lock import CallLock
from ficco.core.errors import EngineError
from ficco.core.machine import Machine
from ficco.engine import gpu, host
from ficco.engine.compute import DeviceCompute
from ficco.engine.devices import Device
from ficco.engine.gpus import Exchange, Gpus
from ficco.engine.groups import Group
from ficco.engine.peer_windows import PeerWindows
from ficco.engine.window_layout import LEAST, Layout
from ficco.operators.problem import Problem
from ficco.plan import RankPlan, WindowBytes, window_bytes_of
from ficco.plan.schedule import Schedule
from ficco.program.passes import compile_plan
from ficco.program.target import HOST

_blas_lock = CallLock()
_uses: set[object] = set()  # that have not ended
_limit: Any = None
_controller: Any = None


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit BLAS libraries to one thread; nested and concurrent uses are counted."""
    global _limit, _controller  # noqa: PLW0603 - the libraries' setting is global too
    from threadpoolctl import ThreadpoolController

    use = object()
    with _blas_lock():
        if _controller is None:
            _controller = ThreadpoolController()
        if not _uses:
            _limit = _controller.limit(limits=1, user_api="blas")
        _uses.add(use)
    try:
        yield
    finally:
        with _blas_lock():
            if use in _uses:  # not so in a child that was forked meanwhile
                _uses.remove(use)
                if not _uses:
                    _limit.restore_original_limits()


def _restore() -> None:
    """Restore the user's setting in a forked child: the parent's threads do not end their uses."""
    if _uses:
        _uses.clear()
        _limit.restore_original_limits()


os.register_at_fork(after_in_child=_restore)


class Place:
    """What calls use until the windows grow or are reset.

    Attributes:
        group: where the ranks tell their state.
        sizes: bytes of each copy of each window.
        devices: of this process's ranks; none on the host.
    """

    devices: Sequence[Device] = ()

    def __init__(self, group: Group, sizes: WindowBytes) -> None:
        self.group, self.sizes = group, sizes

    def free(self) -> None:
        """Free the windows; no work may use them any more. The host's are freed with the group."""

    def leave(self) -> None:
        """Never free the windows, because a device still uses them."""


class Engine:
    """The host's memory and native threads; `GpuEngine` is a vendor's GPUs.

    Args:
        machine: a profile of the engine.
        compute: the library for GEMMs.
        in_order: run each rank's steps one after another, as on one shared hardware queue.

    Attributes:
        compute: as above.
        in_group: whether windows are in the group's own memory.
        no_overlap: why copies do not overlap with kernels; "" if they do.
    """

    in_group, no_overlap = True, ""

    def __init__(self, machine: Machine, compute: Any, in_order: bool = False) -> None:
        self._machine, self.compute = machine, compute
        self._target = HOST._replace(in_order=in_order)

    def check_runs(self, problem: Problem, schedule: Schedule) -> None:
        """Check that a schedule can run on every rank; raise ScheduleError otherwise."""

    def need(self, plan: RankPlan, have: WindowBytes, most: int | None) -> WindowBytes:
        """Return the sizes of windows that a plan needs, equal on all ranks.

        On the host, windows hold mailboxes.

        Args:
            plan: of a rank.
            have: the current sizes.
            most: the limit for the windows of a rank; None: there is none.
        """
        return WindowBytes(sum(window_bytes_of(plan)))

    def allocate(self, sizes: WindowBytes) -> Any:
        """Allocate windows outside of the group's memory, before the ranks share them."""

    def free(self, memory: Any) -> None:
        """Free what `allocate` returned if no place is made with it."""

    def place(self, group: Group, memory: Any, sizes: WindowBytes, exchange: Exchange) -> Place:
        """Make a place with memory that `allocate` returned. A collective call."""
        return Place(group, WindowBytes(group.capacity))

    def bind(self, place: Any, index: int, plan: RankPlan, digest: int) -> Any:
        """Bind the plan of one of this process's ranks, by its index, to the windows of a place."""
        program = compile_plan(plan, self._target)
        return host.BoundProgram(program, place.group, self._machine, self.compute, digest)

    def running(self) -> AbstractContextManager[None]:
        """Return the context of a call."""
        return single_threaded()


class GpuPlace(Place):
    """See `Place`.

    Attributes:
        windows: of all ranks.
        views: the view of each of this process's ranks.
        window: the first view.
    """

    def __init__(self, group: Group, windows: PeerWindows, gpus: Gpus) -> None:
        super().__init__(group, windows.sizes)
        self.windows = windows
        self.devices = [gpus.device(group, rank) for rank in gpus.ranks]
        self.views = [windows.view(rank) for rank in gpus.ranks]
        self.window = self.views[0]

    def free(self) -> None:
        """See `Place.free`."""
        try:
            for device, view in zip(self.devices, self.views, strict=True):
                device.forget(view)
        except BaseException:
            self.leave()
            raise
        self.windows.close()

    def leave(self) -> None:
        """See `Place.leave`."""
        self.windows.leave()


class GpuEngine(Engine):
    """GPUs of one vendor; see `Engine`.

    Args:
        machine: a profile of the engine.
        compute: the library for GEMMs.
        gpus: the devices.

    Attributes:
        gpus: as above.
        signals: the kind of signals at peers; None before the first windows.
    """

    in_group = False

    def __init__(self, machine: Machine, compute: DeviceCompute, gpus: Gpus) -> None:
        super().__init__(machine, compute)
        self.gpus = gpus
        self.signals: str | None = None

    def check_runs(self, problem: Problem, schedule: Schedule) -> None:
        """See `Engine.check_runs`."""
        if self.gpus.world > 1:
            self.gpus.vendor.check_runs(problem, schedule, self.compute, self.no_overlap)

    def need(self, plan: RankPlan, have: WindowBytes, most: int | None) -> WindowBytes:
        """See `Engine.need`."""
        need = window_bytes_of(plan)
        roomy = have.joined(need).joined(LEAST)
        if self.gpus.world == 1 or (most is not None and 2 * sum(roomy) > most):
            return need
        return need.joined(LEAST)

    def allocate(self, sizes: WindowBytes) -> list[Any]:
        """See `Engine.allocate`."""
        return self.gpus.allocate(Layout(sizes).size)

    def free(self, memory: list[Any]) -> None:
        """See `Engine.free`."""
        with contextlib.suppress(EngineError):  # the first error says more
            self.gpus.free(memory)

    def place(self, group: Group, memory: Any, sizes: WindowBytes, exchange: Exchange) -> GpuPlace:
        """See `Engine.place`. For the first windows a probe decides on the kind of signals."""
        windows = PeerWindows(self.gpus, sizes, memory, exchange, self.signals)
        try:
            if self.signals is None:
                self.signals = windows.signals
                self.no_overlap = self.gpus.trusted(self.signals)
            return GpuPlace(group, windows, self.gpus)
        except BaseException:
            with contextlib.suppress(EngineError):  # the first error says more
                windows.close()
            raise

    def bind(self, place: GpuPlace, index: int, plan: RankPlan, digest: int) -> gpu.BoundProgram:
        """See `Engine.bind`."""
        device, view = place.devices[index], place.views[index]
        program = compile_plan(plan, self.gpus.vendor.target_of(device, view, self.compute))
        return gpu.BoundProgram(program, device, view, self.compute, digest)

    def running(self) -> AbstractContextManager[None]:
        """See `Engine.running`."""
        return contextlib.nullcontext()


class NodeCompute(DeviceCompute, Protocol):
    """A library that enqueues on all devices of a process, for a node.

    `empty` never reuses memory that it returned to a call captured into a graph.

    Attributes:
        captures: whether its calls can be captured into graphs.
    """

    captures: bool

    def current(self, device: int) -> Any:
        """Return this thread's current stream on a device, as an object of the library.

        Raises:
            InputError: other threads cannot use the stream.
        """

    def on(self, device: int, stream: Any) -> AbstractContextManager[None]:
        """Make a device and its stream current on this thread inside the context."""

    def layout(self, handle: Any) -> Hashable:
        """Return what the library's choice of kernels for a matrix depends on."""
