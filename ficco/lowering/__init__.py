"""Lowering: Problem + Schedule -> Plan. The operator's flow selects the module.

At run time a rank lowers only its own plan (`lower_rank`). `lower` makes all plans, for proofs.
"""

from __future__ import annotations

from ficco.lowering.all_reduce import lower_all_reduce
from ficco.lowering.collective import lower_collective
from ficco.lowering.gathering import lower_gathering
from ficco.lowering.moving import lower_moving
from ficco.lowering.one_kernel_gather import lower_one_kernel_gather
from ficco.lowering.one_kernel_pool import lower_one_kernel_pool
from ficco.lowering.reduce_scatter import lower_reduce_scatter
from ficco.plan import Plan, RankPlan, digest_of
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["lower", "lower_rank"]

_BY_FINISH = {
    "multiply": lower_gathering,
    "sum": lower_reduce_scatter,
    "share": lower_all_reduce,
    "move": lower_moving,
}


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank.

    Args:
        problem: the problem. Of per-rank columns, only the entries of `rank` are read.
        schedule: a resolved schedule (`Schedule.resolve`).
        rank: 0 to world-1.

    Raises:
        ScheduleError: no lowering implements this schedule for this operator. The message names
            the nearest schedule that works.
    """
    if schedule.transport == "collective":
        return lower_collective(problem, schedule, rank)
    if schedule.transport == "sm" and problem.flow.one_kernel == "gather":
        return lower_one_kernel_gather(problem, schedule, rank)
    if schedule.transport == "sm" and problem.flow.one_kernel == "pool":
        return lower_one_kernel_pool(problem, schedule, rank)
    return _BY_FINISH[problem.flow.finish](problem, schedule, rank)


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """Return the plans of all ranks. Raises the same errors as `lower_rank`."""
    ranks = tuple(lower_rank(problem, schedule, rank) for rank in range(problem.world))
    return Plan(problem, schedule, digest_of(problem, schedule), ranks)
