"""Blocking: progress on shared hardware queues, and kernels that spin.

Submission rule: when every rank runs its steps strictly one after another, nobody waits for ever.
Spin rule: a kernel may wait inside only for what no kernel still to be started must produce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ficco.plan import Plan, Step, Word
from ficco.verifier.order import Event, Order
from ficco.verifier.violation import Violation
from ficco.verifier.words import WordUses

__all__ = ["check_spins", "check_submission"]


def check_submission(plan: Plan, words: WordUses) -> list[Violation]:
    """Run all ranks' steps in submission order; return where they stand when nothing moves.

    Words are raised once a call, so running whatever can run finds the only outcome there is. Plans
    with a step marked `concurrent` are excused: they are not chosen where queues are shared.
    """
    if any(step.concurrent for entry in plan.ranks for step in entry.steps):
        return []
    raised = {word for word in words if word.name == "free"}
    entered = [0] * plan.problem.world  # collectives that each rank has entered
    at = [0] * plan.problem.world
    moved = True
    while moved:
        moved = False
        for rank, entry in enumerate(plan.ranks):
            while at[rank] < len(entry.steps):
                step = entry.steps[at[rank]]
                if step.kind == "collective":
                    number = sum(s.kind == "collective" for s in entry.steps[: at[rank] + 1])
                    entered[rank] = number
                    if min(entered) < number:
                        break  # whoever enters last passes, and lets the others be looked at again
                if any(word not in raised for word in _awaited(step)):
                    break
                raised.update(_raised(step))
                at[rank] += 1
                moved = True
    return [
        Violation(
            rank, entry.steps[at[rank]].id, "submission",
            "run in submission order, as on a shared hardware queue, it waits for "
            + (
                ", ".join(str(w) for w in _awaited(entry.steps[at[rank]]) if w not in raised)
                or "other ranks to enter the collective"
            )
            + " for ever",
            "submit what raises a signal before what waits for it, on every rank",
        )
        for rank, entry in enumerate(plan.ranks)
        if at[rank] < len(entry.steps)
    ]  # fmt: skip


def _awaited(step: Step) -> Iterator[Word]:
    if step.kind == "wait":
        yield from step.words
    for part in step.parts:
        yield from part.waits


def _raised(step: Step) -> Iterator[Word]:
    if step.kind == "signal":
        yield from step.words
    for part in step.parts:
        yield from part.signals


def check_spins(order: Order) -> list[Violation]:
    """Hold every kernel that waits inside to the spin rule.

    For each word that a part awaits: every `sm` event and every call's start in the causal past of
    its raise happens before the kernel starts. Where steps are marked `concurrent`, no other group
    has kernels on the devices; so what no kernel of its own rank can hold back is excused: see
    `_excused`.
    """
    shares = any(step.concurrent for entry in order.plan.ranks for step in entry.steps)
    spinning = {
        entry.rank: [step for step in entry.steps if any(part.waits for part in step.parts)]
        for entry in order.plan.ranks
    }
    bounds: dict[int, list[Event]] = defaultdict(list)  # per chain: what must come before, by pos
    for event in order.events:
        if shares and event.sm and _excused(order, event, spinning[event.rank]):
            continue
        if event.sm or event in order.starts:
            bounds[event.chain].append(event)
    for found in bounds.values():
        found.sort(key=lambda event: event.pos)
    violations = _crowded(order)
    for entry in order.plan.ranks:
        for step in entry.steps:
            begin = order.first[entry.rank, step.id]
            for number, part in enumerate(step.parts):
                if not part.waits:
                    continue
                event = order.at(entry.rank, step.id, number)
                late = _late(order, begin, order.preds(event), bounds)
                if late:
                    what = f"step {late.name} of" if late.step else "the call's start on"
                    violations.append(
                        Violation(
                            entry.rank, event.name, "spin",
                            f"it may spin for what needs {what} rank {late.rank}, which may not "
                            "have started",
                            "wait for `entered` of every peer, and for what runs on "
                            "multiprocessors, before this kernel starts",
                        )
                    )  # fmt: skip
                    break
    return violations


def _crowded(order: Order) -> list[Violation]:
    """A kernel that both signals and waits has the multiprocessors to itself while it runs."""
    found = []
    for entry in order.plan.ranks:
        for step in entry.steps:
            if not step.concurrent:
                continue
            first, last = order.first[entry.rank, step.id], order.last[entry.rank, step.id]
            for other in entry.steps:
                if other is step or other.unit != "sm":
                    continue
                before = order.hb(order.last[entry.rank, other.id], first)
                if not before and not order.hb(last, order.first[entry.rank, other.id]):
                    found.append(
                        Violation(
                            entry.rank, step.id, "spin",
                            f"it signals and waits, and {other.id!r} may run beside it and keep "
                            "its tiles from starting", "put the two into one lane",
                        )
                    )  # fmt: skip
    return found


def _excused(order: Order, event: Event, spinning: list[Step]) -> bool:
    """Whether nothing that spins on its rank can keep an event from coming.

    It happens before all of it, or it is a part that waits for nothing and stands before all parts
    of its launch that do: the launch takes those first.
    """
    for step in spinning:
        if step is not event.step:
            if not order.hb(event, order.first[event.rank, step.id]):
                return False
            continue
        waiting = [bool(part.waits) for part in step.parts]
        if waiting != sorted(waiting) or (event.part >= 0 and waiting[event.part]):
            return False
    return True


def _late(
    order: Order, begin: Event, raisers: list[Event], bounds: dict[int, list[Event]]
) -> Event | None:
    for raiser in raisers:
        if raiser is begin:
            continue
        for chain, events in bounds.items():
            reach = raiser.pos if raiser.chain == chain else int(raiser.known[chain])
            past = [event for event in events if event.pos <= reach]
            if past and past[-1] is not begin and not order.hb(past[-1], begin):
                return past[-1]
    return None
