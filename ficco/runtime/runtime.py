"""The runtime: the ranks of this process, all of a node or one of a group of processes.

A runtime lowers, binds and runs the plans of its own ranks. The ranks meet to open the group, to
grow the windows, and to reset. Otherwise they communicate only by signals. Every meeting makes a
new place: a group with the state of all ranks, windows, and this process's devices. A place that a
CUDA graph uses is kept until the runtime is closed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ficco.core.call_lock import CallLock
from ficco.core.errors import EngineError, InputError
from ficco.core.interrupts import is_interrupt
from ficco.core.machine import Machine
from ficco.engine.devices import are_well
from ficco.engine.groups import Group
from ficco.operators.problem import Problem
from ficco.plan import Plan, RankPlan, WindowBytes
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Timeline
from ficco.runtime import forks
from ficco.runtime.bound import BoundPrograms, Call, timeline_of
from ficco.runtime.engine import Engine
from ficco.runtime.failures import ALIKE, Failure, call_in_words, error_of
from ficco.runtime.meeting import Agenda, Facts, Meeting
from ficco.runtime.rank_threads import RankJob

INHERITED: list[Any] = []  # the parent's objects in a forked child, which must never free them
OPEN, GROW, RESET = "open the group", "grow the windows", "reset the group"

Arrays = Mapping[str, Any]


class Runtime(ABC):
    """The ranks of this process.

    Args:
        meeting: how the ranks meet.
        engine: what they run on.
        machine: a profile of the engine, the same on every rank.
        timeout_s: the longest time of any wait, in a call or a meeting, in seconds.
        window_limit: bytes that the windows of a rank may take, equal on all ranks; None: no limit
            other than the available memory. Also an attribute.

    Attributes:
        traced: whether calls on GPUs record times for `timeline`, which has a small cost.
        moves: how often windows have been made; equal on all ranks between calls.
    """

    kind = "group"  # in messages
    refuse_together = True  # whether all ranks raise InputError, before the call is begun
    remedy = "reset()"  # the call that makes the group usable again
    closed: str  # the error of calls of a closed runtime
    of_parent = forks.REFUSAL  # the error in a forked child
    ignored_at_close: tuple[type[Exception], ...] = ()  # errors of the wait for enqueued work

    def __init__(
        self, meeting: Meeting, engine: Engine, machine: Machine, timeout_s: float,
        window_limit: int | None = None,
    ) -> None:  # fmt: skip
        self.meeting, self.machine = meeting, machine
        self.world, self.ranks = meeting.world, meeting.ranks
        self._engine, self._compute, self._timeout_s = engine, engine.compute, timeout_s
        self.window_limit = window_limit
        self.traced, self.moves = False, 0
        self._lock = CallLock()
        self._bound: BoundPrograms[Call] = BoundPrograms()
        self._calls = 0
        self._last: Call | None = None
        self._last_plan: tuple[Plan, Call] | None = None  # of `execute_plan`
        self._captured = False  # whether a graph uses the place in use
        self._of_parent = False  # whether this process was forked from the one that opened it
        self._places: list[Any] = []  # the last one is in use; none: the runtime is not open
        self._groups: list[Group] = []  # that have not failed before a reset, the one in use first
        self._devices: list[Any] = []  # the native devices of the places
        self._end = weakref.finalize(self, _end, os.getpid(), meeting, self._groups)
        forks.watch(self)

    # ---- state

    @property
    def compute(self) -> str:
        """The name of the library for GEMMs."""
        return str(self._compute.name)

    @property
    def no_overlap(self) -> str:
        """Why copies do not overlap with kernels on these devices; "" if they do."""
        return self._engine.no_overlap

    @property
    def timeout_s(self) -> float:
        """The longest time of any wait in an open group, in seconds."""
        return self._timeout_s

    @property
    def window_bytes(self) -> int:
        """Bytes of all ranks' windows and mailboxes, both copies, including those graphs use."""
        return sum(2 * self.world * sum(place.sizes) for place in self._places)

    @property
    def _sizes(self) -> WindowBytes:
        """The current size of each copy of each window."""
        return self._places[-1].sizes if self._places else WindowBytes()

    @property
    def _group(self) -> Group:
        self._check_open()
        return self._groups[0]

    def _check_open(self) -> None:
        if self._of_parent:
            raise EngineError(self.of_parent)
        if not self._groups:
            raise EngineError(self.closed)

    # ---- calls

    def execute(self, problem: Problem, schedule: Schedule, arrays: Any, plan: Any = None) -> None:
        """Run a problem, on GPUs enqueue it; a collective call.

        Args:
            problem: the problem; only entries of this process's ranks are read from columns and
                depths per rank.
            schedule: resolved.
            arrays: inputs, weights and outputs by buffer name, per rank of this process.
            plan: what lowering returns for these ranks, if it was made before.

        Raises:
            InputError: the problem is for another number of ranks, or windows would have to grow
                during a graph capture.
            ScheduleError: no plan implements the schedule.
            TimeoutExceeded: a wait of some rank exceeded its timeout, or a rank did not arrive to
                grow the windows; `reset` is needed afterwards.
            EngineError: the runtime is closed, an earlier call failed, a device reports an error,
                or a rank stopped.
            MemoryError: some rank cannot allocate larger windows; the windows are unchanged.
        """
        if problem.world != self.world:
            raise InputError(
                f"the problem is for {problem.world} ranks, the {self.kind} has {self.world}"
            )
        with self._lock():
            self._check_alive()
            call = self._bound.get(problem, schedule, lambda: self._bind(problem, schedule, plan))
            self._run(call, arrays)

    def execute_plan(self, plan: Plan, arrays: Any) -> None:
        """Run a plan that was made elsewhere, unchanged. Verify it first: the engine does not.

        A collective call: all ranks run the same plan. The last plan stays bound, so the same
        object runs again at the cost of its steps alone. Raises as `execute`.
        """
        with self._lock():
            self._check_alive()
            if self._last_plan is None or self._last_plan[0] is not plan:
                call = self._bind(plan.problem, plan.schedule, plan)
                self._last_plan = (plan, call)
            self._run(self._last_plan[1], arrays)

    @abstractmethod
    def _lowered(
        self, problem: Problem, schedule: Schedule, plan: Any
    ) -> tuple[Sequence[RankPlan], int]:
        """Return the plans of this process's ranks, and their digest."""

    @abstractmethod
    def _each(self, job: Callable[[int], Any]) -> RankJob:
        """Run a job for each rank of this process, by its index; return how all have ended."""

    @abstractmethod
    def _results(self, job: Callable[[int], Any], failing: str) -> list[Any]:
        """Return what a job returns for each rank; raise the first error, which `failing` tells."""

    def _bind(self, problem: Problem, schedule: Schedule, plan: Any = None) -> Call:
        self._engine.check_runs(problem, schedule)
        plans, digest = self._lowered(problem, schedule, plan)
        have, need = self._sizes, self._need(plans)
        sizes = have.grown(need)
        if not self._allowed(sizes):
            sizes = have.joined(need)
            if not self._allowed(sizes):
                raise InputError(
                    f"windows of {2 * sum(sizes)} bytes are needed on each rank, and "
                    f"{self.window_limit} bytes are allowed; split the problem, or call "
                    "ficco.limit_windows with more"
                )
        self._check_memory(plans, 0 if sizes == have else 2 * self.world * sum(sizes))
        if sizes != have:
            self._meet(GROW, sizes, digest, call_in_words(problem, schedule, self.ranks[0]))
        place = self._places[-1]
        ranks = self._results(
            lambda index: self._engine.bind(place, index, plans[index], digest),
            "cannot bind its program",
        )
        return Call(problem, schedule, digest, ranks)

    def _need(self, plans: Sequence[RankPlan]) -> WindowBytes:
        """Return the windows that plans need."""
        need = WindowBytes()
        for entry in plans:
            need = need.joined(self._engine.need(entry, self._sizes, self.window_limit))
        return need

    def _allowed(self, sizes: WindowBytes) -> bool:
        """Return whether windows of these sizes, and those that graphs keep, fit the limit."""
        if self.window_limit is None or sizes == self._sizes:
            return True
        kept = self._places if self._captured else self._places[:-1]
        return 2 * (sum(sizes) + sum(sum(each.sizes) for each in kept)) <= self.window_limit

    def allows(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether a call's windows are within `window_limit`; equal on all ranks."""
        if self.window_limit is None:
            return True
        plans, _ = self._lowered(problem, schedule, None)
        return self._allowed(self._sizes.joined(self._need(plans)))

    def _check_memory(self, plans: Sequence[RankPlan], grown: int) -> None:  # noqa: B027
        """Check that there is memory for plans, with so many bytes of larger windows."""

    def _run(self, call: Call, arrays: Sequence[Arrays]) -> None:
        copy, group = self._calls % 2, self._group  # mailboxes rely on copies that alternate
        self._calls += 1
        self._last = call

        def run(index: int) -> Any:
            try:
                return call.ranks[index].run(arrays[index], copy, self.traced)
            except BaseException as error:
                if not (self.refuse_together and isinstance(error, InputError)):
                    group.fail(self.ranks[index])  # only the first failure is recorded
                raise

        with self._engine.running():
            job = self._each(run)
        self._captured = self._captured or any(entry.captured for entry in call.ranks)
        if not all(job.values):
            self._end_of_failed(call, arrays, job)

    def _end_of_failed(self, call: Call, arrays: Sequence[Arrays], job: RankJob) -> None:
        """Fill all outputs of a failed call with NaN, and raise its error."""
        errors = {
            self.ranks[index]: error for index, error in enumerate(job.errors) if error is not None
        }
        job.errors.clear()  # else an error's traceback has a reference to itself
        ended: list[BaseException] = []
        try:
            if errors and self._group.failure() is None:
                rank = min(errors)
                if isinstance(errors[rank], InputError):  # the call was not begun
                    raise errors[rank]
                self._group.fail(rank)
            filled = self._each(lambda index: call.ranks[index].fill_nan(arrays[index]))
            ended = [*errors.values(), *[error for error in filled.errors if error is not None]]
            filled.errors.clear()  # others than interrupts are ignored: the first error says more
            if any(map(is_interrupt, ended)):
                raise next(filter(is_interrupt, ended))
            raise self._call_error(errors) from next(iter(errors.values()), None)
        finally:
            errors.clear()
            ended.clear()

    def _call_error(self, errors: Mapping[int, BaseException]) -> BaseException:
        """Return the error of a call that was begun and not finished; `errors` are by rank."""
        first = self._group.failure()
        if first is None:
            return EngineError(f"the call failed; call {self.remedy} to go on")
        if first[4] == "stopped" and first[0] in errors:
            return EngineError(
                f"rank {first[0]} failed: {errors[first[0]]!r}; call {self.remedy} to go on"
            )
        if errors and self._devices:  # their calls fail after others have been enqueued
            self._check_alive()
        return self._failure() or EngineError(f"the call failed; call {self.remedy} to go on")

    def timeline(self) -> Timeline:
        """Return the timeline of the last call on this process's ranks; time 0 is its start.

        On GPUs the call must have been traced, and this waits until it ends.
        """
        with self._lock():
            if not self._groups and not self._of_parent:
                raise EngineError(
                    f"this {self.kind} is closed; request its timeline before close()"
                )
            self._check_open()
            last = self._last.ranks if self._last else []
            return timeline_of([span for entry in last for span in entry.spans()], self.machine)

    # ---- failure

    def check_alive(self) -> None:
        """Raise EngineError if a call is already known to have failed, or the runtime is closed."""
        if not are_well(self._groups, self._devices):
            self._check_alive()

    def check(self) -> None:
        """Raise EngineError if an earlier call on the group has failed."""
        self._check_alive()

    def _check_alive(self) -> None:
        for place in self._places:
            for device in place.devices:  # finds kernels that gave up before the watchdog does
                device.settle()
        if (error := self._failure()) is not None:
            raise EngineError(
                f"an earlier call on this {self.kind} failed, so its windows are in an unknown "
                f"state; call {self.remedy} first. It was: {error}"
            ) from error

    def check_outside(self) -> None:
        """Raise EngineError inside a call of this thread, as in the handler of a signal."""
        self._lock()

    def _failure(self) -> EngineError | None:
        """Return the first failure known so far."""
        failure = self._group.failure()
        if failure is not None:
            return self._failure_in_words(failure)
        for group in self._groups[1:]:  # groups whose windows graphs use
            failure = group.failure()
            if failure is not None:
                return error_of(
                    failure, lambda _, row: f"number {row} of a call in a CUDA graph", self.remedy,
                    self.timeout_s,
                )  # fmt: skip
        return None

    @abstractmethod
    def _failure_in_words(self, failure: Failure) -> EngineError:
        """Return the error of the group in use."""

    # ---- meetings

    def _meet(self, what: str, sizes: WindowBytes, digest: int = 0, call: str = "") -> None:
        """Meet all ranks and move to new windows of the sizes that they agree on.

        Args:
            what: the purpose of the meeting.
            sizes: the sizes that this process's ranks need.
            digest: of the call for which the windows grow.
            call: a sentence that describes that call.
        """
        if self._places:
            if self._capturing():
                raise InputError(
                    "windows cannot grow while a CUDA graph is captured; run the largest shape "
                    "once before the capture"
                )
            self._wait_idle()  # peers may write to this process's windows until then
        facts = {**sizes._asdict(), "digest": digest, "rank": self.ranks[0], "call": call}
        self._move_to(*self._met(self._agenda(what, facts)))

    def _agenda(self, what: str, facts: Facts) -> Agenda:
        """Return the agenda of a meeting for a purpose, with what this process brings."""
        broken = self._failure if what == GROW else lambda: None
        return Agenda(what, facts, self._make, self._join, broken, lambda rank: "")

    def _met(self, agenda: Agenda) -> Any:
        return self.meeting.meet(agenda, self._timeout_s)

    def _capturing(self) -> bool:
        """Return whether a graph is being captured on a stream of this process's ranks."""
        return False

    def _wait_idle(self) -> None:  # noqa: B027
        """Wait until devices have finished all enqueued work of calls."""

    def _make(self, brought: list[Facts]) -> tuple[int | None, Facts]:
        """Create memory of the size that all ranks need (on rank 0)."""
        for facts in brought:
            if facts["digest"] != brought[0]["digest"]:
                raise EngineError(
                    f"rank {facts['rank']} runs another call than rank 0. {brought[0]['call']} "
                    f"{facts['call']} {ALIKE}; call {self.remedy} to go on."
                )
        sizes = WindowBytes()
        for facts in brought:
            sizes = sizes.joined(_sizes_in(facts))
        return self.meeting.memory(sizes.window * self._engine.in_group), sizes._asdict()

    def _join(self, memory: int | None, facts: Facts) -> tuple[Group, Any, WindowBytes]:
        """Join the group and allocate windows; if a rank fails, none joins."""
        sizes = _sizes_in(facts)
        allocated, in_group = self._engine.allocate(sizes), sizes.window * self._engine.in_group
        try:
            group = self.meeting.group(memory, in_group, self.machine, self._timeout_s)
        except BaseException:
            self._engine.free(allocated)
            raise
        return group, allocated, sizes

    def _move_to(self, group: Group, memory: Any, sizes: WindowBytes) -> None:
        """Replace the place in use, whose calls have ended, by a new one."""
        place = self._engine.place(group, memory, sizes, self._exchange)
        old = [] if self._captured else self._places[-1:]
        self._places[len(self._places) - len(old) :] = [place]
        self._devices[:] = [each.native for one in self._places for each in one.devices]
        self._captured = False
        self.moves += 1
        self._forget_calls()
        # After a reset, failed groups are no longer reported, though graphs may use their windows.
        kept = [each.group for each in reversed(self._places[:-1])]
        working = [group, *[each for each in kept if each.failure() is None]]
        closing = [each for each in self._groups if each not in working]
        self._groups[:] = working
        group.timeout_s = self._timeout_s  # it may have changed while the ranks met
        try:
            for each in old:
                each.free()
        finally:
            for each in closing:
                with contextlib.suppress(RuntimeError):  # an interrupted call still runs
                    each.close()

    def _exchange(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Return the values of all ranks; see `ficco.engine.gpus.Exchange`."""
        return list(values)

    def _forget_calls(self) -> None:
        self._bound.clear()
        self._calls, self._last, self._last_plan = 0, None, None

    def reset(self) -> None:
        """Meet all ranks and make new windows, after a failure. Bound programs are dropped.

        Peers that are in a call fail within a second, and must reset the group too. CUDA graphs
        captured before are invalid from now on; capture them again.

        Raises:
            TimeoutExceeded: a rank did not arrive within `timeout_s`.
            EngineError: a rank has left, a device has failed or does not become idle, or the
                runtime is closed.
        """
        with self._lock():
            self._check_open()
            self._meet(RESET, self._sizes)

    def leave_to_parent(self) -> None:
        """Refuse all calls in this child of the process that opened the group."""
        self._of_parent = True
        INHERITED.extend([dict(vars(self)), *self._groups, *self._places])
        for kept in (self._groups, self._places, self._devices):
            kept.clear()
        self._bound = BoundPrograms()
        self._last = self._last_plan = None
        self.meeting.leave_to_parent()

    def close(self) -> None:
        """Wait for enqueued work, then free windows, threads and sockets of this process's ranks.

        Later calls raise EngineError.
        """
        with self._lock():
            try:
                if self._groups:
                    with contextlib.suppress(*self.ignored_at_close):
                        self._wait_idle()
                self._forget_calls()
                while self._places:
                    self._places.pop().free()
            finally:
                self._end()
                self._forget_calls()
                self._places.clear()
                self._devices.clear()


def _sizes_in(facts: Facts) -> WindowBytes:
    """Return the window sizes that a rank needs, or on which the ranks have agreed."""
    return WindowBytes(facts["window"], facts["mailbox"])


def _end(process: int, meeting: Meeting, groups: list[Group]) -> None:
    """Leave the group; runs at interpreter exit if the user did not close the runtime."""
    if os.getpid() != process:
        return  # a forked child: the parent keeps the group
    for group in groups:
        with contextlib.suppress(RuntimeError):  # an interrupted call still runs
            group.close()
    groups.clear()
    meeting.close()
