"""Which bound plans are kept."""

from __future__ import annotations

from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.runtime.bound import BOUND_PROGRAMS, BoundPrograms

SCHEDULE = Schedule(grain=1)


def problem(k: int) -> Problem:
    return Problem.chunked("all_gather_matmul", 2, 4, 4, k, "float32")


def bound(plans: BoundPrograms[int], k: int) -> int:
    return plans.get(problem(k), SCHEDULE, lambda: k)


def test_what_is_used_stays() -> None:
    plans: BoundPrograms[int] = BoundPrograms()
    for k in range(1, BOUND_PROGRAMS):
        assert bound(plans, k) == k
        assert bound(plans, 1) == 1
    for k in range(BOUND_PROGRAMS, BOUND_PROGRAMS + 9):
        bound(plans, k)
    held = [k for k in range(1, BOUND_PROGRAMS + 9) if plans.holds(problem(k), SCHEDULE)]
    assert held == [1, *range(10, BOUND_PROGRAMS + 9)]
    plans.clear()
    assert not plans.holds(problem(1), SCHEDULE)
