"""matmul_all_to_all: x_r in blocks, one for each rank; rank r gets concat over s of block r . w_s.

An expert's last GEMM and the combine of a mixture of experts. Results arrive in a window and are
moved into the output by local copies, which are part of the operator.
"""

from __future__ import annotations

from ficco.errors import ScheduleError
from ficco.lowering.blocks import exchanged
from ficco.lowering.cutting import check_implemented
from ficco.lowering.finishing import batches, close, move
from ficco.lowering.producing import PARTIAL, Products
from ficco.lowering.scattering import RECV, Cut, make_and_push
from ficco.lowering.single import alone
from ficco.plan import Buffer, RankPlan
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["lower_rank"]


def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    check_implemented(problem.op, schedule)
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    if problem.outputs[0].bias:
        raise ScheduleError(
            "matmul_all_to_all has no bias: rows come from other ranks' weights; add it afterwards"
        )
    n, blocks = problem.n, exchanged(problem, rank)
    widths, lefts = (n,) * problem.world, (0,) * problem.world
    cut = Cut(blocks, schedule, widths, lefts, "y0", own_row=blocks.own.recv)
    made = make_and_push(cut, products)
    found = batches(cut, per_chunk=True)
    made.steps += move(cut, found, problem.itemsize)
    close(cut, made, [signal for batch in found for signal in batch.signals])
    buffers = [
        *products.operands(),
        Buffer("y0", "output", blocks.arriving, n, problem.dtype),
        Buffer(PARTIAL, "workspace", problem.rows[rank], n, problem.dtype),
        Buffer(RECV, "window", blocks.window_rows, n, problem.dtype, copies=2),
    ]
    return RankPlan(rank, tuple(buffers), tuple(made.steps))
