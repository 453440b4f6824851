"""All-reduce: products of all ranks are added up, and every rank gets the whole sum.

A reduce-scatter whose owners push their sums on, chunk by chunk, as they are made, step by step
while later steps are still multiplied; every rank moves what it got from the window into its output
(by local copies, which are part of the operator) on a lane of its own, "collect".
With pace="in_step" a sum goes to the next peer when the last turn's sum has come here; for partial
sums, which are pushed as they are made, there are no turns to keep.

With sums="within" a launch of the own parts adds up, chunk by chunk, and tells of each, which is
pushed on meanwhile: from lanes of their own, "spread"; or, where all of the peers' parts are made
before the first sum, behind these on their lanes, for on GPUs the signal behind a push may wait for
pushes of other lanes (`bench/NOTES.md`). With sums="along" the sums come to their
owners round a ring (see `ring`), and are pushed on from there while later chunks go round.

With transport="sm" the kernel that multiplies stores at the peers itself: see
`one_kernel_all_reduce`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ficco.errors import ScheduleError
from ficco.lowering import one_kernel_all_reduce
from ficco.lowering.cutting import check_implemented
from ficco.lowering.finishing import Batch, await_data, batches, close, reduce
from ficco.lowering.one_kernel_all_reduce import REDUCED
from ficco.lowering.producing import Products
from ficco.lowering.recv_copies import Arrival, moves
from ficco.lowering.reduce_scatter import reduction_buffers, reduction_cut
from ficco.lowering.ring import OPENED, PUSH, Own, check_ring, circulate, ring_words
from ficco.lowering.scattering import Chunk, Cut, Made, finishes_between, make_and_push
from ficco.lowering.single import alone
from ficco.plan import Buffer, RankPlan, Region, Signal, Step
from ficco.problem import Problem, offsets
from ficco.schedule import MAX_CHUNKS, Schedule

__all__ = ["lower_all_reduce"]

COLLECT = "collect"
SPREAD = "spread"


def lower_all_reduce(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    check_implemented(problem.op, schedule)
    if schedule.transport == "sm":
        return one_kernel_all_reduce.lower_one_kernel_all_reduce(problem, schedule, rank)
    if schedule.shots == "one":
        raise ScheduleError(
            f"{problem.op}: shots='one' with transport={schedule.transport!r} is not "
            "implemented; the nearest that works is shots='two', or the schedule one_shot_sm"
        )
    if schedule.sums == "along":
        check_ring(problem.op, schedule, problem.world)
    elif 2 * schedule.chunks > MAX_CHUNKS:
        raise ScheduleError(
            f"{problem.op}: grain={schedule.chunks}; every chunk travels twice, so grain is "
            f"at most {MAX_CHUNKS // 2}"
        )
    if schedule.pace == "in_step" and schedule.route != "rotation":
        raise ScheduleError(
            "pace='in_step' with route='all_peers': all links are busy at once, so there are no "
            "turns; the nearest that works is pace='free', or route='rotation'"
        )
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    if schedule.sums == "along":
        return _ring(problem, schedule, rank, products)
    cut = reduction_cut(problem, replace(schedule, pace="free"), rank)
    if schedule.sums == "within":
        return _within(problem, schedule, cut, products)
    in_step = schedule.pace == "in_step"
    first = offsets(problem.rows)
    found = batches(cut, per_chunk=False)

    def finish(batch: Batch, made: Made) -> list[Step]:
        sums = reduce(cut, batch, first[rank], problem.outputs[0].bias)
        whole = batch.name == "all"
        own = Own(0 if whole else batch.arrived[0][1], sums[-1].writes[0], (sums[-1].id,))
        return [await_data(batch), *sums, *_push_on(cut, made.lanes, own, whole, in_step)]

    if finishes_between(schedule):
        steps = {batch.arrived[0][1]: batch for batch in found}
        made = make_and_push(
            cut, products, lambda j, made: finish(steps[j], made) if j in steps else []
        )
    else:
        made = make_and_push(cut, products)
        for batch in found:
            made.steps += finish(batch, made)
    data = [signal for batch in found for signal in batch.signals]
    data += _collect(cut, made, first, problem.itemsize)
    close(cut, made, data, COLLECT)
    buffers = (*reduction_buffers(problem, products, cut), *_results(problem))
    return RankPlan(rank, buffers, tuple(made.steps))


def _within(problem: Problem, schedule: Schedule, cut: Cut, products: Products) -> RankPlan:
    """Return the plan of one rank whose launch of own parts adds up, and tells of every chunk."""
    rank, first = cut.rank, offsets(problem.rows)
    bias = problem.outputs[0].bias
    cut = replace(cut, own="y0", own_row=first[rank], biased=bias, passed_on=True)
    made = make_and_push(cut, products)
    opened = tuple(dict.fromkeys(f"{lane}.wait_free" for lane in made.lanes.values()))
    several = len(set(made.lanes.values())) > 1
    behind = schedule.order == "by_peer"  # all parts are made before the first sum
    lanes = {peer: f"{SPREAD}{peer}" if several else SPREAD for peer in made.lanes}
    lanes = made.lanes if behind else lanes
    waiting = SPREAD if several else next(iter(lanes.values()))
    for index in range(schedule.chunks):
        chunk = cut.sent(rank, index)
        if chunk.empty:
            continue
        made.told.append(Signal(rank, "ready", rank, index))
        made.steps.append(
            Step(f"summed.{index}", waiting, "wait", "none", signals=(made.told[-1],))
        )
        after = (f"summed.{index}",) if several else ()
        after = after if behind else (*opened, *after)
        own = Own(index, cut.piece(rank, chunk).target, after)
        made.steps += _push_on(cut, lanes, own, False, schedule.pace == "in_step")
    data = [signal for batch in batches(cut, per_chunk=False) for signal in batch.signals]
    data += _collect(cut, made, first, problem.itemsize)
    close(cut, made, data, COLLECT)
    buffers = (*reduction_buffers(problem, products, cut), *_results(problem))
    return RankPlan(rank, buffers, tuple(made.steps))


def _ring(problem: Problem, schedule: Schedule, rank: int, products: Products) -> RankPlan:
    """Return the plan of one rank whose sums go round a ring."""
    first = offsets(problem.rows)
    cut = reduction_cut(problem, replace(schedule, pace="free"), rank)
    cut = replace(cut, own="y0", own_row=first[rank], biased=problem.outputs[0].bias)

    def finish(done: Sequence[Own], made: Made) -> None:
        lanes = dict.fromkeys(made.lanes, SPREAD)
        for own in done:
            ready = own._replace(after=(*own.after, OPENED))
            made.steps += _push_on(cut, lanes, ready, False, schedule.pace == "in_step")

    made, data = circulate(cut, products, finish)
    data += _collect(cut, made, first, problem.itemsize)
    close(cut, made, data, COLLECT, reading=[PUSH])
    buffers = (*reduction_buffers(problem, products, cut), *_results(problem))
    return RankPlan(rank, buffers, tuple(made.steps))


def _results(problem: Problem) -> tuple[Buffer, Buffer]:
    """Return the output, and the window that takes the peers' sums."""
    m, n, dtype = problem.m, problem.n, problem.dtype
    return Buffer("y0", "output", m, n, dtype), Buffer(REDUCED, "window", m, n, dtype, copies=2)


def _slot(cut: Cut, index: int) -> int:
    """Return the place of the signal of a chunk of sums, behind those of what is added up."""
    along = cut.schedule.sums == "along"
    return (ring_words(cut.schedule, cut.world) if along else cut.schedule.chunks) + index


def _push_on(
    cut: Cut, lanes: Mapping[int, str], own: Own, whole: bool, in_step: bool
) -> list[Step]:
    """Return the pushes of own sums to all peers, after they are made."""
    steps = []
    index, source, after = own
    box = source[2:6]
    for turn, (peer, lane) in enumerate(lanes.items()):
        target = Region(peer, REDUCED, *box)
        name = f"sum{index}to{peer}"
        before = (cut.rank - turn) % cut.world  # whose sum came here in the last turn
        if in_step and turn and _sums_of(cut, before, index, whole):
            came = (Signal(cut.rank, "data", before, _slot(cut, index)),)
            steps.append(Step(f"turn.{name}", lane, "wait", "none", signals=came))
        steps.append(Step(f"push.{name}", lane, "copy", "dma", (source,), (target,), after=after))
        arrived = (Signal(peer, "data", cut.rank, _slot(cut, index)),)
        steps.append(Step(f"sent.{name}", lane, "raise", "none", signals=arrived))
    return steps


def _sums_of(cut: Cut, peer: int, index: int, whole: bool) -> bool:
    """Whether a peer has sums in this chunk of its block; an empty chunk is not sent."""
    rows, width = cut.blocks.outgoing[peer].rows, cut.widths[peer]
    return not (Chunk(0, rows, 0, width) if whole else cut.chunk(rows, width, index)).empty


def _collect(cut: Cut, made: Made, first: tuple[int, ...], item_bytes: int) -> list[Signal]:
    """Wait for the peers' sums and move them into the output; return the signals that said so."""
    schedule, rank = cut.schedule, cut.rank
    turns = schedule.route == "rotation"  # peers' sums come one after another
    groups: dict[tuple[int, int], list[tuple[Signal, Region, Region]]] = {}
    for turn in range(1, cut.world):
        peer = (rank - turn) % cut.world
        rows, width = cut.blocks.outgoing[peer].rows, cut.widths[peer]
        for j in range(1 if schedule.sums_at_once else schedule.chunks):
            whole = Chunk(0, rows, 0, width)
            chunk = whole if schedule.sums_at_once else cut.chunk(rows, width, j)
            if chunk.empty:
                continue
            top = first[peer]
            box = (top + chunk.row0, top + chunk.row1, chunk.col0, chunk.col1)
            signal = Signal(rank, "data", peer, _slot(cut, j))
            entry = (signal, Region(rank, REDUCED, *box), Region(rank, "y0", *box))
            groups.setdefault((j, turn if turns else 0), []).append(entry)
    arrivals = []
    for at in sorted(groups):
        signals, reads, writes = zip(*groups[at], strict=True)
        name = f"sum{at[0]}of{signals[0].peer}" if turns else f"sum{at[0]}"
        arrivals.append(Arrival(name, signals, reads, writes))
    made.steps += moves(arrivals, COLLECT, item_bytes)
    return [signal for arrival in arrivals for signal in arrival.signals]
