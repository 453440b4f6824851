"""Lowering: Problem + Schedule -> Plan. One operator a module, chosen here by name.

A rank lowers only its own plan at run time (`lower_rank`); `lower` makes all of them, for proofs.
"""

from __future__ import annotations

from ficco.lowering import (
    all_gather_matmul,
    all_to_all_matmul,
    embedding_all_to_all,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from ficco.plan import Plan, RankPlan, digest_of
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["lower", "lower_rank"]

_LOWERINGS = {
    "all_gather_matmul": all_gather_matmul.lower_rank,
    "matmul_reduce_scatter": matmul_reduce_scatter.lower_rank,
    "matmul_all_reduce": matmul_all_reduce.lower_rank,
    "all_to_all_matmul": all_to_all_matmul.lower_rank,
    "matmul_all_to_all": matmul_all_to_all.lower_rank,
    "embedding_all_to_all": embedding_all_to_all.lower_rank,
}


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank.

    Args:
        problem: what is asked; rank r's entries of per-rank columns are read, no others'.
        schedule: resolved (`Schedule.resolve`).
        rank: 0 to world-1.

    Raises:
        ScheduleError: nothing implements this schedule for this operator; the message names the
            nearest that works.
    """
    return _LOWERINGS[problem.op](problem, schedule, rank)


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """Return the plans of all ranks. Raises as `lower_rank`."""
    ranks = tuple(lower_rank(problem, schedule, rank) for rank in range(problem.world))
    return Plan(problem, schedule, digest_of(problem, schedule), ranks)
