"""Lowering: Problem + Schedule -> Plan. The operator's flow selects the module.

At run time a rank lowers only its own plan (`lower_rank`). `lower` makes all plans, for proofs.
"""

from __future__ import annotations

from ficco.core import data
from ficco.core.errors import ScheduleError
from ficco.core.machine import Machine
from ficco.lowering.all_reduce import lower_all_reduce
from ficco.lowering.attachments import check_attachments
from ficco.lowering.collective import lower_collective
from ficco.lowering.experts import lower_experts
from ficco.lowering.gathering import lower_gathering
from ficco.lowering.moving import lower_moving
from ficco.lowering.one_kernel_gather import lower_one_kernel_gather
from ficco.lowering.one_kernel_pool import lower_one_kernel_pool
from ficco.lowering.pulling import lower_pulling
from ficco.lowering.reduce_scatter import lower_reduce_scatter
from ficco.lowering.sending import lower_sending, sends
from ficco.operators.problem import Problem
from ficco.plan import Plan, RankPlan, digest_of
from ficco.plan.schedule import Schedule

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
            the nearest schedule that works; if the schedule is one of another operator, all that
            work.
    """
    try:
        return _lowered(problem, schedule, rank)
    except ScheduleError as refusal:
        if schedule.name not in set(data.names("named")) - set(Schedule.names(problem.op)):
            raise
        works = ", ".join(name for name in Schedule.names(problem.op) if _works(problem, name))
        raise ScheduleError(f"{refusal}. {problem.op} has the schedules {works}") from None


def _works(problem: Problem, name: str) -> bool:
    """Return whether a schedule of ficco's can be lowered for a problem."""
    try:
        resolved = Schedule.named(name).resolve(problem.world, Machine.named("host"))
        _lowered(problem, resolved, 0)
    except ScheduleError:
        return False
    return True


def _lowered(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    check_attachments(problem, schedule)
    if schedule.transport == "collective":
        return lower_collective(problem, schedule, rank)
    if problem.flow.routes:
        return lower_experts(problem, schedule, rank)
    if sends(schedule, problem.flow):
        return lower_sending(problem, schedule, rank)
    if schedule.moves:
        return lower_pulling(problem, schedule, rank)
    if schedule.transport == "sm" and problem.flow.one_kernel == "gather":
        return lower_one_kernel_gather(problem, schedule, rank)
    if schedule.transport == "sm" and problem.flow.one_kernel == "pool":
        return lower_one_kernel_pool(problem, schedule, rank)
    return _BY_FINISH[problem.flow.finish](problem, schedule, rank)


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """Return the plans of all ranks. Raises the same errors as `lower_rank`."""
    ranks = tuple(lower_rank(problem, schedule, rank) for rank in range(problem.world))
    return Plan(problem, schedule, digest_of(problem, schedule), ranks)
