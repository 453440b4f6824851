"""A gather and its products by stores of the kernel that multiplies, for few rows.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.one_kernel_gather`). Each
chunk, a slice of the own shard's columns, is stored at all peers. After all arrivals each weight is
multiplied once by all rows; own rows are read from the user's x. If the gathered x is an output, it
is copied out of the window at the end. With three ranks:

    [free] enter | store slice 0 at all peers, store slice 1, ... | [entered] [all slices]
    x . w of every output | keep x | clear, free
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.cutting import check_implemented
from ficco.lowering.multiplying import WINDOW, Multiplied
from ficco.lowering.one_kernel import check_axes, slices
from ficco.lowering.one_kernel_steps import plan_of
from ficco.operators.problem import Problem
from ficco.plan import RankPlan, window_places
from ficco.plan.schedule import Schedule
from ficco.plan.tables import GatherTable, OutputNames

MOST_OUTPUTS = 4  # per launch; each output has its own weight and result


def is_one_kernel(problem: Problem) -> bool:
    """Return whether one launch can make all outputs: few, along rows, the gathered x once."""
    return not _reason(problem)


def lower_one_kernel_gather(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    blocks, world, rows = problem.operator.blocks(problem, rank), problem.world, problem.rows
    products = Multiplied(problem, blocks)
    buffers, cut = products.buffers(window=world > 1), slices(problem.k, schedule.chunks)
    outputs = [
        OutputNames(
            f"y{i}", output.operand, f"bias{i}" if output.bias else "", output.columns[rank],
            output.operand_transposed,
        )
        for i in products.first
        for output in [problem.outputs[i]]
        if output.columns[rank]
    ]  # fmt: skip
    table = GatherTable(
        rank=rank, world=world, m=problem.m, k=problem.k, dtype=problem.dtype,
        own_row=blocks.own.recv if rows[rank] else 0, own_rows=rows[rank],
        width=cut[0][1] if rows[rank] else 0, slices=len(cut),
        sources=tuple([source for source in range(world) if rows[source] and source != rank]),
        gathered=window_places(buffers)[0].get(WINDOW, 0), outputs=tuple(outputs),
        kept=f"y{products.kept[0]}" if products.kept else "",
    )  # fmt: skip
    return plan_of(table, buffers)


def _check(problem: Problem, schedule: Schedule) -> None:
    """Reject what the kernel does not implement; the message names the nearest that works."""
    check_implemented(problem.op, schedule)
    check_axes(schedule)
    if reason := _reason(problem):
        raise ScheduleError(
            f"transport='sm' with {reason} is not implemented: one launch makes at most "
            f"{MOST_OUTPUTS} products along rows, and the gathered x once; the nearest that works "
            "is transport='dma'"
        )


def _reason(problem: Problem) -> str:
    """Return the part of a problem that one launch cannot do, or an empty string."""
    axes = [output.axis for output in problem.outputs]
    if "contraction" in axes:
        return "an output along the contraction"
    if axes.count("rows") > MOST_OUTPUTS:
        return f"{axes.count('rows')} products"
    return "several outputs that are the gathered x" if axes.count("gathered") > 1 else ""
