"""Whole transfers by collectives of a library, and whole GEMMs: nothing overlaps.

All steps are in one lane. A collective moves or adds up the data of all ranks; a library such as
NCCL runs it. Sums are rounded as the library rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.errors import ScheduleError
from ficco.lowering.attachments import row_regions, rows_added
from ficco.lowering.experts import gather_experts, lower_alone, sum_experts
from ficco.lowering.multiplying import Group, Multiplied
from ficco.lowering.multiplying import Piece as Gathered
from ficco.lowering.producing import COMPUTE, PARTIAL, Bags, Piece, Products, alone
from ficco.operators.problem import Problem, offsets
from ficco.plan import Buffer, RankPlan, Region, Step, operand_buffers
from ficco.plan.schedule import Schedule

_GATHERED = "gathered"
_POOLED = "pooled"
_FROM = "from"  # followed by a rank: the bags that it pooled for this rank


def lower_collective(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    if problem.flow.gathers:
        return _gather(problem, rank)
    if problem.flow.routes:
        return _combine(problem, rank)
    if problem.flow.pools:
        return _pool(problem, rank)
    return _scatter(problem, rank)


def _check(problem: Problem, schedule: Schedule) -> None:
    for axis, value in {"compute": "whole", "sums": "apart", "shots": "two"}.items():
        found = getattr(schedule, axis)
        if found != value:
            raise ScheduleError(
                f"transport='collective' with {axis}={found!r}: a collective moves everything at "
                f"once; the nearest that works is {axis}={value!r}, or transport='dma'"
            )


def _exchange(
    problem: Problem, reads: tuple[Region, ...], writes: tuple[Region, ...], what: str = ""
) -> Step:
    name = problem.flow.collective
    return Step(name + what, COMPUTE, "collective", "sm", reads, writes, collective=name)


def _buffers(problem: Problem, rank: int, *more: Buffer) -> tuple[Buffer, ...]:
    """Return the problem's inputs, weights and outputs, and further buffers."""
    return (*operand_buffers(problem, rank), *more)


def _gather(problem: Problem, rank: int) -> RankPlan:
    """Return the plan of a rank that gets rows and multiplies them."""
    blocks, k = problem.operator.blocks(problem, rank), problem.k
    multiplied, height = Multiplied(problem, blocks), blocks.arriving
    kept = [Region(rank, f"y{i}", 0, height, 0, k) for i in multiplied.kept]
    x = Region(rank, "x", 0, problem.rows[rank], 0, k)
    steps: list[Step] = []
    more: tuple[Buffer, ...] = ()
    name = "x"
    if problem.world > 1:
        whole = kept.pop(0) if kept else Region(rank, _GATHERED, 0, height, 0, k)
        name = whole.buffer
        if name == _GATHERED:
            more = (Buffer(name, "workspace", height, k, problem.dtype),)
        terms = multiplied.terms
        more = (*more, *terms.windows(height, "workspace", 1))
        if problem.flow.collective == "all_gather":
            reads: tuple[Region, ...] = (x,) if x.rows else ()
            writes: tuple[Region, ...] = (whole,)
        else:
            reads = tuple([
                x._replace(row0=block.begin, row1=block.begin + block.rows)
                for block in blocks.outgoing
            ])  # fmt: skip
            writes = tuple([
                whole._replace(row0=block.recv, row1=block.recv + block.rows)
                for block in blocks.incoming
            ])  # fmt: skip
        steps.append(_exchange(problem, reads, writes))
        for term in terms.operands:
            sent, arrived = (
                tuple([terms.beside(box, term.name, 0, term.cols) for box in boxes])
                for boxes in (reads, writes)
            )
            steps.append(_exchange(problem, sent, arrived, f".{term.name}"))
    if height:
        source = Region(rank, name, 0, height, 0, k)
        steps += [
            Step(f"keep.{target.buffer}", COMPUTE, "local_copy", "sm", (source,), (target,))
            for target in kept
        ]
        group = Group("whole", (), (Gathered(name, 0, 0, height, 0, k),))
        if problem.flow.routes:
            steps.append(gather_experts(problem, rank, name))
        else:
            steps += multiplied.gemms([group], multiplied.all, gated=False)
    return RankPlan(rank, _buffers(problem, rank, *more), tuple(steps))


def _scatter(problem: Problem, rank: int) -> RankPlan:
    """Return the plan of a rank that multiplies, and sends or adds up products."""
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    flow, n = problem.flow, problem.n
    blocks, (rows, columns) = problem.operator.blocks(problem, rank), problem.result_shapes(rank)[0]
    y = Region(rank, "y0", 0, rows, 0, columns)
    made = y if flow.shares else Region(rank, PARTIAL, 0, products.height, 0, n)
    steps: list[Step] = []
    if made.rows:
        piece = Piece(0, made.rows, 0, n, made)
        steps += [*products.begin([piece]), *products.steps("whole", [piece])]
    names = rows_added(problem, rank)
    if flow.shares:
        own = blocks.own
        if names and own.rows:  # every rank adds its bias to its own rows, once
            steps.append(_added(names, y._replace(row0=own.begin, row1=own.begin + own.rows)))
        steps.append(_exchange(problem, (made,), (y,)))
    else:
        reads: tuple[Region, ...] = tuple([
            made._replace(row0=block.begin, row1=block.begin + block.rows)
            for block in blocks.outgoing
        ])  # fmt: skip
        writes: tuple[Region, ...] = (y,) if rows else ()
        if not flow.sums:
            writes = tuple([
                y._replace(row0=block.recv, row1=block.recv + block.rows)
                for block in blocks.incoming
            ])  # fmt: skip
        steps.append(_exchange(problem, reads, writes))
        if names and rows:
            steps.append(_added(names, y))
    more = [] if flow.shares else [Buffer(PARTIAL, "workspace", made.rows, n, problem.dtype)]
    return RankPlan(rank, _buffers(problem, rank, *more), tuple(steps))


def _combine(problem: Problem, rank: int) -> RankPlan:
    """Return the plan of a rank that adds up the rows of its experts, and then those of all."""
    if problem.world == 1:
        return lower_alone(problem)
    first, rows = offsets(problem.rows), problem.rows[rank]
    steps, buffers = sum_experts(problem, rank)
    sums = buffers[-1]
    reads = tuple([
        Region(rank, sums.name, first[d], first[d + 1], 0, sums.cols) for d in range(problem.world)
    ])  # fmt: skip
    writes = (Region(rank, "y0", 0, rows, 0, problem.n),) if rows else ()
    steps.append(_exchange(problem, reads, writes))
    return RankPlan(rank, _buffers(problem, rank, *buffers), tuple(steps))


def _added(names: Sequence[str], rows: Region) -> Step:
    added = row_regions(rows.rank, names, rows.col0, rows.col1)
    return Step("bias", COMPUTE, "reduce", "sm", (rows, *added), (rows,))


def _pool(problem: Problem, rank: int) -> RankPlan:
    """Return the plan of a rank that pools its tables, and sends slices of the batch."""
    widths = [problem.n * len(tables) for tables in problem.tables]
    lefts, batch, rows = offsets(widths), problem.m, problem.rows[rank]
    bags = Bags(problem, rank, problem.lookups[rank])
    if problem.world == 1:
        target = Region(0, "y0", 0, batch, 0, widths[0])
        steps = bags.steps("whole", [Piece(0, batch, 0, widths[0], target)])
        return RankPlan(rank, _buffers(problem, rank), tuple(steps))
    first, width, world = offsets(problem.rows), widths[rank], range(problem.world)
    pooled = Region(rank, _POOLED, 0, batch, 0, width)
    arrived = [Region(rank, f"{_FROM}{s}", 0, rows, 0, widths[s]) for s in world]
    steps = bags.steps("whole", [Piece(0, batch, 0, width, pooled)])
    reads = tuple([pooled._replace(row0=first[d], row1=first[d + 1]) for d in world])
    steps.append(_exchange(problem, reads, tuple(arrived)))
    moved = [s for s in world if arrived[s].area]
    targets = [Region(rank, "y0", 0, rows, lefts[s], lefts[s + 1]) for s in moved]
    if moved:
        sources = tuple([arrived[s] for s in moved])
        steps.append(Step("permute", COMPUTE, "local_copy", "sm", sources, tuple(targets)))
    more = [
        Buffer(_POOLED, "workspace", batch, width, problem.dtype),
        *[Buffer(box.buffer, "workspace", rows, box.cols, problem.dtype) for box in arrived],
    ]
    return RankPlan(rank, _buffers(problem, rank, *more), tuple(steps))
