"""Calls whose ranks read the products of peers where they were made.

A GEMM stores the whole product in the own window. One kernel does the rest
(`ficco.kernels.pulling`): nothing is stored at peers but signals. Copies are loads of that kernel:
unit "sm". With three ranks:

    moves       make | [free] enter | [entered] copy the rows of all ranks that are for this one
    sums        make | [free] enter | [entered] read these rows of all products, sum them
    one shot    make | [free] enter | [entered] read all products, sum all rows
    two shots   make | [free] enter | [entered] read the products of the own rows, sum chunk 0,
                signal it, ... | [sums 0] read chunk 0 of the owners' sums, ...

Each ends with: clear, free | [free of all peers, of this call]

`entered` comes after the product, so it also says that the product may be read. `free` says that a
rank has read all that it reads. A rank ends its call when all peers have raised it. Then its window
has been read, and its next GEMM may store there without a wait. Chunks are rows of the rank that
sums them, with two shots; else there are none, whatever the grain. Products are rounded to the
dtype before they are added.
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.cutting import check_implemented
from ficco.lowering.one_kernel import check_axes, products_of
from ficco.lowering.one_kernel_steps import plan_of
from ficco.lowering.producing import alone
from ficco.operators.problem import Problem
from ficco.plan import Buffer, RankPlan, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import PullTable, RowsTaken

PRODUCTS = "products"  # window: the products of this rank
SUMS = "sums"  # window: the sums of this rank's rows, with two shots
TERMS = "terms"  # workspace: the peers' products, which the kernel holds in registers


def lower_pulling(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    check_implemented(problem.op, schedule)
    check_axes(schedule, cut="rows", compute="whole")
    products, output = products_of(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    flow, world = problem.flow, problem.world
    if flow.shares and schedule.shots == "one" and output.bias:
        raise ScheduleError(
            "compute='whole' with transport='sm', shots='one' and a bias: a row's bias is that of "
            "the rank that owns it, and other ranks do not have it; what works is shots='two'"
        )
    twice, moves = flow.shares and schedule.shots == "two", flow.finish == "move"
    m, n, dtype = problem.result_shapes(rank)[0][0], problem.n, problem.result_dtype
    heights = problem.rows if flow.splits else (problem.m,) * world
    buffers = [*products.operands(), Buffer("y0", "output", m, n, dtype)]
    buffers.append(Buffer(PRODUCTS, "window", max(heights), n, dtype, copies=2))
    if twice:
        buffers.append(Buffer(SUMS, "window", m, n, dtype, copies=2))
    if not moves:
        terms = (world - 1) * (problem.rows[rank] if twice else m)
        buffers.append(Buffer(TERMS, "workspace", terms, n, dtype))
    places, _ = window_places(tuple(buffers))
    table = PullTable(
        rank=rank, world=world, m=m, n=n, k=products.depth, made=heights[rank],
        dtype=problem.dtype, bias=bool(output.bias), moves=moves,
        taken=() if twice else _taken(problem, rank), twice=twice,
        rows=problem.rows if twice else (), chunks=schedule.chunks if twice else 1,
        products=places[PRODUCTS], sums=places.get(SUMS, 0), outputs=(output,),
    )  # fmt: skip
    return plan_of(table, tuple(buffers))


def _taken(problem: Problem, rank: int) -> tuple[RowsTaken, ...]:
    """Return the rows of each rank's products that a rank reads."""
    sources, found = range(problem.world), []
    if problem.flow.shares:
        return tuple([RowsTaken(source, 0, 0, problem.m) for source in sources])
    incoming = problem.operator.blocks(problem, rank).incoming
    for source in sources:
        block = problem.operator.blocks(problem, source).outgoing[rank]
        top = incoming[source].recv if problem.flow.finish == "move" else 0
        taken = RowsTaken(source, block.begin, top, block.rows)
        found.append(taken if taken.rows else RowsTaken(source, 0, 0, 0))
    return tuple(found)
