"""all_gather_matmul: from x_r [m_r, k] and w_r [k, n_r], concat over s of x_s, . w_r [m, n_r]."""

from __future__ import annotations

from ficco.lowering.blocks import gathered
from ficco.lowering.gathering import lower_gathering
from ficco.plan import RankPlan
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["lower_rank"]


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank: its shard goes to every peer. See `ficco.lowering`."""
    return lower_gathering(problem, schedule, gathered(problem, rank))
