"""Pooling and all-to-all by one launch, whose programs store sums of bags in peers' windows.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.one_kernel_pool`). The bags
of each peer are cut into chunks. The first chunks of all peers are pooled and stored first, and the
own bags last. Arrivals are copied out of the window at the end. With three ranks:

    [free] enter | pool and store chunk 0 of all peers, chunk 1, ... | pool own bags | [entered]
    [chunk 0] copy, [chunk 1] copy, ... | clear, free
"""

from __future__ import annotations

from ficco.errors import ScheduleError
from ficco.lowering.cutting import check_implemented, chunk_bounds
from ficco.lowering.handshake import await_entered
from ficco.lowering.one_kernel import LANE, check_axes, closed, opened, signals_step, stored
from ficco.lowering.producing import PARTIAL, Bags, Piece
from ficco.lowering.single import alone_with_bags
from ficco.plan import Buffer, RankPlan, Region, Signal, Step
from ficco.problem import Problem, offsets
from ficco.schedule import Schedule
from ficco.tables import MOST_TABLES

__all__ = ["POOLED", "lower_one_kernel_pool"]

POOLED = "pooled"  # window: what peers pooled for this rank


def lower_one_kernel_pool(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    bags, world = Bags(problem, rank, problem.lookups[rank]), problem.world
    if world == 1:
        return alone_with_bags(problem, bags)
    widths = [problem.n * len(tables) for tables in problem.tables]
    lefts, first = offsets(widths), offsets(problem.rows)
    peers = [(rank + turn) % world for turn in range(1, world)]
    bounds = [chunk_bounds(rows, schedule.chunks, "none") for rows in problem.rows]

    steps = opened(rank, peers)
    for number in range(schedule.chunks if widths[rank] else 0):
        pieces, sources, targets = [], [], []
        for peer in peers:
            begin, end = bounds[peer][number : number + 2]
            if begin < end:
                rows = (first[peer] + begin, first[peer] + end)
                source = Region(rank, PARTIAL, *rows, 0, widths[rank])
                pieces.append(Piece(*rows, 0, widths[rank], source))
                sources.append(source)
                targets.append(Region(peer, POOLED, begin, end, lefts[rank], lefts[rank + 1]))
        if pieces:
            steps += bags.steps(f"{number}", pieces)
            steps += stored(
                rank, f"{number}", sources, targets, [target.rank for target in targets], number
            )
    own = Region(rank, "y0", 0, problem.rows[rank], lefts[rank], lefts[rank + 1])
    if own.area:
        steps += bags.steps("own", [Piece(first[rank], first[rank + 1], 0, own.cols, own)])
    steps.append(await_entered(rank, peers, LANE))
    senders = [peer for peer in peers if widths[peer]]
    signals: list[Signal] = []
    for number in range(schedule.chunks if senders else 0):
        begin, end = bounds[rank][number : number + 2]
        if begin < end:
            arrived = [Signal(rank, "data", peer, number) for peer in senders]
            signals += arrived
            steps.append(signals_step(f"arrived.{number}", "wait", tuple(arrived)))
            boxes = [
                Region(rank, POOLED, begin, end, lefts[peer], lefts[peer + 1]) for peer in senders
            ]
            moved = tuple([box._replace(buffer="y0") for box in boxes])
            steps.append(Step(f"move.{number}", LANE, "local_copy", "sm", tuple(boxes), moved))
    steps += closed(rank, peers, signals)
    return RankPlan(rank, (*bags.operands(), *_buffers(problem, rank, lefts)), tuple(steps))


def _buffers(problem: Problem, rank: int, lefts: tuple[int, ...]) -> list[Buffer]:
    dtype, width = problem.dtype, lefts[rank + 1] - lefts[rank]
    return [
        Buffer("y0", "output", problem.rows[rank], lefts[-1], dtype),
        Buffer(PARTIAL, "workspace", problem.m, width, dtype),
        Buffer(POOLED, "window", max(problem.rows), lefts[-1], dtype, copies=2),
    ]


def _check(problem: Problem, schedule: Schedule) -> None:
    """Reject what the kernel does not implement; the message names the nearest that works."""
    check_implemented(problem.op, schedule)
    check_axes(schedule, cut="rows", start="local_first")
    most = max(map(len, problem.tables))
    if most > MOST_TABLES:
        raise ScheduleError(
            f"transport='sm' with {most} tables on a rank is not implemented: one launch pools at "
            f"most {MOST_TABLES}; the nearest that works is transport='dma'"
        )
