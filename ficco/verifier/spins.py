"""Kernels that spin: a kernel that waits while it runs must not hold back what it waits for.

Terms.

    kernel   work that needs multiprocessors to start: a step on unit "sm", a copy within a rank,
             and a raise or a clear in a lane that computes, which CUDA may store by a kernel. If
             copies to peers are stores of a kernel, one kernel runs its whole lane.
    spins    a kernel spins if it waits while it runs: a gated step with a part that waits for
             signals, a collective on unit "sm" (it waits for its peers' kernels), a whole lane that
             is one kernel.

The model of a device.

    1. A kernel consists of programs. A program holds its place on a multiprocessor until it ends.
       A kernel has begun when its first program runs. Other running kernels may delay the begin of
       a kernel, and the remaining programs of a kernel that has begun.
    2. A kernel that does not spin ends in bounded time once it has begun. A free place is given to
       a kernel that is ready to begin.
    3. The programs of a gated step take its parts in order: when a program takes a part, all
       earlier parts have been taken. The rule relies on this only for a step with both waiting and
       non-waiting parts whose non-waiting parts signal; engines have no kernel for this yet.
    4. Everything else needs no multiprocessor: copies to peers by copy engines, waits and signals
       of a stream. It happens when all its predecessors have happened.

The rule. Let X be a kernel that spins for a signal. Every event of a kernel (its begin, its end, a
part) in the causal past of the raise of that signal

    (a) happens before X begins, or
    (b) cannot be held back by a kernel that spins: every such kernel on the event's rank ends
        before the event, begins after it, or runs the event itself. The last case applies to the
        begin of the kernel, to a part without waits of a gated step whose non-waiting parts all
        come first, and to any step of a lane that is one kernel.

(b) is valid only if no other group has kernels on the devices: in a plan with a step marked
`concurrent`, and for a collective or a whole lane, which depend on it. For other kernels, the start
of every call in that past must also happen before X begins.

Why the rule suffices. Suppose that an execution is stuck. Take the earliest call that has not
ended, and an event e of it that has not happened although all events before it have. By 4, e is an
event of a kernel, and by 2 only a kernel that spins holds it back: a kernel X that has begun on the
rank of e and waits for a signal that is not raised. Let f be the first event in the past of that
raise, including the raise, that has not happened. All events before f have happened, so f is also
an event of a kernel that a spinning kernel holds back. X has begun and f has not happened, so (a)
does not hold for f. By (b) a kernel that spins on the rank of f has ended, or has not begun, or
runs f itself and no longer waits for anything before f (for a part, by 3). None of them holds f
back. This is a contradiction.

Consequences for a kernel S that signals and waits, and another kernel T that may run at the same
time.

    T does not spin (a local copy, a GEMM, a sum): T is allowed. Once begun, T ends by itself, so it
        only delays S. Before it has begun, it holds nothing.
    T spins: T could hold all places before S begins. If a kernel spins for results of S, the begin
        of S is in the past of that signal, and T neither begins after it nor runs it. The plan is
        refused. If only streams wait for S, the rule still applies to the signals of S and of T, so
        both end.
    T is in the past of a signal that a kernel spins for: then T must not be held back. A local copy
        that is followed by a signal to a peer, or by a push, must end before kernels that spin
        begin on its rank, or before the kernel that spins for the signal begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import NamedTuple

from ficco.plan import RankPlan, Step
from ficco.verifier.form import Violation
from ficco.verifier.order import Event, Order

_Bounds = dict[int, list[Event]]  # per chain: events that must come before, by position


class _Spinner(NamedTuple):
    """A kernel that waits while it runs.

    Attributes:
        begin, end: its first and last event.
        waits: per wait, the event that waits, and the events that it waits for. A whole lane also
            waits for steps of other lanes that its steps name in `after`.
        meets: whether it always waits for its peers' kernels: a collective or a whole lane.
        frees: by id of the steps that it runs, the number of non-waiting parts if they all come
            before the waiting parts; else -1.
    """

    begin: Event
    end: Event
    waits: tuple[tuple[Event, tuple[Event, ...]], ...]
    meets: bool
    frees: dict[str, int]


def check_spins(order: Order) -> list[Violation]:
    """Return the kernels that spin against the rule above."""
    spinners = {entry.rank: _spinners(order, entry) for entry in order.plan.ranks}
    if not any(spinners.values()):
        return []
    alone = any(step.concurrent for entry in order.plan.ranks for step in entry.steps)
    strict, excused = _bounds(order, {}), _bounds(order, spinners)
    rendezvous = {
        chain: [event for event in events if event.sm] for chain, events in excused.items()
    }
    violations = []
    for rank, of_rank in spinners.items():
        for spinner in of_rank:
            bounds = rendezvous if spinner.meets else excused if alone else strict
            for event, raisers in spinner.waits:
                late = _late(order, spinner.begin, raisers, bounds)
                if late:
                    what = f"step {late.name} of" if late.step else "the call's start on"
                    violations.append(
                        Violation(
                            rank, event.name, "spin",
                            f"it may spin for a signal that needs {what} rank {late.rank}, which "
                            "may not have started",
                            "before this kernel starts, wait for `entered` of every peer, and for "
                            "steps that run on multiprocessors",
                        )
                    )  # fmt: skip
                    break
    return violations


def _spinners(order: Order, entry: RankPlan) -> list[_Spinner]:
    """Return the kernels of a rank that spin."""
    rank = entry.rank
    spinners = []
    for step in entry.steps:
        begin, end = order.first[rank, step.id], order.last[rank, step.id]
        waiting = [order.at(rank, step.id, i) for i, part in enumerate(step.parts) if part.waits]
        if step.kind == "collective" and step.unit == "sm":
            waiting = [end]
        if waiting:
            waits = tuple([(event, _others(order, event, begin)) for event in waiting])
            meets = step.kind == "collective"
            spinners.append(_Spinner(begin, end, waits, meets, {step.id: _frees(step)}))
    lanes: dict[str, list[Step]] = {}
    for step in entry.steps:
        if step.lane in order.whole[rank]:
            lanes.setdefault(step.lane, []).append(step)
    for steps in lanes.values():
        begin, end = order.first[rank, steps[0].id], order.last[rank, steps[-1].id]
        later = [order.first[rank, step.id] for step in steps[1:]]
        pairs = [(event, _others(order, event, begin)) for event in later]
        if waits := tuple([(event, raisers) for event, raisers in pairs if raisers]):
            frees = {step.id: _frees(step) for step in steps}
            spinners.append(_Spinner(begin, end, waits, True, frees))
    return spinners


def _frees(step: Step) -> int:
    """Return the number of non-waiting parts of a step; -1 if they do not all come first."""
    waiting = [bool(part.waits) for part in step.parts]
    return waiting.count(False) if waiting == sorted(waiting) else -1


def _others(order: Order, event: Event, begin: Event) -> tuple[Event, ...]:
    """Return the events of other lanes that an event waits for while its kernel runs."""
    return tuple([e for e in order.preds(event) if e is not begin and e.chain != event.chain])


def _bounds(order: Order, spinners: dict[int, list[_Spinner]]) -> _Bounds:
    """Return the events that must happen before a kernel that spins for a later signal begins.

    They are call starts, and events of kernels that one of `spinners` may hold back; without
    `spinners`, all events of kernels.
    """
    bounds: _Bounds = defaultdict(list)
    starts = set(order.starts)
    for event in order.events:
        held = event.sm and not (spinners and _is_free(order, event, spinners[event.rank]))
        if held or event in starts:
            bounds[event.chain].append(event)
    for events in bounds.values():
        events.sort(key=lambda event: event.pos)
    return bounds


def _is_free(order: Order, event: Event, spinners: list[_Spinner]) -> bool:
    """Return whether no kernel that spins on its rank can hold back an event: (b) above."""
    step = event.step
    for spinner in spinners:
        if step is None or step.id not in spinner.frees:
            if not (order.hb(event, spinner.begin) or order.hb(spinner.end, event)):
                return False
            continue
        if event.part >= spinner.frees[step.id]:
            return False
    return True


def _late(order: Order, begin: Event, raisers: tuple[Event, ...], bounds: _Bounds) -> Event | None:
    """Return an event that must happen before a kernel begins but may not, or None."""
    for raiser in raisers:
        for chain, events in bounds.items():
            reach = raiser.pos if raiser.chain == chain else int(raiser.known[chain])
            past = bisect_right(events, reach, key=_position)
            if past and events[past - 1] is not begin and not order.hb(events[past - 1], begin):
                return events[past - 1]
    return None


def _position(event: Event) -> int:
    return event.pos
