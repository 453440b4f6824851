"""Plans with one change, which a kernel that runs a whole plan must refuse."""

from __future__ import annotations

from collections.abc import Iterator

from ficco.plan import RankPlan

__all__ = ["changed_plans"]


def changed_plans(plan: RankPlan) -> Iterator[RankPlan]:
    """Yield the plan without one of its steps, and with two neighbouring steps exchanged."""
    for at in range(len(plan.steps)):
        pair = plan.steps[at : at + 2]
        swapped = (*plan.steps[:at], *pair[::-1], *plan.steps[at + 2 :])
        for steps in (plan.steps[:at] + plan.steps[at + 1 :], swapped):
            if steps != plan.steps:
                yield plan._replace(steps=steps)
