"""Lowering of a mixture of experts: tokens travel to experts, and rows of experts return.

Every place in a window depends on a token alone, so no step depends on a count. Token t of rank s
is row first[s] + t of the window `gathered`; slot j of it is row t * topk + j of the window
`returned` of rank s. What the steps multiply depends on the routing tables, which are data.

Dispatch pushes all tokens to all peers, as `gathering` does. With two waves the experts multiply
the rank's own tokens first, then those of all peers. Each wave reads all weights, so there are no
more:

    push      [free] enter  x->1 x->2
    compute   experts x     [x of 1, x of 2] experts of both    [entered] clear, free

Combine is a launch that stores each product at the owner of its token, and sums at the owner:

    compute   [free] enter  experts: rows -> returned@0, @1, @2   raise data at 1, 2
              [data of 1, 2] sum returned   [entered] clear, free
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.errors import ScheduleError
from ficco.lowering.cutting import check_implemented
from ficco.lowering.gathering import KEEP, GatherCut, arrivals_kept, own_kept, pushes
from ficco.lowering.handshake import closed, enter_all
from ficco.lowering.multiplying import COMPUTE, WINDOW
from ficco.lowering.producing import PARTIAL
from ficco.operators.problem import Problem, offsets
from ficco.plan import (
    Buffer,
    Experts,
    RankPlan,
    Region,
    Signal,
    Step,
    experts_step,
    operand_buffers,
)
from ficco.plan.schedule import Schedule

RETURNED = "returned"  # window: a row per slot of this rank's tokens


def lower_experts(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    check_implemented(problem.op, schedule)
    if problem.world == 1:
        return lower_alone(problem)
    return (_dispatch if problem.flow.gathers else _combine)(problem, schedule, rank)


def lower_alone(problem: Problem) -> RankPlan:
    """Return the plan of a world of one."""
    buffers = operand_buffers(problem, 0)
    if problem.flow.gathers:
        kept = [i for i, output in enumerate(problem.outputs) if output.axis == "gathered"]
        x = Region(0, "x", 0, problem.m, 0, problem.k)
        steps = [_gather(problem, 0, "own", [(0, x)])]
        steps += [
            Step(f"keep{i}", KEEP, "local_copy", "sm", (x,), (x._replace(buffer=f"y{i}"),))
            for i in kept
        ]
        return RankPlan(0, tuple(buffers), tuple(steps))
    buffers.append(Buffer(RETURNED, "workspace", problem.routed.slots, problem.n, problem.dtype))
    return RankPlan(0, tuple(buffers), (_return(problem, 0), _sum(problem, 0)))


def _check(op: str, schedule: Schedule, **needed: object) -> None:
    """Reject a schedule with other values of some axes; name the nearest that works."""
    wrong = {axis: value for axis, value in needed.items() if getattr(schedule, axis) != value}
    if wrong:
        found = ", ".join(f"{axis}={getattr(schedule, axis)!r}" for axis in wrong)
        nearest = ", ".join(f"{axis}={value!r}" for axis, value in wrong.items())
        raise ScheduleError(
            f"{op} with {found} is not implemented: each launch reads the weights of all experts, "
            f"so there are few; the nearest that works is {nearest}"
        )


# ---- dispatch


def _dispatch(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    _check(problem.op, schedule, transport="dma", cut="rows", compute="whole")
    blocks = problem.operator.blocks(problem, rank)
    cut = GatherCut(problem, schedule, blocks)
    peers = [(rank + turn) % problem.world for turn in range(1, problem.world)]
    arrived = [
        (s, Region(rank, WINDOW, at.recv, at.recv + at.rows, 0, problem.k))
        for s, at in enumerate(blocks.incoming)
        if at.rows and s != rank
    ]
    x = Region(rank, "x", 0, problem.rows[rank], 0, problem.k)
    own = [(rank, x)] if x.rows else []
    steps = pushes(cut, schedule, peers)
    if schedule.start == "local_first" and own:
        steps.append(_gather(problem, rank, "own", own))
        own = []
    if arrived:
        data = tuple(cut.data_words())
        steps.append(Step("wait.arrived", COMPUTE, "wait", "none", signals=data))
    if own or arrived:
        steps.append(_gather(problem, rank, "arrived", [*own, *arrived]))
    for i, output in enumerate(problem.outputs):
        if output.axis == "gathered":
            steps += own_kept(i, blocks, problem.k)
            steps += arrivals_kept(i, cut, problem.input_itemsize)
    window = Buffer(WINDOW, "window", blocks.window_rows, problem.k, problem.dtype, copies=2)
    steps = closed(rank, peers, cut.data_words(), steps, COMPUTE, KEEP)
    return RankPlan(rank, (*operand_buffers(problem, rank), window), tuple(steps))


def _gather(problem: Problem, rank: int, name: str, tokens: Sequence[tuple[int, Region]]) -> Step:
    """Return the step that multiplies the tokens of some ranks with the weights of experts."""
    y = Region(rank, "y0", 0, problem.capacities[rank], 0, problem.n)
    sources = tuple([region for _, region in tokens])
    targets = tuple([y._replace(of=s) for s, _ in tokens])
    return _step(problem, rank, f"experts.{name}", "gather", sources, targets)


def _step(
    problem: Problem, rank: int, name: str, mode: str, sources: Sequence[Region],
    targets: Sequence[Region],
) -> Step:  # fmt: skip
    """Return a step of experts of a rank."""
    output, operands = problem.outputs[0], problem.operands(rank)
    whole = {
        operand.role: Region(rank, operand.name, 0, operand.rows, 0, operand.cols)
        for operand in operands
        if operand.role in ("routing", "experts")
    }
    weight = None if mode == "sum" else whole["experts"]
    turned = output.operand_transposed and weight is not None
    work = Experts(
        mode, problem.routed, whole["routing"], weight, tuple(sources), tuple(targets), turned
    )
    return experts_step(name, COMPUTE, work)


# ---- combine


def _combine(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    # A host has threads in place of kernels: there this plan is `serial`, too.
    if schedule.compute != "whole" or schedule.transport == "sm":
        _check(problem.op, schedule, transport="sm", compute="gated")
    _check(problem.op, schedule, cut="rows", grain=1, taper="none", pace="free")
    peers = [(rank + turn) % problem.world for turn in range(1, problem.world)]
    data = [Signal(rank, "data", peer, 0) for peer in peers]
    raised = tuple([Signal(peer, "data", rank, 0) for peer in peers])
    steps = enter_all(rank, dict.fromkeys(peers, COMPUTE))
    steps.append(_return(problem, rank))
    steps.append(Step("sent", COMPUTE, "raise", "none", signals=raised))
    steps.append(Step("wait.returned", COMPUTE, "wait", "none", signals=tuple(data)))
    if problem.rows[rank]:
        steps.append(_sum(problem, rank))
    tallest = max(problem.rows) * problem.topk
    window = Buffer(RETURNED, "window", tallest, problem.n, problem.dtype, copies=2)
    steps = closed(rank, peers, data, steps, COMPUTE)
    return RankPlan(rank, (*operand_buffers(problem, rank), window), tuple(steps))


def _return(problem: Problem, rank: int) -> Step:
    """Return the step that stores products at the owners of their tokens."""
    topk, rows = problem.topk, problem.rows
    targets = [
        Region(owner, RETURNED, 0, rows[owner] * topk, 0, problem.n, of=rank)
        for owner in range(problem.world)
        if rows[owner]
    ]
    return _step(problem, rank, "experts", "return", [_rows(problem, rank)], targets)


def _rows(problem: Problem, rank: int) -> Region:
    return Region(rank, "x", 0, problem.capacities[rank], 0, problem.k)


def _sum(problem: Problem, rank: int) -> Step:
    """Return the step that adds up the rows of each token of a rank."""
    count, n = problem.rows[rank], problem.n
    source = Region(rank, RETURNED, 0, count * problem.topk, 0, n)
    return _step(problem, rank, "sum", "sum", [source], [Region(rank, "y0", 0, count, 0, n)])


# ---- by collectives of a library


def gather_experts(problem: Problem, rank: int, arrived: str) -> Step:
    """Return the step that multiplies tokens of all ranks, gathered in a buffer."""
    first = offsets(problem.rows)
    tokens = [
        (s, Region(rank, arrived, first[s], first[s + 1], 0, problem.k))
        for s in range(problem.world)
        if problem.rows[s]
    ]
    return _gather(problem, rank, "whole", tokens)


def sum_experts(problem: Problem, rank: int) -> tuple[list[Step], tuple[Buffer, ...]]:
    """Return the steps that add up, per token of all ranks, the rows of a rank's experts.

    The sums are in the buffer PARTIAL. The second value is the buffers of the steps.
    """
    first, topk, n = offsets(problem.rows), problem.topk, problem.n
    targets = [
        Region(rank, RETURNED, first[s] * topk, first[s + 1] * topk, 0, n, of=rank)
        for s in range(problem.world)
        if problem.rows[s]
    ]
    rows = Region(rank, RETURNED, 0, problem.routed.slots, 0, n, of=rank)
    sums = Region(rank, PARTIAL, 0, problem.m, 0, n)
    steps = [
        _step(problem, rank, "experts", "return", [_rows(problem, rank)], targets),
        _step(problem, rank, "sum", "sum", [rows], [sums]),
    ]
    dtype = problem.dtype
    return steps, (
        Buffer(RETURNED, "workspace", rows.rows, n, dtype),
        Buffer(PARTIAL, "workspace", problem.m, n, dtype),
    )
