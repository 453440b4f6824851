"""all_gather_matmul: from x_r [m_r, k] and w_r [k, n_r], concat over s of x_s, . w_r [m, n_r].

With transport="sm" the kernel that multiplies stores at the peers itself: see `direct_gather`.
"""

from __future__ import annotations

from ficco.lowering.blocks import gathered
from ficco.lowering.gathering import lower_gathering
from ficco.lowering.one_kernel_gather import lower_one_kernel_gather
from ficco.plan import RankPlan
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["lower_rank"]


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank: its shard goes to every peer. See `ficco.lowering`."""
    blocks = gathered(problem, rank)
    if schedule.transport == "sm":
        return lower_one_kernel_gather(problem, schedule, blocks)
    return lower_gathering(problem, schedule, blocks)
