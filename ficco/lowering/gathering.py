"""Gathering: blocks of x travel, and each rank multiplies arrived blocks with its own weight.

Every rank pushes its blocks, chunk by chunk, directly from x into the peers' windows, and
multiplies the chunks that have arrived. The window `gathered` holds the whole input of a rank's
GEMM, so one GEMM can read a chunk together with its neighbours. With two chunks per shard and
three ranks, on rank 0:

    push      [free] enter  x0.0->1 x0.0->2 x0.1->1 x0.1->2
    compute   x0 . w  [x2.0 x1.0] step 0 . w  [x2.1 x1.1] step 1 . w  [entered] clear, free
              (hetero_fused_1d; [..] waits. uniform_*: a local_copy puts x0 into the window first)
    keep      x0  [x2.0] x2.0  [x1.0] x1.0 ...
              (only where the gathered x is also an output: copies out of the window)

Next to products along rows, a product along the contraction is one GEMM over the whole window,
after all others: in pieces, it would need a float32 sum. Alone, it is cut as the schedule says.
"""

from __future__ import annotations

from ficco.core.errors import ScheduleError
from ficco.lowering.attachments import Terms
from ficco.lowering.cutting import arrivals, check_implemented, departures, turn_bounds
from ficco.lowering.finishing import Arrival, moves
from ficco.lowering.handshake import await_entered, closed, enter_all, push_lanes
from ficco.lowering.multiplying import COMPUTE, WINDOW, Group, Multiplied, Piece
from ficco.operators.blocks import Blocks
from ficco.operators.problem import Problem
from ficco.plan import RankPlan, Region, Signal, Step
from ficco.plan.schedule import Schedule

KEEP = "keep"


def lower_gathering(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    blocks = problem.operator.blocks(problem, rank)
    products = Multiplied(problem, blocks)
    if problem.world == 1:
        whole = Piece("x", 0, 0, problem.m, 0, problem.k)
        steps = products.gemms([Group("whole", (), (whole,))], products.all, gated=False)
        steps += [step for i in products.kept for step in own_kept(i, blocks, problem.k)]
        return RankPlan(rank, products.buffers(window=False), tuple(steps))

    cut = GatherCut(problem, schedule, blocks)
    peers = [(rank + turn) % problem.world for turn in range(1, problem.world)]
    steps = pushes(cut, schedule, peers)
    gated = schedule.compute == "gated"
    if blocks.own.rows and (_staged(schedule) or products.late):
        steps.append(_stage(cut, _staged(schedule)))
    if gated:  # a kernel that spins must not start before its peers have started
        steps.append(await_entered(rank, peers, COMPUTE))
    steps += products.gemms(_groups(cut, schedule), products.first, gated)
    steps += _late(cut, products, _staged(schedule))
    for i in products.kept:
        steps += [*own_kept(i, blocks, problem.k), *arrivals_kept(i, cut, problem.input_itemsize)]
    steps = closed(rank, peers, cut.data_words(), steps, COMPUTE, KEEP)
    steps += products.roundings()
    return RankPlan(rank, products.buffers(window=True), tuple(steps))


def _check(problem: Problem, schedule: Schedule) -> None:
    """Reject what no lowering implements; the message names the nearest that works."""
    check_implemented(problem.op, schedule)
    if schedule.pace == "in_step" and schedule.route != "rotation":
        raise ScheduleError(
            "pace='in_step' with route='all_peers': all links are busy at once, so there are no "
            "turns; the nearest that works is pace='free', or route='rotation'"
        )
    if schedule.compute == "gated":
        if schedule.cut == "columns":
            raise ScheduleError(
                "compute='gated' with cut='columns': parts of one launch run at the same time and "
                "cannot add to the same tiles; the nearest that works is cut='rows', or "
                "compute='per_step'"
            )
        if all(output.axis == "contraction" for output in problem.products):
            raise ScheduleError(
                "compute='gated' with only outputs along the contraction: parts of one launch run "
                "at the same time and cannot add to the same tiles; the nearest that works is "
                "compute='per_chunk'"
            )


def _staged(schedule: Schedule) -> bool:
    """Return whether GEMMs read the own shard from the window, next to the peers' rows."""
    return schedule.start == "together" and schedule.compute in ("whole", "per_step")


class GatherCut:
    """The position of every chunk of every block, as seen from one rank."""

    def __init__(self, problem: Problem, schedule: Schedule, blocks: Blocks) -> None:
        self.rank, self.world, self.k = blocks.rank, problem.world, problem.k
        self.blocks, self.terms = blocks, Terms(problem, blocks.rank, WINDOW)
        self.by_rows = schedule.cut == "rows"
        self.schedule = schedule
        self.arrivals = [
            at for at in arrivals(schedule, self.world, self.rank) if not self.empty(*at)
        ]

    def box(self, rows: int, chunk: int, turn: int) -> tuple[int, int, int, int]:
        """Return row0, row1, col0, col1 of a chunk within the block that travels in `turn`."""
        size = rows if self.by_rows else self.k
        bounds = turn_bounds(size, self.schedule, turn, self.world - 1, "tail")
        begin, end = bounds[chunk], bounds[chunk + 1]
        return (begin, end, 0, self.k) if self.by_rows else (0, rows, begin, end)

    def incoming_box(self, shard: int, chunk: int) -> tuple[int, int, int, int]:
        """Return the box of a chunk that arrives from a peer, or of the own block."""
        rows = self.blocks.incoming[shard].rows
        return self.box(rows, chunk, (self.rank - shard) % self.world)

    def empty(self, shard: int, chunk: int) -> bool:
        """Return whether a chunk has no elements."""
        row0, row1, col0, col1 = self.incoming_box(shard, chunk)
        return row0 == row1 or col0 == col1

    def piece(self, shard: int, chunk: int, direct: bool = False) -> Piece:
        """Return a chunk as an operand of a GEMM: in the window, or with `direct` in x."""
        first = self.blocks.incoming[shard].recv
        row0, row1, col0, col1 = self.incoming_box(shard, chunk)
        buffer, shift = ("x", self.own_shift()) if direct else (WINDOW, 0)
        return Piece(buffer, shift, first + row0, first + row1, col0, col1)

    def own_shift(self) -> int:
        """Return the rows from the own block in x to its place among all rows."""
        own = self.blocks.own
        return own.recv - own.begin

    def shard(self) -> Piece:
        """Return the own block, in x."""
        own = self.blocks.own
        return Piece("x", self.own_shift(), own.recv, own.recv + own.rows, 0, self.k)

    def own_chunks(self) -> list[int]:
        """Return the numbers of the own block's chunks that have elements."""
        return [j for j in range(self.schedule.chunks) if not self.empty(self.rank, j)]

    def signal(self, shard: int, chunk: int) -> Signal:
        """Return the signal that a chunk of a peer has arrived."""
        return Signal(self.rank, "data", shard, chunk)

    def data_words(self) -> list[Signal]:
        """Return the signals of all arrivals, in order."""
        return [self.signal(*at) for at in self.arrivals]


def pushes(cut: GatherCut, schedule: Schedule, peers: list[int]) -> list[Step]:
    """Return the first half of the handshake, and all pushes, each followed by its signal."""
    rank = cut.rank
    lanes = push_lanes(schedule, peers)
    steps = enter_all(rank, lanes)
    last = None  # the peer of the last turn
    arrived_last = None  # the last chunk that arrived in that turn
    in_step = schedule.pace == "in_step"
    expected = arrivals(schedule, cut.world, rank)
    for turn, (peer, chunk) in enumerate(departures(schedule, cut.world, rank)):
        if peer != last:
            if in_step and arrived_last is not None:
                signals = (cut.signal(*arrived_last),)
                steps.append(Step(f"turn{turn}", lanes[peer], "wait", "none", signals=signals))
            last, arrived_last = peer, None
        arrived_last = arrived_last if cut.empty(*expected[turn]) else expected[turn]
        begin, rows, recv = cut.blocks.outgoing[peer]
        row0, row1, col0, col1 = cut.box(rows, chunk, (peer - rank) % cut.world)
        if row0 == row1 or col0 == col1:
            continue
        source = Region(rank, "x", begin + row0, begin + row1, col0, col1)
        target = Region(peer, WINDOW, recv + row0, recv + row1, col0, col1)
        lane, name = lanes[peer], f"{chunk}to{peer}"
        boxes = cut.terms.with_terms(source, target)
        steps.append(Step(f"push.{name}", lane, "copy", "dma", *boxes))
        arrived = (Signal(peer, "data", rank, chunk),)
        steps.append(Step(f"sent.{name}", lane, "raise", "none", signals=arrived))
    return steps


def _stage(cut: GatherCut, first: bool) -> Step:
    """Return the copy of the own shard into the window; with `first` the GEMMs wait for it."""
    begin, rows, recv = cut.blocks.own
    source = Region(cut.rank, "x", begin, begin + rows, 0, cut.k)
    target = Region(cut.rank, WINDOW, recv, recv + rows, 0, cut.k)
    boxes = cut.terms.with_terms(source, target)
    return Step("stage", COMPUTE if first else KEEP, "local_copy", "sm", *boxes)


def _late(cut: GatherCut, products: Multiplied, staged: bool) -> list[Step]:
    """Return the GEMMs over the whole window, which run after the waits for all arrivals."""
    if not products.late:
        return []
    pieces = [cut.piece(cut.rank, chunk) for chunk in cut.own_chunks()]
    pieces += [cut.piece(*at) for at in cut.arrivals]
    steps = products.gemms([Group("all", (), _merged(pieces))], products.late, gated=False)
    if steps and cut.blocks.own.rows and not staged:
        steps[0] = steps[0]._replace(after=("stage",))
    return steps


def own_kept(index: int, blocks: Blocks, k: int) -> list[Step]:
    """Return the copy of the own shard into an output that holds the gathered x."""
    begin, rows, recv = blocks.own
    if not rows:
        return []
    source = Region(blocks.rank, "x", begin, begin + rows, 0, k)
    target = Region(blocks.rank, f"y{index}", recv, recv + rows, 0, k)
    return [Step(f"keep{index}.own", KEEP, "local_copy", "sm", (source,), (target,))]


def arrivals_kept(index: int, cut: GatherCut, item_bytes: int) -> list[Step]:
    """Return the waits for chunks, and their copies from the window into such an output."""
    copies = []
    for shard, chunk in cut.arrivals:
        piece, signal = cut.piece(shard, chunk), cut.signal(shard, chunk)
        box = (piece.row0, piece.row1, piece.col0, piece.col1)
        source, target = Region(cut.rank, WINDOW, *box), Region(cut.rank, f"y{index}", *box)
        name = f"keep{index}.{chunk}of{shard}"
        copies.append(Arrival(name, (signal,), (source,), (target,)))
    return moves(copies, KEEP, item_bytes)


def _groups(cut: GatherCut, schedule: Schedule) -> list[Group]:
    """Return the groups to multiply, in order, including the own shard."""
    groups: list[Group] = []
    own = cut.own_chunks()
    unit = schedule.compute
    if schedule.start == "local_first" and own:
        groups.append(Group("own", (), (cut.shard(),)))
        own = []
    if unit == "whole":
        chunks = [cut.piece(cut.rank, j) for j in own] + [cut.piece(*at) for at in cut.arrivals]
        groups.append(Group("whole", tuple(cut.data_words()), _merged(chunks)))
    elif unit == "per_step":
        groups += _per_step(cut, schedule, own)
    else:
        groups += _per_chunk(cut, schedule, own)
    return [group for group in groups if group.pieces]


def _per_step(cut: GatherCut, schedule: Schedule, own: list[int]) -> list[Group]:
    """Group chunks by step: one chunk of every peer, or all chunks of one peer."""
    by_step = schedule.order == "by_step"
    pieces: dict[int, list[Piece]] = {}
    signals: dict[int, list[Signal]] = {}
    for chunk in own:
        key = chunk if by_step else -1  # by peer: the own shard is the first step
        pieces.setdefault(key, []).append(cut.piece(cut.rank, chunk))
    for shard, chunk in cut.arrivals:
        key = chunk if by_step else (cut.rank - shard) % cut.world
        pieces.setdefault(key, []).append(cut.piece(shard, chunk))
        signals.setdefault(key, []).append(cut.signal(shard, chunk))
    return [
        Group(
            f"step{key}" if key >= 0 else "own",
            tuple(signals.get(key, ())),
            _merged(pieces[key]),
        )
        for key in sorted(pieces)
    ]


def _per_chunk(cut: GatherCut, schedule: Schedule, own: list[int]) -> list[Group]:
    """Return one group per chunk. Own chunks are read from x, first of all or of their step."""
    own_groups = [
        (chunk, Group(f"own.{chunk}", (), (cut.piece(cut.rank, chunk, direct=True),)))
        for chunk in own
    ]
    peer_groups = [
        (chunk, Group(f"{chunk}of{shard}", (cut.signal(shard, chunk),), (cut.piece(shard, chunk),)))
        for shard, chunk in cut.arrivals
    ]
    both = own_groups + peer_groups
    if schedule.order == "by_step":
        both.sort(key=lambda entry: entry[0])  # stable: the own chunk of a step stays first
    return [group for _, group in both]


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Join adjacent pieces, stacked or side by side, into larger ones."""
    columns: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.buffer, p.row0, p.row1, p.col0)):
        last = columns[-1] if columns else None
        if (
            last
            and (last.buffer, last.row0, last.row1) == (piece.buffer, piece.row0, piece.row1)
            and last.col1 == piece.col0
        ):
            columns[-1] = last._replace(col1=piece.col1)
        else:
            columns.append(piece)
    rows: list[Piece] = []
    for piece in sorted(columns, key=lambda p: (p.buffer, p.col0, p.col1, p.row0)):
        last = rows[-1] if rows else None
        if (
            last
            and (last.buffer, last.col0, last.col1) == (piece.buffer, piece.col0, piece.col1)
            and last.row1 == piece.row0
        ):
            rows[-1] = last._replace(row1=piece.row1)
        else:
            rows.append(piece)
    return tuple(rows)
