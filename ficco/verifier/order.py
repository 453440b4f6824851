"""Happens-before over all ranks: events, their edges, and vector clocks for "a before b?".

Events of a rank: `before` (the end of its previous call's use of a window copy), `start`, one per
step, and `end`. A collective has two events: entry and exit. A gated step has one event at each end
and one per part. A step or part that raises several signals has two: before the first and after the
last. Edges:

    before -> start -> first step of each lane -> ... -> last step of each lane -> end
    before(q) -> start of every rank, if q has a mailbox: a rank that starts a call on mailboxes has
        ended the previous call, which q had entered
    last event of a step -> first event of the steps that name it in `after`
    before the raise of a signal -> every wait for it;  before(q) -> every wait for free[q], which q
        raised earlier. A wait for free[q] behind its clear, in the same lane and in no part of a
        gated step, is for this call's raise.
    every rank's entry to a collective -> every rank's exit

An event's clock holds, per chain (a lane, a part, a call), the last position in its past.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ficco.plan import Part, Plan, Signal, Step, has_mailbox
from ficco.verifier.form import Violation
from ficco.verifier.signals import Uses, WordUses


class Event:
    """One event of the plan. `work` is the step or part whose accesses happen at the event, if any.

    `sm`: whether a kernel performs it, so that it needs multiprocessors.
    """

    __slots__ = ("chain", "known", "part", "pos", "rank", "sm", "step", "work")

    def __init__(self, rank: int, chain: int, pos: int, step: Step | None, sm: bool) -> None:
        self.rank, self.chain, self.pos = rank, chain, pos
        self.step, self.sm = step, sm
        self.part: int = -1
        self.work: Step | Part | None = None
        self.known: npt.NDArray[np.int32] = _NOTHING

    @property
    def name(self) -> str:
        """The step's id, with the part's number; "-" for a call's start or end."""
        if self.step is None:
            return "-"
        return self.step.id if self.part < 0 else f"{self.step.id}[{self.part}]"


_NOTHING: npt.NDArray[np.int32] = np.empty(0, np.int32)


def kernel_lanes(plan: Plan) -> dict[int, set[str]]:
    """Return, by rank, the lanes that a single kernel runs as a whole, signals included.

    They are the lanes with copies on "sm", which are stores of that kernel. In such a plan, the
    only lane of a rank without stores counts, too.
    """
    storing = {
        entry.rank: {s.lane for s in entry.steps if s.kind == "copy" and s.unit == "sm"}
        for entry in plan.ranks
    }
    if any(storing.values()):
        for entry in plan.ranks:
            lanes = {step.lane for step in entry.steps}
            if len(lanes) == 1:
                storing[entry.rank] = lanes
    return storing


class Order:
    """The happens-before relation of a plan with correct form and signal uses.

    Attributes:
        events: in topological order.
        cycle: violations if steps wait for each other; clocks are then not computed.
        before: per (rank, copy), the end of the previous call's use of that window copy.
        starts, ends: per rank, the start and the end of the call.
        first, last: per (rank, step id), the step's first and last event.
        whole: per rank, the lanes that one kernel runs, see `kernel_lanes`.
    """

    def __init__(self, plan: Plan, signals: WordUses) -> None:
        self.plan = plan
        self.chains = 0
        self.first: dict[tuple[int, str], Event] = {}
        self.last: dict[tuple[int, str], Event] = {}
        self.before: dict[tuple[int, int], Event] = {}
        self.starts: list[Event] = []
        self.ends: list[Event] = []
        self.whole = kernel_lanes(plan)
        self._computing: set[str] = set()
        self._all: list[Event] = []
        self._after: dict[Event, list[Event]] = {}
        self._parts: dict[tuple[int, str], list[Event]] = {}
        self._ends: dict[tuple[int, str], list[Event]] = {}  # of parts
        for entry in plan.ranks:
            self._rank(entry.rank, entry.steps)
        if any(has_mailbox(entry.buffers) for entry in plan.ranks):
            for start in self.starts:
                self._after[start] += [
                    before for (rank, _), before in self.before.items() if rank != start.rank
                ]
        self._collectives()
        for uses in signals.values():
            self._signal(uses)
        self.events = self._sorted()
        self.cycle = self._blocked() if len(self.events) < len(self._all) else []
        if not self.cycle:
            self._clocks()

    def hb(self, a: Event, b: Event) -> bool:
        """Return whether a happens strictly before b."""
        if a.chain == b.chain:
            return a.pos < b.pos
        return bool(b.known[a.chain] >= a.pos)

    def at(self, rank: int, step: str, part: int = -1) -> Event:
        """Return the event at which a step or part waits for, clears or begins to raise signals."""
        return self.first[rank, step] if part < 0 else self._parts[rank, step][part]

    def raised(self, rank: int, step: str, part: int = -1) -> Event:
        """Return the event at which a step or part has raised all its signals."""
        return self.last[rank, step] if part < 0 else self._ends[rank, step][part]

    def is_behind_clear(self, wait: Event, uses: Uses) -> bool:
        """Return whether a wait for a signal comes behind the signal's clear in the same lane."""
        clears = [self.at(*use) for use in uses.clears]
        return any(wait.chain == clear.chain and wait.pos > clear.pos for clear in clears)

    def preds(self, event: Event) -> list[Event]:
        """Return the direct predecessors."""
        return self._after[event]

    def _chain(self) -> int:
        self.chains += 1
        return self.chains - 1

    def _new(self, rank: int, chain: int, pos: int, step: Step | None, after: list[Event]) -> Event:
        event = Event(rank, chain, pos, step, self._is_kernel(step, rank))
        self._all.append(event)
        self._after[event] = after
        return event

    def _is_kernel(self, step: Step | None, rank: int) -> bool:
        """Return whether a step needs multiprocessors on some target.

        A copy step within a rank does, whatever its unit: see `ficco.plan.copy_unit`. Raises and
        clears in a lane that computes may be stores of a kernel on CUDA.
        """
        if step is None:
            return False
        if step.unit == "sm" or step.lane in self.whole[rank]:
            return True
        if step.kind == "copy":
            pairs = zip(step.reads, step.writes, strict=True)
            return any(source.rank == target.rank for source, target in pairs)
        return step.kind in ("raise", "clear") and step.lane in self._computing

    def _rank(self, rank: int, steps: tuple[Step, ...]) -> None:
        self._computing = {s.lane for s in steps if s.kind in ("gemm", "reduce", "bag", "experts")}
        before = []
        for copy in range(2):
            self.before[rank, copy] = self._new(rank, self._chain(), 0, None, [])
            before.append(self.before[rank, copy])
        call = self._chain()
        start = self._new(rank, call, 0, None, before)
        self.starts.append(start)
        tails: dict[str, Event] = {}
        chains: dict[str, int] = {}
        for step in steps:
            tail = tails.get(step.lane, start)
            chain = chains.setdefault(step.lane, self._chain()) if tail is start else tail.chain
            pos = 0 if tail is start else tail.pos + 1
            after = [tail, *(self.last[rank, other] for other in step.after)]
            event = self._new(rank, chain, pos, step, after)
            self.first[rank, step.id] = event
            if step.parts:
                parts, ends = [], []
                for number, part in enumerate(step.parts):
                    piece = self._new(rank, self._chain(), 0, step, [event])
                    piece.part, piece.work = number, part
                    parts.append(piece)
                    ends.append(self._behind(piece, part.raises))
                self._parts[rank, step.id], self._ends[rank, step.id] = parts, ends
                event = self._new(rank, chain, pos + 1, step, [event, *ends])
            elif step.kind == "collective":
                event = self._new(rank, chain, pos + 1, step, [event])
                event.work = step
            else:
                event.work = step
                if step.kind == "raise":
                    event = self._behind(event, step.signals)
            self.last[rank, step.id] = tails[step.lane] = event
        self.ends.append(self._new(rank, call, 1, None, [start, *tails.values()]))

    def _behind(self, event: Event, signals: tuple[Signal, ...]) -> Event:
        """Return the event after the raise of all signals, which begins at `event`."""
        if len(signals) < 2:
            return event
        raised = self._new(event.rank, event.chain, event.pos + 1, event.step, [event])
        raised.part = event.part
        return raised

    def _collectives(self) -> None:
        per_rank = [
            [step for step in entry.steps if step.kind == "collective"] for entry in self.plan.ranks
        ]
        for together in zip(*per_rank, strict=True):
            enters = [self.first[rank, step.id] for rank, step in enumerate(together)]
            for rank, step in enumerate(together):
                self._after[self.last[rank, step.id]] += enters

    def _signal(self, uses: Uses) -> None:
        raised = [self.at(*use) for use in uses.raises]
        for use in uses.waits:
            wait = self.at(*use)
            if uses.signal.name == "free" and not self.is_behind_clear(wait, uses):
                self._after[wait].append(self.before[uses.signal.peer, uses.signal.copy])
            else:
                self._after[wait] += raised

    def _sorted(self) -> list[Event]:
        followers: dict[Event, list[Event]] = {event: [] for event in self._all}
        missing: dict[Event, int] = {}
        for event, after in self._after.items():
            missing[event] = len(after)
            for earlier in after:
                followers[earlier].append(event)
        ready = [event for event in self._all if not missing[event]]
        done = []
        while ready:
            event = ready.pop()
            done.append(event)
            for follower in followers[event]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        return done

    def _blocked(self) -> list[Violation]:
        """Return, per rank, a violation for the first step that can never run."""
        done = set(self.events)
        by_rank: dict[int, Violation] = {}
        for event in self._all:
            if event in done or event.step is None or event.rank in by_rank:
                continue
            waits_for = [e for e in self._after[event] if e not in done]
            names = ", ".join(sorted({f"{e.name} of rank {e.rank}" for e in waits_for}))
            by_rank[event.rank] = Violation(
                event.rank, event.name, "cycle", f"it waits for {names}, which waits for it",
                "raise the signal before waiting for the answer",
            )  # fmt: skip
        return list(by_rank.values())

    def _clocks(self) -> None:
        nothing = np.full(self.chains, -1, np.int32)
        for event in self.events:
            after = self._after[event]
            lane = next((e for e in after if e.chain == event.chain), None)
            others = [e for e in after if e.chain != event.chain]
            known = lane.known if lane else nothing
            if others:
                known = known.copy()
                for other in others:
                    np.maximum(known, other.known, out=known)
                for other in others:
                    known[other.chain] = max(known[other.chain], other.pos)
            event.known = known

    def works(self) -> Iterator[Event]:
        """Yield the events that read or write, in topological order."""
        return (event for event in self.events if event.work is not None)
