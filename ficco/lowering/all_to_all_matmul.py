"""all_to_all_matmul: x_r in blocks, one for each rank; rank r gets concat over s of block r, . w_r.

The dispatch of a mixture of experts, and the expert's first GEMM.
"""

from __future__ import annotations

from ficco.lowering.blocks import exchanged
from ficco.lowering.gathering import lower_gathering
from ficco.plan import RankPlan
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["lower_rank"]


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank: each block goes to its peer. See `ficco.lowering`."""
    return lower_gathering(problem, schedule, exchanged(problem, rank))
