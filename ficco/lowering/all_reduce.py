"""All-reduce: the products of all ranks are added up, and every rank gets the whole sum.

This is a reduce-scatter whose owners push each chunk of sums to all peers as soon as it is made,
while later steps are still multiplied. Every rank copies the sums that it receives from the window
into its output. These local copies are part of the operator and have their own lane, "collect".
With pace="in_step" a sum is pushed to the next peer after the sum of the last turn has arrived.
Partial sums are pushed as they are made and have no turns.

With sums="within" the launch that makes the own parts also adds up the sums, chunk by chunk. It
raises a signal for each chunk, and the chunk is pushed meanwhile on separate lanes, "spread". If
all parts for peers are made before the first sum, the sums use the push lanes, after the parts: on
GPUs the signal after a push may wait for pushes of other lanes (`bench/NOTES.md`). With
sums="along" sums reach their owners on a ring (see `ring`), and the owners push them to all peers
while later chunks circulate.

With transport="sm" the kernel that multiplies also stores at the peers: see
`one_kernel_all_reduce`. With compute="whole" one kernel reads the peers' products after a GEMM: see
`pulling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ficco.core.errors import ScheduleError
from ficco.lowering import one_kernel_all_reduce
from ficco.lowering.attachments import rows_added
from ficco.lowering.cutting import check_implemented
from ficco.lowering.finishing import Arrival, Batch, await_data, batches, close, moves, reduce
from ficco.lowering.one_kernel_all_reduce import REDUCED
from ficco.lowering.producing import Products, alone
from ficco.lowering.reduce_scatter import reduction_buffers, reduction_cut
from ficco.lowering.ring import OPENED, PUSH, Own, check_ring, circulate, ring_words
from ficco.lowering.scattering import Chunk, Cut, Made, finishes_between, make_and_push
from ficco.operators.problem import Problem, offsets
from ficco.plan import Buffer, RankPlan, Region, Signal, Step
from ficco.plan.schedule import MAX_CHUNKS, Schedule

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
    first, rows = offsets(problem.rows), rows_added(problem, rank)
    all_batches = batches(cut, per_chunk=False)

    def finish(batch: Batch, made: Made) -> list[Step]:
        sums = reduce(cut, batch, first[rank], rows)
        whole = batch.name == "all"
        own = Own(0 if whole else batch.arrived[0][1], sums[-1].writes[0], (sums[-1].id,))
        return [await_data(batch), *sums, *_push_on(cut, made.lanes, own, whole, in_step)]

    if finishes_between(schedule):
        steps = {batch.arrived[0][1]: batch for batch in all_batches}
        made = make_and_push(
            cut, products, lambda j, made: finish(steps[j], made) if j in steps else []
        )
    else:
        made = make_and_push(cut, products)
        for batch in all_batches:
            made.steps += finish(batch, made)
    data = [signal for batch in all_batches for signal in batch.signals]
    data += _collect(cut, made, first, problem.result_itemsize)
    close(cut, made, data, COLLECT)
    buffers = (*reduction_buffers(problem, cut), _sums(problem))
    return RankPlan(rank, buffers, tuple(made.steps))


def _within(problem: Problem, schedule: Schedule, cut: Cut, products: Products) -> RankPlan:
    """Return the plan of one rank whose launch of own parts adds up and signals every chunk."""
    rank, first = cut.rank, offsets(problem.rows)
    rows = rows_added(problem, rank)
    cut = replace(cut, own="y0", own_row=first[rank], rows_added=rows, passed_on=True)
    made = make_and_push(cut, products)
    opened = tuple(dict.fromkeys(f"{lane}.wait_free" for lane in made.lanes.values()))
    several = len(set(made.lanes.values())) > 1
    parts_first = schedule.order == "by_peer"  # all parts are made before the first sum
    lanes = {peer: f"{SPREAD}{peer}" if several else SPREAD for peer in made.lanes}
    lanes = made.lanes if parts_first else lanes
    waiting = SPREAD if several else next(iter(lanes.values()))
    for index in range(schedule.chunks):
        chunk = cut.sent(rank, index)
        if chunk.empty:
            continue
        ready = Signal(rank, "ready", rank, index)
        made.launch_signals.append(ready)
        made.steps.append(Step(f"summed.{index}", waiting, "wait", "none", signals=(ready,)))
        after = (f"summed.{index}",) if several else ()
        after = after if parts_first else (*opened, *after)
        own = Own(index, cut.piece(rank, chunk).target, after)
        made.steps += _push_on(cut, lanes, own, False, schedule.pace == "in_step")
    data = [signal for batch in batches(cut, per_chunk=False) for signal in batch.signals]
    data += _collect(cut, made, first, problem.result_itemsize)
    close(cut, made, data, COLLECT)
    buffers = (*reduction_buffers(problem, cut), _sums(problem))
    return RankPlan(rank, buffers, tuple(made.steps))


def _ring(problem: Problem, schedule: Schedule, rank: int, products: Products) -> RankPlan:
    """Return the plan of one rank whose sums circulate on a ring."""
    first = offsets(problem.rows)
    cut = reduction_cut(problem, replace(schedule, pace="free"), rank)
    cut = replace(cut, own="y0", own_row=first[rank], rows_added=rows_added(problem, rank))

    def finish(done: Sequence[Own], made: Made) -> None:
        lanes = dict.fromkeys(made.lanes, SPREAD)
        for own in done:
            ready = own._replace(after=(*own.after, OPENED))
            made.steps += _push_on(cut, lanes, ready, False, schedule.pace == "in_step")

    made, data = circulate(cut, products, finish)
    data += _collect(cut, made, first, problem.result_itemsize)
    close(cut, made, data, COLLECT, reading=[PUSH])
    buffers = (*reduction_buffers(problem, cut), _sums(problem))
    return RankPlan(rank, buffers, tuple(made.steps))


def _sums(problem: Problem) -> Buffer:
    """Return the window that receives the peers' sums."""
    return Buffer(REDUCED, "window", problem.m, problem.n, problem.result_dtype, copies=2)


def _slot(cut: Cut, index: int) -> int:
    """Return the index of the signal of a chunk of sums; those of the terms have lower indices."""
    along = cut.schedule.sums == "along"
    return (ring_words(cut.schedule, cut.world) if along else cut.schedule.chunks) + index


def _push_on(
    cut: Cut, lanes: Mapping[int, str], own: Own, whole: bool, in_step: bool
) -> list[Step]:
    """Return the pushes of own sums to all peers, after the sums are made."""
    steps = []
    index, source, after = own
    box = source[2:6]
    for turn, (peer, lane) in enumerate(lanes.items()):
        target = Region(peer, REDUCED, *box)
        name = f"sum{index}to{peer}"
        sender = (cut.rank - turn) % cut.world  # its sum arrived here in the last turn
        if in_step and turn and _has_sums(cut, sender, index, whole):
            previous = (Signal(cut.rank, "data", sender, _slot(cut, index)),)
            steps.append(Step(f"turn.{name}", lane, "wait", "none", signals=previous))
        steps.append(Step(f"push.{name}", lane, "copy", "dma", (source,), (target,), after=after))
        arrived = (Signal(peer, "data", cut.rank, _slot(cut, index)),)
        steps.append(Step(f"sent.{name}", lane, "raise", "none", signals=arrived))
    return steps


def _has_sums(cut: Cut, peer: int, index: int, whole: bool) -> bool:
    """Whether a peer has sums in this chunk of its block; an empty chunk is not sent."""
    rows, width = cut.blocks.outgoing[peer].rows, cut.widths[peer]
    return not (Chunk(0, rows, 0, width) if whole else cut.chunk(rows, width, index)).empty


def _collect(cut: Cut, made: Made, first: tuple[int, ...], item_bytes: int) -> list[Signal]:
    """Add waits for the peers' sums and copies into the output; return the awaited signals."""
    schedule, rank = cut.schedule, cut.rank
    turns = schedule.route == "rotation"  # peers' sums arrive one after another
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
