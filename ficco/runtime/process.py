"""The runtime of one rank of a group of processes: the other ranks are other processes.

The ranks meet by `rendezvous`, for an open group also to exchange values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ficco.core.errors import EngineError, InputError, counted
from ficco.core.machine import Machine
from ficco.engine.groups import Group, RankState, state_of
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.plan import Plan, RankPlan, WindowBytes, digest_of
from ficco.plan.schedule import Schedule
from ficco.program.encoding import trace_rows
from ficco.program.passes import compile_plan
from ficco.program.target import Target
from ficco.runtime import forks
from ficco.runtime.bound import Call, check_machine
from ficco.runtime.engine import Engine
from ficco.runtime.failures import (
    ALIKE,
    CLOSED,
    Failure,
    call_in_words,
    differing_digests,
    error_of,
    failed_word,
    known_calls_in_words,
    raiser_of,
    refused_in_words,
)
from ficco.runtime.meeting import Agenda, Facts
from ficco.runtime.members import members_of, note_turn
from ficco.runtime.rank_threads import RankJob
from ficco.runtime.rendezvous import Rendezvous
from ficco.runtime.runtime import GROW, OPEN, RESET, Runtime

_BEATS_S = 0.1  # two heartbeats
# Heartbeats are 0.05 s apart. On a busy machine of 2 cores some were 0.2 s late.
_STALLED_S = 0.5
# How long a peer's refusal must last before it ends a rendezvous. If all ranks raise the error of
# a rendezvous, some of them raise it, and refuse the call, a little before the others.
_REFUSAL_LASTS_S = 0.3
_WORDS_WITHIN_S = 1.0  # for a peer whose call fails to say which call it was
_POLL_S = 0.02
_CALLS = 1 << 32  # calls are counted modulo this number
OPENING_S = 300.0  # for all ranks to open a group: processes start at different times
LOADING_S = 60.0  # for a rank that has arrived to import modules, as PyTorch's and Triton's


class ProcessRuntime(Runtime):
    """This process's rank of a group of processes; arrays are those of this rank.

    The constructor is a collective call: every rank of the group makes one, with the same machine.
    `reset` and `execute` are collective too; `execute` needs the same problems and schedules in
    the same order on every rank.

    Args:
        group: a ProcessGroup with the gloo backend, or a DeviceMesh of one dimension.
        machine: a profile whose engine is "host", the same on every rank.
        compute: the library for GEMMs.
        timeout_s: the longest time of any wait of an open group, in a call or a rendezvous, in s.
        window_limit: as for `Runtime`.
        beside: the group's open runtime, in a call of which all ranks open this one; its failure
            ends the wait for them. None: ranks may arrive far apart.
        opening_s: the longest time that this rank waits for the others to open the group; None:
            OPENING_S, or `timeout_s` if that is longer.

    Raises:
        InputError: the group or the machine is invalid.
        EngineError: the ranks are on several hosts, or cannot reach each other.
        MemoryError: the shared memory is not available.
    """

    remedy, closed = "reset() on every rank", CLOSED
    ignored_at_close = (EngineError,)  # a failure does not keep a rank from leaving
    engine, backend = "host", "gloo"
    device: Any = "cpu"
    meeting: Rendezvous

    def __init__(
        self, group: Any, machine: Machine, compute: Any, timeout_s: float,
        window_limit: int | None = None, beside: ProcessRuntime | None = None,
        opening_s: float | None = None,
    ) -> None:  # fmt: skip
        members = members_of(group, self.backend)
        check_machine(members.world, machine, self.engine)
        self.rank = members.rank
        self._rendezvous_error = ""  # why the last rendezvous failed, until a reset
        asked = {"machine": machine.identity, "window_limit": window_limit}
        self._opening_s = max(timeout_s, OPENING_S) if opening_s is None else opening_s
        waits = (timeout_s, beside._breaks()) if beside else (self._opening_s,)
        self.rendezvous = Rendezvous(members, asked, *waits)
        note_turn(members.group, self.rendezvous.turn)
        try:
            engine = self._engine_of(members.world, machine, compute)
        except BaseException:
            self.rendezvous.close()
            raise
        super().__init__(self.rendezvous, engine, machine, timeout_s, window_limit)
        try:
            self._agree_to_open()
            self._meet(OPEN, WindowBytes())
        except BaseException:
            self._end()
            raise

    def _engine_of(self, world: int, machine: Machine, compute: Any) -> Engine:
        return Engine(machine, compute)

    def _agree_to_open(self) -> None:
        """Meet all ranks before windows are made; raise on all ranks if they cannot be made."""

    def gathered(self, what: str, value: Any, call: str = "", least_s: float = 0.0) -> list[Any]:
        """Return the JSON values of all ranks, by rank. A collective call.

        Args:
            what: the purpose of the exchange, such as "compare GPUs"; equal on all ranks.
            value: of this rank.
            call: a sentence about the call for which the ranks meet; empty: none.
            least_s: the least timeout, in seconds.

        Raises TimeoutExceeded; EngineError: a rank left, or exchanges something else; with `call`:
        failed or made another call.
        """
        return self.rendezvous.gather(what, value, *self.waits(call, least_s))

    def waits(self, call: str = "", least_s: float = 0.0) -> tuple[Any, ...]:
        """Return the last arguments of `Rendezvous.gather`: how long to wait, and what ends it."""
        if self._of_parent:
            raise EngineError(forks.REFUSAL)
        checks = (self._overtaken(call), self._breaks()) if call and self._groups else ()
        return max(self._waits_s, least_s), call, *checks

    @property
    def _waits_s(self) -> float:
        return self._timeout_s if self._groups else max(self._opening_s, LOADING_S)

    # ---- calls

    def _lowered(
        self, problem: Problem, schedule: Schedule, plan: Plan | RankPlan | None
    ) -> tuple[Sequence[RankPlan], int]:
        if isinstance(plan, Plan):
            return [plan.ranks[self.rank]], plan.digest
        mine = lower_rank(problem, schedule, self.rank) if plan is None else plan
        return [mine], digest_of(problem, schedule)

    def _run(self, call: Call, arrays: Any) -> None:
        super()._run(call, [arrays])

    def _each(self, job: Callable[[int], Any]) -> RankJob:
        found = RankJob(1)
        try:
            found.values[0] = job(0)
        except BaseException as error:
            found.errors[0] = error
        return found

    def _results(self, job: Callable[[int], Any], failing: str) -> list[Any]:
        return [job(0)]

    def refuse(self, error: Exception) -> None:
        """Notify the peers that this rank does not make the next call, because it raises `error`.

        Peers that have begun the call fail within a second. If all ranks refuse it, the group
        stays usable. On a failed or closed group this does nothing.
        """
        if self._groups and not self._of_parent and self._group.failure() is None:
            self._group.refuse(self.rank, f"{type(error).__name__}: {error}")

    def check_limit(self, limit: int | None) -> None:
        """Check a new value of `window_limit`; a collective call.

        Raises:
            InputError: the limits of ranks differ, or the windows have more bytes; on all ranks.
        """
        limits = self.gathered("limit the windows", limit)
        for rank, other in enumerate(limits):
            if other != limits[0]:
                raise InputError(
                    f"rank 0 limits its windows to {limits[0]} bytes and rank {rank} to {other}; "
                    "pass the same limit on all ranks"
                )
        have = self.window_bytes // self.world
        if limit is not None and have > limit:
            raise InputError(
                f"the windows of each rank have {have} bytes already, and {limit} bytes are "
                "allowed; set the limit before the first call, or call ficco.close() first"
            )

    def meet_for_library(self, problem: Problem, schedule: Schedule) -> None:
        """Meet all ranks before a call by torch.distributed, which has a timeout of its own.

        Raises as `gathered`: a rank failed, refuses the call, or makes another one.
        """
        self.check_alive()
        what = f"run {problem.op} by torch.distributed"
        self.gathered(what, None, call_in_words(problem, schedule, self.rank))

    def fail(self) -> None:
        """Fail the group, because this rank makes no more calls. Peers that wait end soon."""
        if self._groups and not self._of_parent:
            self._group.fail(self.rank)

    # ---- rendezvous

    def _meet(self, what: str, sizes: WindowBytes, digest: int = 0, call: str = "") -> None:
        if what == RESET:
            self._group.refuse(self.rank, "it called reset()")
        super()._meet(what, sizes, digest, call)

    def _agenda(self, what: str, facts: Facts) -> Agenda:
        agenda = super()._agenda(what, facts)
        agenda = agenda._replace(broken=self._breaks()) if what == GROW else agenda
        overtaken = self._overtaken(facts["call"])
        return agenda._replace(condition=self._absence, overtaken=overtaken)

    def _met(self, agenda: Agenda) -> Any:
        try:
            joined = self.meeting.meet(agenda, self._waits_s)
        except MemoryError:
            raise  # on all ranks; the windows are unchanged
        except BaseException as error:
            if agenda.what == GROW:
                wrong = isinstance(error, EngineError)
                if wrong:  # the text only: its frames hold the windows
                    self._rendezvous_error = str(error)
                counted = wrong and self._counts_calls
                if not (counted and self._rank_ahead() is not None):
                    self._group.fail(self.rank)  # so the others do not wait for this rank's call
            raise
        self._rendezvous_error = ""
        return joined

    def _move_to(self, group: Group, memory: Any, sizes: WindowBytes) -> None:
        try:
            super()._move_to(group, memory, sizes)
        except BaseException:
            for failing in (group, *self._groups):
                failing.fail(self.rank)  # else the others wait, or continue without its windows
            raise

    def _exchange(self, what: str, values: Sequence[Any]) -> list[Any]:
        return self.gathered(what, values[0])

    @property
    def _counts_calls(self) -> bool:
        """Whether the state of a rank counts all of its calls: no graph repeats them."""
        return not self._captured

    def _overtaken(self, call: str) -> Callable[[], EngineError | None]:
        """Return a check whether a peer makes another call than `call`, for which ranks meet."""
        if not call or not self._groups or not self._counts_calls:
            return lambda: None
        return partial(self._overtaken_by_a_peer, call)

    def _breaks(self) -> Callable[[], EngineError | None]:
        """Return what a rank polls in a rendezvous of an open group: the error that ends it."""
        refused_at = math.inf

        def error() -> EngineError | None:
            nonlocal refused_at
            refusal = None
            if (failure := self._failure()) is None:
                refusal = self._refusal_of_a_peer()
            if refusal is None:
                return failure
            refused_at = min(refused_at, time.monotonic())
            return refusal if time.monotonic() - refused_at > _REFUSAL_LASTS_S else None

        return error

    # ---- states of peers

    def _state(self, rank: int) -> RankState:
        return state_of(self._group, rank)

    def _condition(self, rank: int) -> str:
        """Return a sentence about a peer that has died, left or stalled; else an empty string."""
        if rank == self.rank or not self._groups:
            return ""
        state, name = self._state(rank), f"Rank {rank} (pid {self.rendezvous.pids[rank]})"
        if state.presence == "died":
            return f"{name} has died."
        if state.presence == "closed":
            return f"{name} has closed its runtime."
        if state.age_s > _STALLED_S:
            return f"{name} has not been seen for {state.age_s:.1f} s: it has died or is stopped."
        return ""

    def _absence(self, rank: int) -> str:
        """Return a sentence about a rank missing from a rendezvous, or an empty string."""
        condition = self._condition(rank)
        if condition or not self._groups:
            return condition
        missing_calls, own_calls = self._state(rank).calls, self._state(self.rank).calls
        if missing_calls == own_calls:
            return ""
        return (
            f"Rank {rank} runs, and has begun {counted(missing_calls, 'call')} where rank "
            f"{self.rank} has {own_calls}."
        )

    def _lateness(self, waiter: int, raiser: int) -> str:
        """Return sentences if the rank waited for makes fewer calls, or another one, else ""."""
        waiting, raising = self._state(waiter), self._state(raiser)
        if raising.preparing:
            return (
                f"Rank {raiser} still prepares its call, for example compiles kernels, or is "
                "stopped."
            )
        if raising.calls < waiting.calls:
            return (
                f"Rank {raiser} runs, but has begun {counted(raising.calls, 'call')} and rank "
                f"{waiter} {waiting.calls}."
            )
        if raising.digest != waiting.digest:
            note = self._own_call_note()
            return f"Rank {raiser} runs another call than rank {waiter}. {note}".strip()
        return ""

    def _refusal_of_a_peer(self) -> EngineError | None:
        """Return the error of the next call of this rank, if a peer has refused to make it."""
        group, own = self._group, self.rank
        for rank in range(self.world):
            if rank != own and group.refuses_next(own, rank):
                refusal = refused_in_words(rank, group.refusal(own, rank))
                return EngineError(f"{refusal} Call {self.remedy} to go on.")
        return None

    def _rank_ahead(self) -> int | None:
        """Return a rank that has begun more calls than this one, or None."""
        begun = self._state(self.rank).calls
        for rank in range(self.world):
            if 0 < (self._state(rank).calls - begun) % _CALLS < _CALLS // 2:
                return rank
        return None

    def _overtaken_by_a_peer(self, call: str) -> EngineError | None:
        """Return the error if a peer makes another call than the one for which the ranks meet.

        A peer that makes the same call would meet, too. The peer is notified: its call fails soon.
        """
        rank = self._rank_ahead()
        if rank is None:
            return None
        group = self._group
        group.refuse(self.rank, call)
        deadline = time.monotonic() + _WORDS_WITHIN_S
        while not (words := group.last_refusal(rank)).startswith(f"Rank {rank} runs"):
            if time.monotonic() > deadline:
                words = f"Rank {rank} has begun call number {self._state(rank).calls} of the group."
                break
            time.sleep(_POLL_S)
        return EngineError(
            f"rank {self.rank} runs another call than rank {rank}. {call} {words} {ALIKE}. Call "
            f"{self.remedy} to go on."
        )

    # ---- failure in words

    def _failure_in_words(self, failure: Failure) -> EngineError:
        """Return the group's first failure, worded as on every rank, with notes on the ranks."""
        if failure[4] == "stopped" and self._rendezvous_error:
            return EngineError(self._rendezvous_error)
        refusal = ""
        if failure[4] == "refused":
            refusal = self._group.refusal(failure[2], failure[0])
            if self._begun(failure):  # tell the rank that refused it, which call this is
                self._group.refuse(self.rank, self._own_call_note())
        left = ("died", "closed")  # a reset cannot succeed then
        peers = set(range(self.world)) - {self.rank}
        gone = any(self._state(rank).presence in left for rank in peers)
        return error_of(
            failure, partial(self._step_name, failure), self.remedy, self._timeout_s,
            self._notes(failure), refusal, gone,
        )  # fmt: skip

    def _step_name(self, failure: Failure, rank: int, row: int) -> str:
        """Return the name of a row of a rank's program, if it ran the same call as this rank."""
        call = self._last
        if call is not None and self._state(rank).digest == call.digest:
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
            notes[raiser] = self._lateness(waiter, raiser)
        return " ".join(note for note in notes.values() if note)

    def _begun(self, failure: Failure) -> bool:
        """Return whether this rank has begun the call that another rank has refused."""
        return self._state(self.rank).calls > failure[6]

    def _own_call_note(self) -> str:
        """Return a sentence about this rank's last call, or an empty string."""
        last = self._last
        return "" if last is None else call_in_words(last.problem, last.schedule, self.rank)

    def _conditions_by_rank(self) -> dict[int, str]:
        return {rank: self._condition(rank) for rank in range(self.world)}
