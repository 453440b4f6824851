"""Reduce-scatter: the products of all ranks are added up, and each rank gets its rows of the sum.

Partial sums are rounded to the input's dtype, also the owner's own (if a rank has several pairs of
x and w, after each pair). The owner adds them in float32, in rank order, and rounds again. It does
so in a separate pass, or (sums="within") in the launch that makes the own part. That part is then
the first term of the sum, unrounded except for pairs before the last. With sums="along" the sums
circulate on a ring, where each rank adds its part and rounds: see `ring`.
"""

from __future__ import annotations

from dataclasses import replace

from ficco.lowering.attachments import rows_added
from ficco.lowering.cutting import check_implemented
from ficco.lowering.finishing import await_data, batches, close, reduce
from ficco.lowering.producing import PARTIAL, Products, alone
from ficco.lowering.ring import PUSH, check_ring, circulate
from ficco.lowering.scattering import RECV, Cut, make_and_push
from ficco.operators.problem import Problem
from ficco.plan import Buffer, RankPlan, Signal, operand_buffers
from ficco.plan.schedule import Schedule


def reduction_cut(problem: Problem, schedule: Schedule, rank: int) -> Cut:
    """Return the cut of the sums of all ranks: every rank makes all n columns."""
    widths, blocks = (problem.n,) * problem.world, problem.operator.blocks(problem, rank)
    return Cut(blocks, schedule, widths, (0,) * problem.world, PARTIAL, blocks.own.begin)


def reduction_buffers(problem: Problem, cut: Cut) -> list[Buffer]:
    """Return operands, workspaces and the window of a reduction."""
    n, dtype = problem.n, problem.result_dtype
    return [
        *operand_buffers(problem, cut.rank),
        Buffer(PARTIAL, "workspace", problem.m, n, dtype),
        Buffer(RECV, "window", cut.blocks.window_rows, n, dtype, copies=2),
    ]


def lower_reduce_scatter(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    check_implemented(problem.op, schedule)
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    if schedule.sums == "along":
        return _ring(problem, schedule, rank, products)
    within, rows = schedule.sums == "within", rows_added(problem, rank)
    cut = reduction_cut(problem, schedule, rank)
    if within:
        cut = replace(cut, own="y0", own_row=0, rows_added=rows)
    made = make_and_push(cut, products)
    data: list[Signal] = []
    for batch in batches(cut, per_chunk=False):
        if not within:
            made.steps += [await_data(batch), *reduce(cut, batch, 0, rows)]
        data += batch.signals
    close(cut, made, data)
    return RankPlan(rank, tuple(reduction_buffers(problem, cut)), tuple(made.steps))


def _ring(problem: Problem, schedule: Schedule, rank: int, products: Products) -> RankPlan:
    """Return the plan of one rank whose sums circulate on a ring."""
    check_ring(problem.op, schedule, problem.world)
    cut = reduction_cut(problem, schedule, rank)
    cut = replace(cut, own="y0", own_row=0, rows_added=rows_added(problem, rank))
    made, data = circulate(cut, products)
    close(cut, made, data, reading=[PUSH])
    return RankPlan(rank, tuple(reduction_buffers(problem, cut)), tuple(made.steps))
