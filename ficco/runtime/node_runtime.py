"""The runtime of a node: all ranks are in this process, without torch, each on a thread.

On GPUs a call enqueues every rank's part on its device's current stream and returns. Each rank has
its own thread, because submission may block: if a driver queue is full, or launches are blocking,
one rank's part proceeds only when the others' parts are submitted too.

A runtime does not check the user's arguments; `node` does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import EngineError, InputError, ScheduleError
from ficco.core.logs import log
from ficco.core.machine import Machine
from ficco.engine import available_memory, vendor_of
from ficco.engine.gpus import Gpus
from ficco.lowering import lower
from ficco.operators.problem import Problem
from ficco.plan import Plan, RankPlan, WindowBytes
from ficco.plan.schedule import Schedule
from ficco.runtime.bound import BOUND_PROGRAMS, Call, check_machine
from ficco.runtime.engine import Engine, GpuEngine
from ficco.runtime.failures import Failure, error_of
from ficco.runtime.meeting import ThreadMeeting
from ficco.runtime.rank_threads import RankJob, RankThreads
from ficco.runtime.runtime import OPEN, Arrays, Runtime

_IDLE_WITHIN_S = 10.0  # for a device, after the group has failed and its waits are released
_POLL_S = 0.05


class NodeRuntime(Runtime):
    """The ranks of one process, on the host or on GPUs: there rank r is on device r.

    Calls from several threads run one at a time. The arrays of rank r are on device r, ready on
    its current stream; the results are ready on the same stream.

    Args:
        world: number of ranks.
        machine: a profile.
        compute: the library for GEMMs; on GPUs a `NodeCompute`.
        timeout_s: the longest time that any wait may last, in seconds.
        in_order: run each rank's steps one after another, as on one shared hardware queue; for the
            host.

    Raises:
        InputError: the machine has too few ranks.
        EngineError: the devices are not available, or do not reach each other.
        GpuError: there is no driver, it is too old, or it reports an error.
    """

    kind = "node"
    refuse_together = False
    closed = "this node is closed; make a new one"
    of_parent = (
        "this process was forked from the one that made the node and has none of its threads; "
        "make a new node in this process"
    )

    def __init__(
        self, world: int, machine: Machine, compute: Any, timeout_s: float, in_order: bool = False
    ) -> None:
        check_machine(world, machine, machine.engine)
        self._gpus: Gpus | None = None
        engine = Engine(machine, compute, in_order)
        if machine.engine != "host":
            vendor = vendor_of(machine.engine)
            vendor.served_version()  # raises if the driver lacks a function
            self._gpus = Gpus(vendor, range(world))
            engine = GpuEngine(machine, compute, self._gpus)
        self._recent: deque[Call] = deque(maxlen=BOUND_PROGRAMS)  # calls that may still run
        self._threads = RankThreads(world)
        super().__init__(ThreadMeeting(world), engine, machine, timeout_s)
        self._end.atexit = False  # calls of daemon threads end with the process
        try:
            self._meet(OPEN, WindowBytes())
        except BaseException:
            self.close()
            raise
        if self.no_overlap:
            log.warning("schedule='auto' is serial on this node: %s", self.no_overlap)

    @property
    def timeout_s(self) -> float:
        """The longest time that any wait may last, in seconds."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = value
        for place in list(self._places):  # it applies to current waits, too
            place.group.timeout_s = value
        if self._gpus is not None:  # launches of their kernels hold the timeout
            with self._lock():
                self._bound.clear()
                self._last_plan = None

    # ---- calls

    def _lowered(
        self, problem: Problem, schedule: Schedule, plan: Plan | None
    ) -> tuple[Sequence[RankPlan], int]:
        if self._gpus is not None and schedule.transport == "collective":
            raise ScheduleError(
                f"schedule {schedule.name!r}: transport='collective' needs torch.distributed, "
                "which the ranks of one process do not have; use transport='dma', the nearest that "
                "works"
            )
        plan = lower(problem, schedule) if plan is None else plan
        return plan.ranks, plan.digest

    def _check_memory(self, plans: Sequence[RankPlan], grown: int) -> None:
        if self._gpus is not None:
            return  # the driver does
        size = grown + sum(
            buffer.rows * buffer.cols * ELEMENT_BYTES[buffer.dtype]
            for entry in plans
            for buffer in entry.buffers
            if buffer.role == "workspace"
        )
        if size >= available_memory.LOOKED_AT:
            available_memory.check_host(size, f"windows and workspaces of {self.world} ranks")

    def _run(self, call: Call, arrays: Sequence[Arrays]) -> None:
        if self._gpus is not None:
            if not self._compute.captures and self._capturing():
                raise InputError(
                    f"{self._compute.name} cannot be captured into a CUDA graph; use the torch "
                    "functions, a process per GPU, for graphs"
                )
            self._rehearse(call, arrays)
        if call in self._recent:
            self._recent.remove(call)
        self._recent.append(call)
        super()._run(call, arrays)

    def _rehearse(self, call: Call, arrays: Sequence[Arrays]) -> None:
        """Load every rank's kernels before any rank waits, for the first call with a layout.

        The driver may wait for a rank's streams while it loads a kernel, and the threads of one
        process share the driver's locks. So a rank that loads a kernel behind a wait would stop
        the peer that has to raise the signal.
        """
        if self.world == 1:
            return
        layout = self._compute.layout
        layouts = tuple([layout(array) for mine in arrays for array in mine.values()])
        if layouts in call.loaded or self._capturing():
            return
        self._results(
            lambda rank: call.ranks[rank].rehearse(arrays[rank]), "cannot load its kernels"
        )
        call.loaded.add(layouts)

    def _each(self, job: Callable[[int], Any]) -> RankJob:
        """Run a job for every rank on its thread, on its device, and wait for all."""
        ranks, compute, on_gpus = RankJob(self.world), self._compute, self._gpus is not None
        streams = [compute.current(rank) for rank in self.ranks] if on_gpus else []

        def run(rank: int) -> Any:
            with compute.on(rank, streams[rank]) if on_gpus else nullcontext():
                return job(rank)

        try:
            self._threads.start(run, ranks)
            ranks.wait()
        except BaseException:  # an interrupt: the call ends now
            self._group.fail(0)
            ranks.wait()
            raise
        return ranks

    def _results(self, job: Callable[[int], Any], failing: str) -> list[Any]:
        if self._gpus is None:  # an interrupt need not fail the group
            return [job(rank) for rank in self.ranks]
        ranks = self._each(job)
        for rank, error in enumerate(ranks.errors):
            if isinstance(error, (InputError, ScheduleError)):
                raise error
            if error is not None:
                raise EngineError(f"rank {rank} {failing}: {error}") from error
        return ranks.values

    # ---- devices

    def _capturing(self) -> bool:
        if (gpus := self._gpus) is None:
            return False
        stream = self._compute.stream
        return any(
            self._results(lambda rank: gpus.capturing(rank, stream()), "cannot use its stream")
        )

    def synchronize(self) -> None:
        """Wait until the devices have finished all enqueued work; on the host it has ended.

        Raises:
            TimeoutExceeded: a wait lasted longer than `timeout_s`; data from late ranks is NaN,
                and the runtime needs `reset`.
            EngineError: the runtime is closed, or has failed in another way.
        """
        with self._lock():
            self._check_open()
            self._wait_idle()
            for device in self._places[-1].devices:
                device.settle()
            error = self._failure()
            if error is not None:
                raise error

    def _wait_idle(self) -> None:
        """Wait until all devices are idle.

        There is no time limit unless the group has failed, because user work may take long.
        """
        if self._gpus is None:
            return
        ranks = RankJob(self.world)
        self._threads.start(self._gpus.synchronize, ranks)
        deadline = None
        while not ranks.wait(_POLL_S):
            if deadline is None and any(group.failure() is not None for group in self._groups):
                deadline = time.monotonic() + _IDLE_WITHIN_S
            if deadline is not None and time.monotonic() > deadline:
                busy = [rank for rank, ended in enumerate(ranks.ended) if not ended]
                for place in self._places:
                    place.leave()
                raise EngineError(
                    f"the devices of the ranks {busy} still work {_IDLE_WITHIN_S:g} s after the "
                    "failure; wait for other work on them, or start a new process"
                )
        for error in ranks.errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """See `Runtime.close`."""
        if self._of_parent:
            return  # the threads belong to the parent process
        try:
            super().close()
            if self._gpus is not None:
                self._gpus.close()
        finally:
            self._threads.end(wait=self._gpus is None)

    # ---- failure

    def _failure_in_words(self, failure: Failure) -> EngineError:
        return error_of(failure, self._step_name, self.remedy, self.timeout_s)

    def _step_name(self, rank: int, row: int) -> str:
        """Return the names of a row of a rank's program in all recent calls."""
        programs = [call.ranks[rank].rows for call in self._recent]
        return " or ".join(sorted({rows[row].name for rows in programs if row < len(rows)}))

    def _forget_calls(self) -> None:
        super()._forget_calls()
        self._recent.clear()
