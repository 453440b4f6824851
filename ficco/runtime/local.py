"""Run all ranks in one process, without torch: one thread per rank, windows in process memory.

A runtime runs problems, caches their bound programs, and turns a failure into one error. It does
not check the user's arguments; `node` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from ficco.call_lock import CallLock
from ficco.compute import Compute
from ficco.dtypes import ELEMENT_BYTES
from ficco.engines import available_memory, host
from ficco.errors import EngineError
from ficco.lowering import lower
from ficco.machine import Machine
from ficco.passes import compile_plan
from ficco.plan import Plan, window_places
from ficco.problem import Problem
from ficco.runtime.blas_threads import single_threaded
from ficco.runtime.bound import BoundPrograms, check_machine, timeline_of
from ficco.runtime.failures import error_of
from ficco.runtime.rank_threads import RankJob, RankThreads
from ficco.schedule import Schedule
from ficco.target import HOST
from ficco.timeline import Timeline

__all__ = ["LocalRuntime"]

Arrays = Mapping[str, npt.NDArray[Any]]


class _Bound(NamedTuple):
    """A plan that is ready to run."""

    ranks: list[host.BoundProgram]
    digest: int


class LocalRuntime:
    """The ranks of one process.

    Args:
        world: number of ranks.
        machine: a profile whose engine is "host".
        compute: the library for GEMMs.
        timeout_s: the longest time that any wait may last, in seconds.
        in_order: run each rank's steps one after another, as on one shared hardware queue.
    """

    def __init__(
        self,
        world: int,
        machine: Machine,
        compute: Compute,
        timeout_s: float,
        in_order: bool = False,
    ) -> None:
        check_machine(world, machine)
        self.world, self.machine = world, machine
        self._compute, self._target = compute, HOST._replace(in_order=in_order)
        self._group = host.new_group(world, machine, timeout_s)
        self._threads = RankThreads(world)
        self._bound: BoundPrograms[_Bound] = BoundPrograms()
        self._last: list[host.BoundProgram] = []
        self._last_plan: tuple[Plan, list[host.BoundProgram]] | None = None  # of `execute_plan`
        self._lock = CallLock()
        self._calls = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def timeout_s(self) -> float:
        """The longest time that any wait may last, in seconds."""
        return self._group.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._group.timeout_s = value

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows of all ranks, both copies."""
        if self._closed:
            return 0
        return self.world * 2 * self._group.capacity

    def execute(
        self,
        problem: Problem,
        schedule: Schedule,
        arrays: Sequence[Arrays],
        plan: Plan | None = None,
    ) -> None:
        """Run a problem; `arrays` has, per rank, inputs, weights and outputs by buffer name.

        Args:
            problem: the problem.
            schedule: resolved.
            arrays: of all ranks.
            plan: the result of `lower` for the problem and the schedule; None: it is made.

        Raises:
            ScheduleError: no plan implements the schedule.
            TimeoutExceeded: a wait lasted longer than `timeout_s`; call `reset` afterwards.
            EngineError: the runtime is closed, or an earlier call failed.
        """
        self._check_process()

        def bind() -> _Bound:
            lowered = lower(problem, schedule) if plan is None else plan
            return _Bound(self._bind(lowered), lowered.digest)

        with self._lock():
            bound = self._bound.get(problem, schedule, bind)
            self._run(bound.ranks, bound.digest, arrays)

    def execute_plan(self, plan: Plan, arrays: Sequence[Arrays]) -> None:
        """Run a plan that was made elsewhere, unchanged. Verify it first: the engine does not.

        The last plan stays bound, so the same object runs again at the cost of its steps alone.

        Raises: as `execute`.
        """
        self._check_process()
        with self._lock():
            if self._last_plan is None or self._last_plan[0] is not plan:
                self._last_plan = (plan, self._bind(plan))
            self._run(self._last_plan[1], plan.digest, arrays)

    def _bind(self, plan: Plan) -> list[host.BoundProgram]:
        self.check()
        need = max(window_places(entry.buffers)[1] for entry in plan.ranks)
        grows = need > self._group.capacity
        size = 2 * self.world * need if grows else 0
        size += sum(
            buffer.rows * buffer.cols * ELEMENT_BYTES[buffer.dtype]
            for entry in plan.ranks
            for buffer in entry.buffers
            if buffer.role == "workspace"
        )
        if size >= available_memory.LOOKED_AT:
            available_memory.check_host(size, f"windows and workspaces of {self.world} ranks")
        if grows:
            self._group.grow(need)
        return [
            host.BoundProgram(
                compile_plan(entry, self._target), self._group, self.machine, self._compute
            )
            for entry in plan.ranks
        ]

    def _check_process(self) -> None:
        """Refuse a forked child: it has no threads of the node, and locks may be held for ever."""
        if os.getpid() != self._process:
            raise EngineError(
                "this process was forked from the one that made the node and has none of its "
                "threads; make a new node in this process"
            )

    def check(self) -> None:
        """Raise EngineError if the runtime is closed, or an earlier call has failed."""
        if self._closed:
            raise EngineError("this node is closed; make a new one")
        if self._group.failure() is not None:
            raise EngineError(
                "an earlier call on this node failed, so its windows are in an unknown state; "
                "call reset() on it first"
            )

    def _run(self, bound: list[host.BoundProgram], digest: int, arrays: Sequence[Arrays]) -> None:
        self.check()
        copy = self._calls % 2  # plans with mailboxes rely on copies that alternate
        self._calls += 1
        self._last = bound
        with single_threaded():
            ranks = RankJob(self.world)
            try:
                self._threads.start(lambda rank: bound[rank].run(arrays[rank], copy, digest), ranks)
                ranks.wait()
            except BaseException:  # an interrupt: the call ends now
                self._group.fail(0)
                ranks.wait()
                raise
        try:
            self._raise_failure(bound, ranks.errors)
        except EngineError:
            for rank, entry in enumerate(bound):  # also on ranks that had finished
                entry.fill_nan(arrays[rank])
            raise

    def _raise_failure(
        self, bound: list[host.BoundProgram], errors: Sequence[BaseException | None]
    ) -> None:
        for rank, error in enumerate(errors):
            if error is not None:
                raise EngineError(
                    f"rank {rank} failed: {error!r}; call reset() to go on"
                ) from error
        failure = self._group.failure()
        if failure is not None:
            raise error_of(
                failure, lambda rank, row: bound[rank].rows[row].name, "reset()", self.timeout_s
            )

    def timeline(self) -> Timeline:
        """Return the timeline of the last call; time 0 is the start of the first step."""
        if self._closed:
            raise EngineError("this node is closed; request its timeline before close()")
        return timeline_of([span for entry in self._last for span in entry.spans()], self.machine)

    def reset(self) -> None:
        """Set all signals to their initial state, after a failure."""
        self._check_process()
        with self._lock():
            self._group.reset()

    def close(self) -> None:
        """End all threads. Calls after this raise EngineError."""
        if os.getpid() != self._process:
            return  # the threads belong to the parent process
        with self._lock():
            self._closed = True
            self._threads.end(wait=True)
            self._bound.clear()
            self._last, self._last_plan = [], None
