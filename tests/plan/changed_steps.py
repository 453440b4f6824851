"""Plans with one step of a rank that is changed, missing or elsewhere."""

from __future__ import annotations

import random

from edits import dropped, mended, steps_of, with_steps

from ficco.plan import Plan

__all__ = ["changed", "find", "forget_entry", "moved", "without"]


def find(plan: Plan, rank: int, name: str) -> int:
    return next(i for i, step in enumerate(plan.ranks[rank].steps) if step.id == name)


def changed(plan: Plan, rank: int, name: str, **fields: object) -> Plan:
    steps = steps_of(plan, rank)
    at = find(plan, rank, name)
    steps[at] = steps[at]._replace(**fields)
    return with_steps(plan, rank, steps)


def without(plan: Plan, rank: int, name: str) -> Plan:
    steps = dropped(steps_of(plan, rank), find(plan, rank, name))
    return with_steps(plan, rank, steps)


def moved(plan: Plan, rank: int, name: str, to: int) -> Plan:
    steps = steps_of(plan, rank)
    step = steps.pop(find(plan, rank, name))
    steps.insert(to, step)
    return with_steps(plan, rank, mended(steps))


def forget_entry(plan: Plan, rng: random.Random) -> Plan | None:
    """Leave one peer's `entered` out of a wait, or let a part of a gated step wait for it."""
    waits = [
        (rank, index, signal)
        for rank, entry in enumerate(plan.ranks)
        for index, step in enumerate(entry.steps)
        for signal in step.signals
        if step.kind == "wait" and signal.name == "entered"
    ]
    if not waits:
        return None
    rank, index, gone = rng.choice(waits)
    steps = steps_of(plan, rank)
    gated = next((i for i in range(index, len(steps)) if steps[i].parts), None)
    if gated is not None and rng.random() < 0.5:
        first, *others = steps[gated].parts
        parts = (first._replace(waits=(*first.waits, gone)), *others)
        steps[gated] = steps[gated]._replace(parts=parts)
    rest = tuple([signal for signal in steps[index].signals if signal != gone])
    if not rest:
        return with_steps(plan, rank, dropped(steps, index))
    steps[index] = steps[index]._replace(signals=rest)
    return with_steps(plan, rank, steps)
