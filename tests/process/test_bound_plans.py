"""Which bound plans are kept."""

from __future__ import annotations

from ficco.problem import Problem
from ficco.runtime.bound import BOUND_PLANS, BoundPlans
from ficco.schedule import Schedule

SCHEDULE = Schedule(grain=1)


def problem(k: int) -> Problem:
    return Problem.chunked("all_gather_matmul", 2, 4, 4, k, "float32")


def bound(plans: BoundPlans[int], k: int) -> int:
    return plans.get(problem(k), SCHEDULE, lambda: k)


def test_what_is_used_stays() -> None:
    plans: BoundPlans[int] = BoundPlans()
    for k in range(1, BOUND_PLANS):
        assert bound(plans, k) == k
        assert bound(plans, 1) == 1
    for k in range(BOUND_PLANS, BOUND_PLANS + 9):
        bound(plans, k)
    held = [k for k in range(1, BOUND_PLANS + 9) if plans.holds(problem(k), SCHEDULE)]
    assert held == [1, *range(10, BOUND_PLANS + 9)]
    plans.clear()
    assert not plans.holds(problem(1), SCHEDULE)
