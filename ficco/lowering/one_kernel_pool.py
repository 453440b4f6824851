"""Pooling and all-to-all by one launch, whose programs store sums of bags in peers' windows.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.one_kernel_pool`). The bags
of each peer are cut into chunks. The first chunks of all peers are pooled and stored first, and the
own bags last. Arrivals are copied out of the window at the end. With three ranks:

    [free] enter | pool and store chunk 0 of all peers, chunk 1, ... | pool own bags | [entered]
    [chunk 0] copy, [chunk 1] copy, ... | clear, free
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.cutting import check_implemented
from ficco.lowering.one_kernel import check_axes
from ficco.lowering.one_kernel_steps import plan_of
from ficco.lowering.producing import PARTIAL, Bags, alone
from ficco.operators.problem import Problem, offsets
from ficco.plan import Buffer, RankPlan, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import MOST_TABLES, BagsReceived, BagsSent, PoolTable, peers_of

POOLED = "pooled"  # window: what peers pooled for this rank


def lower_one_kernel_pool(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    bags, world = Bags(problem, rank, problem.lookups[rank]), problem.world
    if world == 1:
        return alone(problem, bags)
    rows, dtype, dim = problem.rows, problem.dtype, problem.n
    widths = [dim * len(tables) for tables in problem.tables]
    lefts, first, peers = offsets(widths), offsets(rows), peers_of(rank, world)
    buffers = (
        *bags.operands(),
        Buffer("y0", "output", rows[rank], lefts[-1], dtype),
        Buffer(PARTIAL, "workspace", problem.m, widths[rank], dtype),
        Buffer(POOLED, "window", max(rows), lefts[-1], dtype, copies=2),
    )
    table = PoolTable(
        rank=rank, world=world, dtype=dtype, modes=bags.modes, dim=dim, left=lefts[rank],
        bag=first[rank], rows=rows[rank],
        sent=tuple([BagsSent(p, first[p], rows[p]) for p in peers if widths[rank] and rows[p]]),
        received=tuple([BagsReceived(p, lefts[p], widths[p]) for p in peers if widths[p]]),
        chunks=schedule.chunks, recv=window_places(buffers)[0][POOLED],
    )  # fmt: skip
    return plan_of(table, buffers)


def _check(problem: Problem, schedule: Schedule) -> None:
    """Reject what the kernel does not implement; the message names the nearest that works."""
    check_implemented(problem.op, schedule)
    check_axes(schedule, cut="rows", start="local_first")
    most = max(map(len, problem.tables))
    if most > MOST_TABLES:
        raise ScheduleError(
            f"transport='sm' with {most} tables on a rank is not implemented: one launch pools at "
            f"most {MOST_TABLES}; the nearest that works is transport='dma'"
        )
