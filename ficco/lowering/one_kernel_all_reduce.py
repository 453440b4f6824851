"""matmul_all_reduce by stores of the kernel that multiplies, for products of few rows.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.one_kernel_all_reduce`), or
all but a product of many rows (`is_made_before`). Chunks are slices of columns, over all rows, in
order. Copies are stores: unit "sm". With three ranks:

    two shots   enter | make 0, store at the owners, make 1, ... | [entered]
                | [products] sum 0, store at all peers, ... | [sums] move 0, ... | clear
    one shot    enter | make 0, store at all peers, make 1, ... | [entered]
                | [products] sum 0, ... | clear

All products, also the own ones, are rounded to the dtype and stored in a mailbox with a slot for
every rank, so that ranks that add up the same products get the same bits. A row uses the bias of
the rank that owns it: with one shot that rank adds its bias to its products of the row.
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.one_kernel import check_axes, products_of, slices
from ficco.lowering.one_kernel_steps import plan_of
from ficco.lowering.producing import PARTIAL, alone
from ficco.lowering.scattering import RECV
from ficco.operators.problem import Problem, offsets
from ficco.plan import Buffer, RankPlan, window_places
from ficco.plan.schedule import MAX_CHUNKS, Schedule
from ficco.plan.tables import OneKernelChunk, OneKernelTable

REDUCED = "reduced"  # mailbox: the peers' sums
_MOST_ROWS = 64  # up to this many rows the kernel multiplies as fast as the GEMM library


def is_made_before(rows: int, twice: bool) -> bool:
    """Return whether on GPUs the GEMM library multiplies `rows` rows before the one launch.

    It makes all products at once, in y, and the launch then sends y chunk by chunk. The plan's data
    and signals stay the same, and so do results but for the order in which products add up. With
    one shot this does not apply: the bias is added to products, which would be rounded twice.
    """
    return twice and rows > _MOST_ROWS


def lower_one_kernel_all_reduce(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    _check(schedule)
    products, output = products_of(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    m, n, dtype, twice = problem.m, problem.n, problem.dtype, schedule.shots == "two"
    slot = max(problem.rows) if twice else m
    buffers = [
        *products.operands(),
        Buffer("y0", "output", m, n, dtype),
        Buffer(RECV, "mailbox", problem.world * slot, n, dtype, copies=2),
    ]
    if twice:
        buffers.append(Buffer(REDUCED, "mailbox", m, n, dtype, copies=2))
        buffers.append(Buffer(PARTIAL, "workspace", m, n, dtype))
    places, _ = window_places(tuple(buffers))
    cut = enumerate(slices(n, schedule.chunks))
    totals = schedule.chunks if twice else 0
    biased = problem.rows[rank] if output.bias and not twice else 0
    table = OneKernelTable(
        rank=rank, world=problem.world, m=m, n=n, k=products.depth, dtype=dtype,
        bias=bool(output.bias), twice=twice, made=False,
        chunks=tuple([OneKernelChunk(*columns, i, (totals + i) * twice) for i, columns in cut]),
        rows=problem.rows if twice else (),
        bias_row=offsets(problem.rows)[rank] if biased else 0, bias_rows=biased,
        recv=places[RECV], kept=places.get(REDUCED, 0), outputs=(output,),
    )  # fmt: skip
    return plan_of(table, tuple(buffers))


def _check(schedule: Schedule) -> None:
    check_axes(schedule)
    most = MAX_CHUNKS // 2 if schedule.shots == "two" else MAX_CHUNKS
    if schedule.chunks > most:
        raise ScheduleError(
            f"grain={schedule.chunks} with transport='sm' and shots={schedule.shots!r}; grain is "
            f"at most {most}: every chunk has a signal"
            f"{' for its products and one for its sums' if schedule.shots == 'two' else ''}"
        )
