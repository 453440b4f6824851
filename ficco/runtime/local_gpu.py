"""Run all ranks in one process on GPUs, without torch; windows use peer access.

A call enqueues every rank's part on its device's current stream and returns. Each rank has its
own thread, because submission may block: if a driver queue is full, or launches are blocking, one
rank's part proceeds only when the others' parts are submitted too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ficco.call_lock import CallLock
from ficco.engines import devices, gpu
from ficco.engines.peer_windows import Group, PeerWindows, new_group
from ficco.engines.peers import Peers
from ficco.engines.probe_record import trusted
from ficco.engines.vendors import vendor_of
from ficco.engines.window_layout import LEAST, Window
from ficco.errors import EngineError, InputError, ScheduleError
from ficco.logs import log
from ficco.lowering import lower
from ficco.machine import Machine
from ficco.passes import compile_plan
from ficco.plan import Plan, WindowBytes, window_bytes_of
from ficco.problem import Problem
from ficco.runtime.bound import BOUND_PROGRAMS, BoundPrograms, check_machine, timeline_of
from ficco.runtime.failures import error_of
from ficco.runtime.node_compute import NodeCompute
from ficco.runtime.rank_threads import RankJob, RankThreads
from ficco.schedule import Schedule
from ficco.timeline import Timeline

__all__ = ["GpuLocalRuntime"]

_IDLE_WITHIN_S = 10.0  # for a device, after the group has failed and its waits are released
_POLL_S = 0.05

Arrays = Mapping[str, Any]


class _Bound(NamedTuple):
    """A problem's plan, bound to every rank's device.

    Attributes:
        ranks: the bound program of each rank.
        loaded: layouts of all ranks' arrays with which `rehearse` has loaded all kernels.
    """

    ranks: list[gpu.BoundProgram]
    loaded: set[tuple[Hashable, ...]]


class _Place(NamedTuple):
    """The windows and devices that calls use until the windows grow or are reset."""

    group: Group
    devices: list[devices.Device]
    windows: PeerWindows
    views: list[Window]


def _vendor_of(engine: str) -> tuple[Any, type[Peers]]:
    """Return the module of a vendor's devices, and the class of the devices of one process."""
    if engine == "cuda":
        from ficco.engines.cuda_peers import CudaPeers

        return vendor_of(engine), CudaPeers
    from ficco.engines.hip_peers import HipPeers

    return vendor_of(engine), HipPeers


def _free(place: _Place) -> None:
    """Free a place's windows; no work may use them any more."""
    for device, view in zip(place.devices, place.views, strict=True):
        device.forget(view)
    place.windows.close()


class GpuLocalRuntime:
    """The ranks of one process, rank r on device r.

    Calls from several threads run one at a time. The arrays of rank r are on device r, ready on
    its current stream; the results are ready on the same stream.

    Args:
        world: number of ranks.
        machine: a profile whose engine is "cuda" or "hip".
        compute: the library for GEMMs.
        timeout_s: the longest time that any wait on a device may last, in seconds.

    Attributes:
        traced: whether calls record times for `timeline`, which has a small cost.
        no_overlap: why copies do not overlap with kernels on these devices; "" if they do.

    Raises:
        InputError: the machine is for another engine, or has too few devices.
        EngineError: the devices are not available, or do not reach each other.
        GpuError: there is no driver, it is too old, or it reports an error.
    """

    def __init__(
        self, world: int, machine: Machine, compute: NodeCompute, timeout_s: float
    ) -> None:
        engine = "hip" if machine.engine == "hip" else "cuda"
        check_machine(world, machine, engine)
        self._vendor, peers = _vendor_of(engine)
        self._vendor.served_version()  # raises if the driver lacks a function
        self.world, self.machine = world, machine
        self.traced = False
        self._compute = compute
        self._peers = peers(range(world))
        self._lock = CallLock()
        self._bound: BoundPrograms[_Bound] = BoundPrograms()
        self._recent: deque[_Bound] = deque(maxlen=BOUND_PROGRAMS)
        self._last_plan: tuple[Plan, _Bound] | None = None  # of `execute_plan`
        self._calls = 0
        self._closed = False
        self._captured = False  # whether a graph uses the current place
        self._kept_for_graphs: list[_Place] = []  # earlier places that graphs use
        self._signals: str | None = None  # the kind, after a probe has found it
        try:
            self._place = self._new_place(new_group(world, timeout_s), [], WindowBytes())
        except BaseException:
            self._peers.close()
            raise
        self.no_overlap = self._trusted()
        self._threads = RankThreads(world)

    def _trusted(self) -> str:
        """Probe AMD's devices before their first use; see `probe_record.trusted`."""
        if self.machine.engine != "hip" or self.world == 1:
            return ""
        try:
            reason = trusted(self._peers, self.signals)
        except BaseException:
            _free(self._place)
            self._peers.close()
            raise
        if reason:
            log.warning("schedule='auto' is serial on this node: %s", reason)
        return reason

    @property
    def timeout_s(self) -> float:
        """The longest time that any wait on a device may last, in seconds."""
        return self._place.group.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        with self._lock():
            for place in [*self._kept_for_graphs, self._place]:
                place.group.timeout_s = value
            self._bound.clear()  # launches of their kernels hold the timeout
            self._last_plan = None

    @property
    def window_bytes(self) -> int:
        """Bytes of all ranks' windows and mailboxes, both copies, including those graphs use."""
        if self._closed:
            return 0
        places = [*self._kept_for_graphs, self._place]
        return sum(2 * self.world * sum(place.windows.sizes) for place in places)

    @property
    def signals(self) -> str:
        """The kind of signals at peers; see `ficco.engines.peer_signals`."""
        return self._place.windows.signals

    def execute(
        self,
        problem: Problem,
        schedule: Schedule,
        arrays: Sequence[Arrays],
        plan: Plan | None = None,
    ) -> None:
        """Enqueue a problem. The arguments are those of `LocalRuntime.execute`.

        Raises:
            InputError: the problem is for another number of ranks, or windows would have to grow
                during a graph capture.
            ScheduleError: no plan implements the schedule.
            EngineError: the runtime is closed, an earlier call failed, or a device reports an
                error; in the last case outputs are NaN, and the runtime needs `reset`.
        """
        if problem.world != self.world:
            raise InputError(
                f"the problem is for {problem.world} ranks, the runtime has {self.world}"
            )
        if schedule.transport == "collective":
            raise ScheduleError(
                f"schedule {schedule.name!r}: transport='collective' needs torch.distributed, "
                "which the ranks of one process do not have; use transport='dma', the nearest that "
                "works"
            )
        with self._lock():
            self.check()
            streams = [self._compute.current(rank) for rank in range(self.world)]
            bound = self._bound.get(
                problem, schedule, lambda: self._bind(plan or lower(problem, schedule), streams)
            )
            self._rehearse(bound, streams, arrays)
            self._run(bound, streams, arrays)

    def execute_plan(self, plan: Plan, arrays: Sequence[Arrays]) -> None:
        """Enqueue a plan that was made elsewhere, unchanged. Verify it first: the engine does not.

        The last plan stays bound, until windows grow or are reset. Raises as `execute`.
        """
        with self._lock():
            self.check()
            streams = [self._compute.current(rank) for rank in range(self.world)]
            if self._last_plan is None or self._last_plan[0] is not plan:
                self._last_plan = (plan, self._bind(plan, streams))
            bound = self._last_plan[1]
            self._rehearse(bound, streams, arrays)
            self._run(bound, streams, arrays)

    # ---- calls

    def _bind(self, plan: Plan, streams: Sequence[Any]) -> _Bound:
        if self.world > 1:
            self._vendor.check_runs(plan.problem, plan.schedule, self._compute, self.no_overlap)
        need = window_bytes_of(plan.ranks[0]).joined(LEAST if self.world > 1 else WindowBytes())
        if not self._place.windows.sizes.has(need):
            self._grow(need, streams)
        place = self._place

        def bind(rank: int) -> gpu.BoundProgram:
            with self._compute.on(rank, streams[rank]):
                device, view = place.devices[rank], place.views[rank]
                target = self._vendor.target_of(device, view, self._compute)
                program = compile_plan(plan.ranks[rank], target)
                return gpu.BoundProgram(program, device, view, self._compute, plan.digest)

        return _Bound(self._results(bind, "cannot bind its program"), set())

    def _rehearse(self, bound: _Bound, streams: Sequence[Any], arrays: Sequence[Arrays]) -> None:
        """Load every rank's kernels before any rank waits, for the first call with a layout.

        The driver may wait for a rank's streams while it loads a kernel, and the threads of one
        process share the driver's locks. So a rank that loads a kernel behind a wait would stop
        the peer that has to raise the signal.
        """
        if self.world == 1:
            return
        layout = self._compute.layout
        layouts = tuple([layout(array) for mine in arrays for array in mine.values()])
        if layouts in bound.loaded or any(self._each_capturing(streams)):
            return

        def rehearse(rank: int) -> None:
            with self._compute.on(rank, streams[rank]):
                bound.ranks[rank].rehearse(arrays[rank])

        self._results(rehearse, "cannot load its kernels")
        bound.loaded.add(layouts)

    def _run(self, bound: _Bound, streams: Sequence[Any], arrays: Sequence[Arrays]) -> None:
        copy, group = self._calls % 2, self._place.group
        self._calls += 1
        if bound in self._recent:
            self._recent.remove(bound)
        self._recent.append(bound)

        def run(rank: int) -> None:
            try:
                with self._compute.on(rank, streams[rank]):
                    bound.ranks[rank].run(arrays[rank], copy, self.traced)
            except BaseException:
                group.fail(rank)  # only the first failure is recorded
                raise

        if not self._compute.captures and any(self._each_capturing(streams)):
            raise InputError(
                f"{self._compute.name} cannot be captured into a CUDA graph; use the torch "
                "functions, a process per GPU, for graphs"
            )
        errors = self._each(run).errors
        self._captured = self._captured or any(entry.captured for entry in bound.ranks)
        if all(error is None for error in errors):
            return

        def fill_nan(rank: int) -> None:
            with self._compute.on(rank, streams[rank]):
                bound.ranks[rank].fill_nan(arrays[rank])

        self._each(fill_nan)  # errors here are ignored: the first error says more
        failure = group.failure()
        failed_rank = failure[0] if failure is not None else 0
        error = errors[failed_rank] or next(error for error in errors if error is not None)
        raise EngineError(f"rank {failed_rank} failed: {error!r}; call reset() to go on") from error

    def _each(self, job: Callable[[int], Any]) -> RankJob:
        """Run a job for every rank on its thread, and wait for all."""
        ranks = RankJob(self.world)
        try:
            self._threads.start(job, ranks)
            ranks.wait()
        except BaseException:  # an interrupt: the call ends now
            self._place.group.fail(0)
            ranks.wait()
            raise
        return ranks

    def _results(self, job: Callable[[int], Any], failing: str) -> list[Any]:
        """Run a job for every rank; raise the first rank's error as "rank r " and `failing`."""
        ranks = self._each(job)
        for rank, error in enumerate(ranks.errors):
            if isinstance(error, (InputError, ScheduleError)):
                raise error
            if error is not None:
                raise EngineError(f"rank {rank} {failing}: {error}") from error
        return ranks.values

    def timeline(self) -> Timeline:
        """Return the timeline of the last call, if it was traced; waits until the call ends."""
        with self._lock():
            last = self._recent[-1].ranks if self._recent else []
            return timeline_of([span for entry in last for span in entry.spans()], self.machine)

    def synchronize(self) -> None:
        """Wait until the devices have finished all enqueued work.

        Raises:
            TimeoutExceeded: a wait lasted longer than `timeout_s`; data from late ranks is NaN,
                and the runtime needs `reset`.
            EngineError: the runtime is closed, or has failed in another way.
        """
        with self._lock():
            self._check_open()
            self._wait_idle()
            for device in self._place.devices:
                device.settle()
            error = self._failure()
            if error is not None:
                raise error

    def reset(self) -> None:
        """Make the runtime usable again after a failure, with new windows and signals.

        Graphs captured before are invalid from now on; capture them again.

        Raises:
            EngineError: a device does not become idle, or has failed permanently.
        """
        with self._lock():
            self._check_open()
            self._wait_idle()
            old = self._place
            self._move_to(
                self._new_place(new_group(self.world, self.timeout_s), [], old.windows.sizes)
            )

    def close(self) -> None:
        """Wait for the devices, free the windows, end all threads. Later calls raise an error."""
        with self._lock():
            if self._closed:
                return
            self._closed = True
            try:
                self._wait_idle()
                self._drop_bound_programs()
                while self._kept_for_graphs:
                    _free(self._kept_for_graphs.pop())
                _free(self._place)
                self._peers.close()
            finally:
                self._threads.end(wait=False)

    # ---- windows

    def _new_place(self, group: Group, opened: list[devices.Device], sizes: WindowBytes) -> _Place:
        """Make windows, for existing devices or for new ones."""
        windows = PeerWindows(self._peers, sizes, self._signals)
        self._signals = windows.signals
        try:
            device_class = self._vendor.Device
            opened = opened or [device_class(rank, group, rank) for rank in range(self.world)]
        except BaseException:
            windows.close()
            raise
        return _Place(group, opened, windows, [windows.view(rank) for rank in range(self.world)])

    def _each_capturing(self, streams: Sequence[Any]) -> list[bool]:
        """Return for every rank whether its stream is being captured into a graph."""

        def capturing(rank: int) -> bool:
            with self._compute.on(rank, streams[rank]):
                return self._peers.capturing(rank, self._compute.stream())

        return self._results(capturing, "cannot use its stream")

    def _grow(self, need: WindowBytes, streams: Sequence[Any]) -> None:
        have = self._place.windows.sizes
        if any(self._each_capturing(streams)):
            raise InputError(
                f"windows of {sum(need)} bytes are needed, they have {sum(have)} bytes "
                "and cannot grow while a CUDA graph is captured; run the largest shape once before "
                "the capture"
            )
        self._wait_idle()
        error = self._failure()
        if error is not None:
            raise error
        self._move_to(self._new_place(self._place.group, self._place.devices, have.grown(need)))

    def _move_to(self, place: _Place) -> None:
        """Replace the current place, whose devices are idle, by a new one."""
        old, self._place = self._place, place
        self._drop_bound_programs()
        captured, self._captured = self._captured, False
        if captured:
            self._kept_for_graphs.append(old)
        else:
            _free(old)

    def _drop_bound_programs(self) -> None:
        self._bound.clear()
        self._last_plan = None
        self._recent.clear()
        self._calls = 0

    def _wait_idle(self) -> None:
        """Wait until all devices are idle.

        There is no time limit unless the group has failed, because user work may take long.
        """
        ranks = RankJob(self.world)
        self._threads.start(self._peers.synchronize, ranks)
        deadline = None
        while not ranks.wait(_POLL_S):
            if deadline is None and self._place.group.failure() is not None:
                deadline = time.monotonic() + _IDLE_WITHIN_S
            if deadline is not None and time.monotonic() > deadline:
                busy = [rank for rank, ended in enumerate(ranks.ended) if not ended]
                for place in [*self._kept_for_graphs, self._place]:
                    place.windows.leave()
                raise EngineError(
                    f"the devices of the ranks {busy} still work {_IDLE_WITHIN_S:g} s after the "
                    "failure; wait for other work on them, or start a new process"
                )
        for error in ranks.errors:
            if error is not None:
                raise error

    # ---- failure

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this node is closed; make a new one")

    def check(self) -> None:
        """Raise EngineError if the runtime is closed, or an earlier call has failed."""
        self._check_open()
        for device in self._place.devices:  # finds kernels that gave up before the watchdog does
            device.settle()
        error = self._failure()
        if error is not None:
            raise EngineError(
                "an earlier call on this node failed, so its windows are in an unknown state; "
                f"call reset() on it first. It was: {error}"
            ) from error

    def _failure(self) -> EngineError | None:
        """Return the group's first failure known so far."""
        failure = self._place.group.failure()
        return (
            None
            if failure is None
            else error_of(failure, self._step_name, "reset()", self.timeout_s)
        )

    def _step_name(self, rank: int, row: int) -> str:
        """Return the names of a row of a rank's program in all recent calls."""
        programs = [bound.ranks[rank].rows for bound in self._recent]
        return " or ".join(sorted({rows[row].name for rows in programs if row < len(rows)}))
