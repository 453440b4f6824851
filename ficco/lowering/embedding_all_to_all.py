"""embedding_all_to_all: rank r pools its tables for the whole batch, gets its slice of all tables.

y_r [b_r, all tables of all ranks side by side]. Pooled bags arrive in a window and are moved into
the output by local copies, which are part of the operator.
"""

from __future__ import annotations

from ficco.errors import ScheduleError
from ficco.lowering.blocks import Blocks, Incoming, Outgoing
from ficco.lowering.cutting import check_implemented
from ficco.lowering.finishing import batches, close, move
from ficco.lowering.producing import PARTIAL, Bags, Piece
from ficco.lowering.scattering import RECV, Cut, make_and_push
from ficco.plan import Buffer, RankPlan, Region
from ficco.problem import Problem, offsets
from ficco.schedule import Schedule

__all__ = ["lower_rank"]


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    check_implemented(problem.op, schedule)
    if schedule.cut == "columns":
        raise ScheduleError(
            "embedding_all_to_all: bags are cut by the batch; the nearest that works is cut='rows'"
        )
    world, dim, dtype = problem.world, problem.n, problem.dtype
    widths = tuple(dim * len(tables) for tables in problem.tables)
    lefts = offsets(widths)
    bags = Bags(problem, rank, problem.lookups[rank])
    rows, total = problem.rows[rank], lefts[-1]
    output = Buffer("y0", "output", rows, total, dtype)
    if world == 1:
        piece = Piece(0, rows, 0, total, Region(0, "y0", 0, rows, 0, total))
        steps = bags.steps("all", [piece])
        return RankPlan(rank, (*bags.operands(), output), tuple(steps))
    first = offsets(problem.rows)
    blocks = Blocks(
        rank,
        tuple(Outgoing(first[d], problem.rows[d], 0) for d in range(world)),
        tuple(Incoming(0, rows) for _ in range(world)),
        max(problem.rows),
    )
    cut = Cut(blocks, schedule, widths, lefts[:-1], "y0", own_col=lefts[rank])
    made = make_and_push(cut, bags)
    found = batches(cut, per_chunk=True)
    made.steps += move(cut, found, problem.itemsize)
    close(cut, made, [signal for batch in found for signal in batch.signals])
    buffers = [
        *bags.operands(),
        output,
        Buffer(PARTIAL, "workspace", problem.m, widths[rank], dtype),
        Buffer(RECV, "window", blocks.window_rows, total, dtype, copies=2),
    ]
    return RankPlan(rank, tuple(buffers), tuple(made.steps))
