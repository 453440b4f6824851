"""matmul_all_reduce whose sums read the products of peers where they were made.

A GEMM stores the whole product in the own window. One kernel does the rest
(`ficco.kernels.pulled_all_reduce`): nothing is stored at peers but signals. Copies are loads of
that kernel: unit "sm". With three ranks:

    one shot    make | [free] enter | [entered] read all products, sum all rows
                | clear, free | [free of all peers, of this call]
    two shots   make | [free] enter | [entered] read the products of the own rows, sum chunk 0,
                signal it, ... | [sums 0] read chunk 0 of the owners' sums, ...
                | clear, free | [free of all peers, of this call]

`entered` comes after the product, so it also says that the product may be read. `free` says that a
rank has read all that it reads. A rank ends its call when all peers have raised it. Then its window
has been read, and its next GEMM may store there without a wait. Chunks are rows of the rank that
sums them; with one shot there are none, whatever the grain. Products are rounded to the dtype
before they are added.
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.one_kernel import check_axes, products_of
from ficco.lowering.one_kernel_steps import plan_of
from ficco.lowering.producing import alone
from ficco.operators.problem import Problem
from ficco.plan import Buffer, RankPlan, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import PullTable

PRODUCTS = "products"  # window: the products of this rank
SUMS = "sums"  # window: the sums of this rank's rows, with two shots
TERMS = "terms"  # workspace: the peers' products, which the kernel holds in registers


def lower_pulled_all_reduce(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    check_axes(schedule, cut="rows", compute="whole")
    products, output = products_of(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    if schedule.shots == "one" and output.bias:
        raise ScheduleError(
            "compute='whole' with transport='sm', shots='one' and a bias: a row's bias is that of "
            "the rank that owns it, and other ranks do not have it; what works is shots='two'"
        )
    m, n, dtype, twice = problem.m, problem.n, problem.dtype, schedule.shots == "two"
    buffers = [*products.operands(), Buffer("y0", "output", m, n, dtype)]
    buffers.append(Buffer(PRODUCTS, "window", m, n, dtype, copies=2))
    if twice:
        buffers.append(Buffer(SUMS, "window", m, n, dtype, copies=2))
    terms = (problem.world - 1) * (problem.rows[rank] if twice else m)
    buffers.append(Buffer(TERMS, "workspace", terms, n, dtype))
    places, _ = window_places(tuple(buffers))
    table = PullTable(
        rank=rank, world=problem.world, m=m, n=n, k=products.depth, dtype=dtype,
        bias=bool(output.bias), twice=twice, rows=problem.rows if twice else (),
        chunks=schedule.chunks if twice else 1, products=places[PRODUCTS],
        sums=places.get(SUMS, 0), outputs=(output,),
    )  # fmt: skip
    return plan_of(table, tuple(buffers))
