"""Run one rank per process over a torch.distributed group, with windows in shared memory.

A runtime lowers, binds and runs only its own rank's plan. The ranks meet (see `rendezvous`) to
open the group, to grow the windows, and to reset. Otherwise they communicate only by signals.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ficco.call_lock import CallLock
from ficco.encoding import trace_rows
from ficco.engines import host, shared_memory
from ficco.errors import EngineError, InputError
from ficco.interrupts import is_interrupt
from ficco.lowering import lower_rank
from ficco.machine import Machine
from ficco.passes import compile_plan
from ficco.plan import Plan, RankPlan, WindowBytes, digest_of, window_bytes_of
from ficco.problem import Problem
from ficco.runtime import forks
from ficco.runtime.blas_threads import single_threaded
from ficco.runtime.bound import BoundPrograms, check_machine, timeline_of
from ficco.runtime.call_words import call_in_words, known_calls_in_words
from ficco.runtime.failures import (
    ALIKE,
    CLOSED,
    Failure,
    differing_digests,
    error_of,
    failed_word,
    raiser_of,
)
from ficco.runtime.members import members_of, note_turn
from ficco.runtime.peers import (
    Breaks,
    condition_of,
    difference_in_calls,
    lateness,
    overtaken_by_a_peer,
    rank_ahead,
    refusal_of_a_peer,
    someone_left,
)
from ficco.runtime.rendezvous import Agenda, Facts, Rendezvous
from ficco.schedule import Schedule
from ficco.target import HOST, Target
from ficco.timeline import Timeline

__all__ = ["INHERITED", "OPENING_S", "RESET", "Call", "ProcessRuntime", "room_in"]

_BEATS_S = 0.1  # two heartbeats
OPENING_S = 300.0  # least timeout for all ranks to open a group: processes start at different times
INHERITED: list[Any] = []  # the parent's objects in a forked child, which must never free them
RESET = "reset() on every rank"


@dataclass(eq=False)
class Call:
    """A call that this rank can make.

    Attributes:
        problem, schedule, digest: the identity of the call.
        bound: an engine's BoundProgram.
        prepared: prepared calls that repeat it, one per layout of its matrices.
    """

    problem: Problem
    schedule: Schedule
    digest: int
    bound: Any
    prepared: list[Any] = field(default_factory=list)


class ProcessRuntime:
    """This process's rank of a group of processes.

    The constructor is a collective call: every rank of the group makes one, with the same machine.
    `reset` and `execute` are collective too; `execute` needs the same problems and schedules in
    the same order on every rank.

    Args:
        group: a ProcessGroup with the gloo backend, or a DeviceMesh of one dimension.
        machine: a profile whose engine is "host", the same on every rank.
        compute: the library for GEMMs.
        timeout_s: the longest time of any wait of an open group, in a call or a rendezvous, in s.
        most_window_bytes: the limit for all windows of all ranks, equal on all ranks; None: no
            limit other than the available memory. Also an attribute.
        beside: the group's open runtime, in a call of which all ranks open this one; its failure
            ends the wait for them. None: ranks may arrive far apart.

    Raises:
        InputError: the group or the machine is invalid.
        EngineError: the ranks are on several hosts, or cannot reach each other.
        MemoryError: the shared memory is not available.
    """

    engine = "host"
    backend = "gloo"
    shares_windows = True  # in the host's memory
    device: Any = "cpu"

    def __init__(
        self, group: Any, machine: Machine, compute: Any, timeout_s: float,
        most_window_bytes: int | None = None, beside: ProcessRuntime | None = None,
    ) -> None:  # fmt: skip
        members = members_of(group, self.backend)
        check_machine(members.world, machine, self.engine)
        self.rank, self.world, self.machine = members.rank, members.world, machine
        self._compute, self._timeout_s = compute, timeout_s
        self.most_window_bytes = most_window_bytes
        self._lock = CallLock()
        self._bound: BoundPrograms[Call] = BoundPrograms()
        self._calls = 0
        self._last: Call | None = None
        self._rendezvous_error = ""  # why the last rendezvous failed, until a reset
        self._of_parent = False  # whether this process was forked from the one that opened it
        asked = {"machine": machine.identity, "most_window_bytes": most_window_bytes}
        waits = (timeout_s, beside._breaks()) if beside else (max(timeout_s, OPENING_S),)
        self._rendezvous = Rendezvous(members, asked, *waits)
        note_turn(members.group, self._rendezvous.turn)
        self._groups: list[shared_memory.Group] = []  # one while the group is open, else none
        self._end = weakref.finalize(self, _end, os.getpid(), self._rendezvous, self._groups)
        forks.watch(self)
        try:
            self._agree_to_open()
            self._meet("open the group", WindowBytes())
        except BaseException:
            self._end()
            raise

    def _agree_to_open(self) -> None:
        """Meet all ranks before windows are made; raise on all ranks if they cannot be made."""

    def gathered(self, value: Any, call: str = "", least_s: float = 0.0) -> list[Any]:
        """Return the JSON values of all ranks, by rank. A collective call.

        Args:
            value: of this rank.
            call: a sentence about the call for which the ranks meet; empty: none.
            least_s: the least timeout, in seconds; while the group opens it is OPENING_S instead.

        Raises TimeoutExceeded; EngineError: a rank left; with `call`: failed or made another call.
        """
        if self._of_parent:
            raise EngineError(forks.REFUSAL)
        timeout_s = max(self._timeout_s, least_s if self._groups else OPENING_S)
        checks = (self._overtaken(call), self._breaks()) if call and self._groups else ()
        return self._rendezvous.gather("exchange data", value, timeout_s, call, *checks)

    @property
    def compute(self) -> str:
        """The name of the library for GEMMs."""
        return str(self._compute.name)

    @property
    def timeout_s(self) -> float:
        """The longest time of any wait of this rank in an open group, in seconds."""
        return self._timeout_s

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows of all ranks, both copies."""
        return sum(self.world * 2 * group.capacity for group in self._groups)

    def execute(
        self,
        problem: Problem,
        schedule: Schedule,
        arrays: Mapping[str, Any],
        plan: RankPlan | None = None,
    ) -> None:
        """Run a problem; `arrays` has this rank's inputs, weights and outputs by buffer name.

        Only this rank's entries of per-rank columns and depths in `problem` are read. `plan` is the
        result of `lower_rank`, if it was made before.

        Raises:
            InputError: the problem is for another number of ranks.
            ScheduleError: no plan implements the schedule.
            TimeoutExceeded: a wait of some rank exceeded its timeout, or a rank did not arrive to
                grow the windows; all ranks must call `reset` afterwards.
            EngineError: the runtime is closed, an earlier call failed, or a rank stopped.
            MemoryError: some rank cannot allocate larger windows; the windows are unchanged.
        """
        if problem.world != self.world:
            raise InputError(
                f"the problem is for {problem.world} ranks, the group has {self.world}"
            )
        with self._lock():
            self._check_alive()
            call = self._bound.get(problem, schedule, lambda: self._bind(problem, schedule, plan))
            self._run(call, arrays)

    def execute_plan(self, plan: Plan, arrays: Mapping[str, Any]) -> None:
        """Run a plan that was made elsewhere, unchanged. Verify it first: the engine does not.

        A collective call: all ranks run the same plan. Raises as `execute`.
        """
        with self._lock():
            self._check_alive()
            entry = plan.ranks[self.rank]
            self._run(self._bind_plan(plan.problem, plan.schedule, entry, plan.digest), arrays)

    def _bind(self, problem: Problem, schedule: Schedule, plan: RankPlan | None = None) -> Call:
        plan = plan or lower_rank(problem, schedule, self.rank)
        return self._bind_plan(problem, schedule, plan, digest_of(problem, schedule))

    def _bind_plan(self, problem: Problem, schedule: Schedule, plan: RankPlan, digest: int) -> Call:
        need, have, most = self._need(plan), self._sizes, self.most_window_bytes
        least = have.joined(need)
        if most is not None and 2 * self.world * sum(least) > most:
            raise InputError(
                f"windows of {2 * self.world * sum(least)} bytes over all ranks are needed, "
                f"{most} bytes are allowed; split the problem or raise most_window_bytes"
            )
        if least != have:
            roomy = have.grown(need)
            if most is not None and 2 * self.world * sum(roomy) > most:
                roomy = least
            call = call_in_words(problem, schedule, self.rank)
            self._meet("grow the windows", roomy, digest, call)
        return Call(problem, schedule, digest, self._bound_program(plan, digest))

    def _need(self, plan: RankPlan) -> WindowBytes:
        """Return the sizes that a plan needs, equal on all ranks; here windows hold mailboxes."""
        return WindowBytes(sum(window_bytes_of(plan)))

    @property
    def _sizes(self) -> WindowBytes:
        """The current size of each copy of each window."""
        return WindowBytes(self._group.capacity)

    def _bound_program(self, plan: RankPlan, digest: int) -> Any:
        """Bind a plan to the current windows, which are large enough."""
        program = compile_plan(plan, HOST)
        return host.BoundProgram(program, self._group, self.machine, self._compute)

    def _run(self, call: Call, arrays: Mapping[str, Any]) -> None:
        copy = self._calls % 2  # plans with mailboxes rely on copies that alternate
        self._calls += 1
        self._last = call
        try:
            with single_threaded():
                done = call.bound.run(arrays, copy, call.digest)
        except BaseException as error:
            self._group.fail(self.rank)
            if is_interrupt(error):
                raise
            said = f"rank {self.rank} failed: {error!r}; call {RESET} to go on"
            raise EngineError(said) from error
        if not done:
            raise self._failure() or EngineError(f"the call failed; call {RESET} to go on")

    def timeline(self) -> Timeline:
        """Return the timeline of this rank's last call; time 0 is the start of its first step."""
        return timeline_of(self._last.bound.spans() if self._last else [], self.machine)

    def check(self) -> None:
        """Raise EngineError if an earlier call on the group has failed."""
        self._check_alive()

    def check_outside(self) -> None:
        """Raise EngineError inside a call of this thread, as in the handler of a signal."""
        self._lock()

    def refuse(self, error: Exception) -> None:
        """Notify the peers that this rank does not make the next call, because it raises `error`.

        Peers that have begun the call fail within a second. If all ranks refuse it, the group
        stays usable. On a failed or closed group this does nothing.
        """
        if self._groups and not self._of_parent and self._group.failure() is None:
            self._group.refuse(self.rank, f"{type(error).__name__}: {error}")

    def fail(self) -> None:
        """Fail the group, because this rank makes no more calls. Peers that wait end soon."""
        if self._groups and not self._of_parent:
            self._group.fail(self.rank)

    def reset(self) -> None:
        """Meet all ranks and make new windows, after a failure. Bound programs are dropped.

        Peers that are in a call fail within a second, and must reset the group too.

        Raises:
            TimeoutExceeded: a rank did not arrive within `timeout_s`.
            EngineError: a rank has left, or the runtime is closed.
        """
        with self._lock():
            self._group.refuse(self.rank, "it called reset()")
            self._meet("reset the group", self._sizes)

    def leave_to_parent(self) -> None:
        """Refuse all calls in this child of the process that opened the group."""
        self._of_parent = True
        INHERITED.extend([*self._groups, self._last, self._bound])
        self._groups.clear()
        self._bound, self._last = BoundPrograms(), None
        self._rendezvous.leave_to_parent()

    def close(self) -> None:
        """Free this rank's threads, windows and sockets. Later calls raise EngineError."""
        with self._lock():
            self._bound.clear()
            self._last = None
            self._end()

    @property
    def _group(self) -> shared_memory.Group:
        if self._of_parent:
            raise EngineError(forks.REFUSAL)
        if not self._groups:
            raise EngineError(CLOSED)
        return self._groups[0]

    def _check_alive(self) -> None:
        if (error := self._failure()) is not None:
            raise EngineError(
                f"an earlier call on this group failed, so its windows are in an unknown state; "
                f"call {RESET} first. It was: {error}"
            ) from error

    def _meet(self, what: str, sizes: WindowBytes, digest: int = 0, call: str = "") -> None:
        """Meet all ranks and move to new windows of the sizes that they agree on.

        Args:
            what: the purpose of the rendezvous.
            sizes: the sizes that this rank needs.
            digest: of the call for which the windows grow.
            call: a sentence that describes that call.
        """
        opening, resetting = not self._groups, what == "reset the group"
        agenda = Agenda(
            what,
            {**sizes._asdict(), "digest": digest, "rank": self.rank, "call": call},
            self._make,
            self._join,
            (lambda: None) if opening or resetting else self._breaks(),
            self._absence,
            self._overtaken(call),
        )
        try:
            group = self._rendezvous.meet(agenda, max(self._timeout_s, OPENING_S * opening))
        except MemoryError:
            raise  # on all ranks; the windows are unchanged
        except BaseException as error:
            if not (opening or resetting):
                wrong = isinstance(error, EngineError)
                if wrong:  # the text only: its frames hold the windows
                    self._rendezvous_error = str(error)
                counted = wrong and self._counts_calls
                if not (counted and rank_ahead(self._group, self.rank) is not None):
                    self._group.fail(self.rank)  # so the others do not wait for this rank's call
            raise
        self._rendezvous_error = ""
        self._move_to(group)

    @property
    def _counts_calls(self) -> bool:
        """Whether the state of a rank counts all of its calls: no graph repeats them."""
        return True

    def _overtaken(self, call: str) -> Callable[[], EngineError | None]:
        """Return a check whether a peer makes another call than `call`, for which ranks meet."""
        if not call or not self._groups or not self._counts_calls:
            return lambda: None
        return partial(overtaken_by_a_peer, self._group, self.rank, call, RESET)

    def _breaks(self) -> Breaks:
        return Breaks(self._failure, lambda: refusal_of_a_peer(self._group, self.rank, RESET))

    def _move_to(self, group: shared_memory.Group) -> None:
        """Replace the old windows by new ones."""
        for old in self._groups:
            old.close()
        self._groups[:] = [group]
        self._bound.clear()
        self._calls, self._last = 0, None

    def _make(self, brought: list[Facts]) -> tuple[int, Facts]:
        """Create memory of the size that all ranks need (on rank 0)."""
        for facts in brought:
            if facts["digest"] != brought[0]["digest"]:
                raise EngineError(
                    f"rank {facts['rank']} runs another call than rank 0. {brought[0]['call']} "
                    f"{facts['call']} {ALIKE}; call {RESET} to go on."
                )
        sizes = WindowBytes()
        for facts in brought:
            sizes = sizes.joined(room_in(facts))
        shared_bytes = sizes.window if self.shares_windows else 0
        return shared_memory.create(self.world, shared_bytes), sizes._asdict()

    def _join(self, memory: int, facts: Facts) -> shared_memory.Group:
        return shared_memory.join(
            memory, self.world, self.rank, facts["window"], self.machine, self._timeout_s
        )

    # ---- failure in words

    def _failure(self) -> EngineError | None:
        """Return the group's first failure, worded as on every rank, with notes on the ranks."""
        failure = self._group.failure()
        if failure is None:
            return None
        if failure[4] == "stopped" and self._rendezvous_error:
            return EngineError(self._rendezvous_error)
        refusal = ""
        if failure[4] == "refused":
            refusal = self._group.refusal(failure[2], failure[0])
            if self._begun(failure):  # tell the rank that refused it, which call this is
                self._group.refuse(self.rank, self._own_call_note())
        return error_of(
            failure, partial(self._step_name, failure), RESET, self._timeout_s,
            self._notes(failure), refusal, someone_left(self._group, self.rank),
        )  # fmt: skip

    def _step_name(self, failure: Failure, rank: int, row: int) -> str:
        """Return the name of a row of a rank's program, if it ran the same call as this rank."""
        call = self._last
        if call is not None and shared_memory.state_of(self._group, rank).digest == call.digest:
            program = call.bound.program
            if rank != self.rank:
                plan = lower_rank(call.problem, call.schedule, rank)
                program = compile_plan(plan, self._target_of(rank, program.target))
            names = [row.name for row in trace_rows(program)]
            if row < len(names):
                return names[row]
        return f"number {row} of another call"

    def _target_of(self, rank: int, own: Target) -> Target:
        """Return the target of a rank, given this rank's own."""
        return own

    def _notes(self, failure: Failure) -> str:
        """Say which ranks have left or stalled, and whether the rank waited for is late."""
        digests = differing_digests(failure)
        if digests:
            return " ".join(known_calls_in_words(self._bound, digests, self.rank))
        notes = self._conditions_by_rank()
        if failure[4] == "refused" and self._begun(failure):
            notes[self.rank] = self._own_call_note()
        if failure[4] == "stopped" and failure[0] != self.rank and not any(notes.values()):
            time.sleep(_BEATS_S)  # the stopped rank may see a death before the watchdog does
            notes = self._conditions_by_rank()
        word = failed_word(failure)
        waiter = failure[0]
        if word is not None and not notes[raiser := raiser_of(word)]:
            notes[raiser] = lateness(self._group, waiter, raiser, self._own_call_note())
        return " ".join(note for note in notes.values() if note)

    def _begun(self, failure: Failure) -> bool:
        """Return whether this rank has begun the call that another rank has refused."""
        return shared_memory.state_of(self._group, self.rank).calls > failure[6]

    def _own_call_note(self) -> str:
        """Return a sentence about this rank's last call, or an empty string."""
        last = self._last
        return "" if last is None else call_in_words(last.problem, last.schedule, self.rank)

    def _absence(self, rank: int) -> str:
        """Return a sentence about a rank missing from a rendezvous, or an empty string."""
        condition = self._condition(rank)
        if condition or not self._groups:
            return condition
        return difference_in_calls(self._groups[0], self.rank, rank)

    def _conditions_by_rank(self) -> dict[int, str]:
        return {rank: self._condition(rank) for rank in range(self.world)}

    def _condition(self, rank: int) -> str:
        """Return a sentence about a rank that died, left or stalled, or an empty string."""
        if rank == self.rank or not self._groups:
            return ""
        return condition_of(self._groups[0], rank, self._rendezvous.pids[rank])


def room_in(facts: Facts) -> WindowBytes:
    """Return the window sizes that the ranks have agreed on."""
    return WindowBytes(facts["window"], facts["mailbox"])


def _end(process: int, rendezvous: Rendezvous, groups: list[shared_memory.Group]) -> None:
    """Leave the group; runs at interpreter exit if the user did not close the runtime."""
    if os.getpid() != process:
        return  # a forked child: the parent keeps the group
    for group in groups:
        with contextlib.suppress(RuntimeError):  # an interrupted call still runs
            group.close()
    groups.clear()
    rendezvous.close()
