"""Plans with one step of a rank that is changed, missing or elsewhere."""

from __future__ import annotations

from edits import dropped, mended, steps_of, with_steps

from ficco.plan import Plan

__all__ = ["changed", "find", "moved", "without"]


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
