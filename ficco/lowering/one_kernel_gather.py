"""A gather and its products by stores of the kernel that multiplies, for few rows.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.one_kernel_gather`). Each
chunk, a slice of the own shard's columns, is stored at all peers. After all arrivals each weight is
multiplied once by all rows; own rows are read from the user's x. If the gathered x is an output, it
is copied out of the window at the end. With three ranks:

    [free] enter | store slice 0 at all peers, store slice 1, ... | [entered] [all slices]
    x . w of every output | keep x | clear, free
"""

from __future__ import annotations

from ficco.errors import ScheduleError
from ficco.lowering.cutting import check_implemented
from ficco.lowering.handshake import await_entered
from ficco.lowering.multiplying import WINDOW, Group, Multiplied, Piece
from ficco.lowering.one_kernel import LANE, check_axes, closed, opened, slices, stored
from ficco.plan import RankPlan, Region, Signal, Step
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["MOST_OUTPUTS", "is_one_kernel", "lower_one_kernel_gather"]

MOST_OUTPUTS = 4  # per launch; each output has its own weight and result


def is_one_kernel(problem: Problem) -> bool:
    """Return whether one launch can make all outputs: few, along rows, the gathered x once."""
    return not _reason(problem)


def lower_one_kernel_gather(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    blocks, world = problem.operator.blocks(problem, rank), problem.world
    _, own, first = blocks.own
    products = Multiplied(problem, blocks)
    shard = Piece("x", first, first, first + own, 0, problem.k)
    if world == 1:
        steps = products.gemms([Group("whole", (), (shard,))], products.first, gated=False)
        steps += _kept(products, [shard])
        return RankPlan(rank, products.buffers(window=False), tuple(steps))

    cut = slices(problem.k, schedule.chunks)
    peers = [(rank + turn) % world for turn in range(1, world)]
    steps = opened(rank, peers)
    for number, begin, end in cut if own else ():
        source = Region(rank, "x", 0, own, begin, end)
        targets = [Region(p, WINDOW, first, first + own, begin, end) for p in peers]
        steps += stored(rank, f"{number}", [source] * len(peers), targets, peers, number)
    steps.append(await_entered(rank, peers, LANE))
    signals = tuple(
        [Signal(rank, "data", peer, chunk.number) for peer in peers if problem.rows[peer]
         for chunk in cut]
    )  # fmt: skip
    window = [(0, first), (first + own, problem.m)]
    pieces = [Piece(WINDOW, 0, *rows, 0, problem.k) for rows in window if rows[0] < rows[1]]
    pieces += [shard] if own else []
    pieces.sort(key=lambda piece: piece.row0)
    steps += products.gemms([Group("all", signals, tuple(pieces))], products.first, gated=False)
    steps += _kept(products, pieces)
    steps += closed(rank, peers, signals)
    return RankPlan(rank, products.buffers(window=True), tuple(steps))


def _kept(products: Multiplied, pieces: list[Piece]) -> list[Step]:
    """Return the copies of all rows into outputs that hold the gathered x."""
    rank, steps = products.rank, []
    for index in products.kept:
        reads, writes = [], []
        for buffer, shift, row0, row1, *columns in pieces:
            reads.append(Region(rank, buffer, row0 - shift, row1 - shift, *columns))
            writes.append(Region(rank, f"y{index}", row0, row1, *columns))
        name = f"keep{index}"
        steps.append(Step(name, LANE, "local_copy", "sm", tuple(reads), tuple(writes)))
    return steps


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
