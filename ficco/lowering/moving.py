"""Operators whose results arrive in a window and are copied unchanged into the output.

The results are blocks of products (the combine of a mixture of experts), or pooled bags of all
ranks' tables, side by side. The copies out of the window are part of the operator.
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.cutting import check_implemented
from ficco.lowering.finishing import batches, close, move
from ficco.lowering.producing import PARTIAL, Bags, Products, alone
from ficco.lowering.scattering import RECV, Cut, make_and_push
from ficco.operators.problem import Problem, offsets
from ficco.plan import Buffer, RankPlan, operand_buffers
from ficco.plan.schedule import Schedule


def lower_moving(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    check_implemented(problem.op, schedule)
    if problem.flow.pools:
        return _lower_bags(problem, schedule, rank)
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    blocks = problem.operator.blocks(problem, rank)
    widths, lefts = (problem.n,) * problem.world, (0,) * problem.world
    cut = Cut(blocks, schedule, widths, lefts, "y0", own_row=blocks.own.recv)
    return _lower(problem, cut, products)


def _lower_bags(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of a rank that pools its tables; each rank makes its own columns."""
    if schedule.cut == "columns":
        raise ScheduleError(
            f"{problem.op}: bags are cut along the batch; the nearest that works is cut='rows'"
        )
    widths = tuple(problem.n * len(tables) for tables in problem.tables)
    lefts = offsets(widths)
    bags = Bags(problem, rank, problem.lookups[rank])
    if problem.world == 1:
        return alone(problem, bags)
    blocks = problem.operator.blocks(problem, rank)
    cut = Cut(blocks, schedule, widths, lefts[:-1], "y0", own_col=lefts[rank])
    return _lower(problem, cut, bags)


def _lower(problem: Problem, cut: Cut, producer: Products | Bags) -> RankPlan:
    """Return the plan of a rank that makes and pushes its pieces, and moves arrivals to y0."""
    rank, dtype = cut.rank, problem.result_dtype
    (_, columns), *_ = problem.result_shapes(rank)
    made = make_and_push(cut, producer)
    arrivals = batches(cut, per_chunk=True)
    made.steps += move(cut, arrivals, problem.result_itemsize)
    close(cut, made, [signal for batch in arrivals for signal in batch.signals])
    height = sum(block.rows for block in cut.blocks.outgoing)
    buffers = [
        *operand_buffers(problem, rank),
        Buffer(PARTIAL, "workspace", height, cut.widths[rank], dtype),
        Buffer(RECV, "window", cut.blocks.window_rows, columns, dtype, copies=2),
    ]
    return RankPlan(rank, tuple(buffers), tuple(made.steps))
