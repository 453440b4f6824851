"""Scattering: a rank makes pieces for all ranks, peers' first, and pushes each as it is made.

This mirrors gathering. Arrivals are summed with the own piece (matmul_reduce_scatter), summed and
pushed to all peers (matmul_all_reduce), or copied into the output (matmul_all_to_all, embedding).
With two chunks per block and three ranks, on rank 0 (hetero_fused_1d; own part last):

    compute   make 1.0 2.0   make 1.1 2.1   make own   [..] finish 0   [..] finish 1   clear, free
    push      [free] enter   1.0->1 2.0->2   1.1->1 2.1->2      (each after it is made)

If finishing also pushes, it begins while later steps are still made, so that links stay busy. Step
j is finished after step j+1 is made, which gives its chunks time to arrive. The own chunk of a step
is made directly before the step is finished:

    compute   make 1.0 2.0   make 1.1 2.1   own 0   [..] finish 0   own 1   [..] finish 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ficco.core.errors import ScheduleError
from ficco.lowering.attachments import row_regions
from ficco.lowering.cutting import arrivals, departures, turn_bounds
from ficco.lowering.handshake import await_entered, enter_all, push_lanes
from ficco.lowering.producing import COMPUTE, PARTIAL, Gated, Piece, Producer
from ficco.operators.blocks import Blocks
from ficco.plan import Region, Signal, Step
from ficco.plan.schedule import Schedule

RECV = "recv"  # window: what peers made for this rank


class Chunk(NamedTuple):
    """A chunk of a block: rows and columns within it."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def empty(self) -> bool:
        """Whether the chunk has no elements."""
        return self.row0 == self.row1 or self.col0 == self.col1


@dataclass(frozen=True)
class Cut:
    """The blocks that a rank sends and receives, and their chunks.

    Attributes:
        blocks: rows of the result per destination, and their rows in the receive buffers.
        schedule: the schedule that cuts them.
        widths: columns that each rank makes (they differ for embedding tables).
        recv_cols: the first column of each rank's data in the receive buffers.
        own: buffer of the own block, which begins at row `own_row` and column `own_col`.
        rows_added: single rows that the launch that adds up adds to the own block, by name.
        passed_on: whether that launch raises a signal per own chunk, because chunks are pushed on.
        known: cache of chunks.
    """

    blocks: Blocks
    schedule: Schedule
    widths: tuple[int, ...]
    recv_cols: tuple[int, ...]
    own: str
    own_row: int = 0
    own_col: int = 0
    rows_added: tuple[str, ...] = ()
    passed_on: bool = False
    known: dict[tuple[int, int, int, int], Chunk] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank of the plan."""
        return self.blocks.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.widths)

    def chunk(self, rows: int, width: int, index: int, turn: int = 0) -> Chunk:
        """Return a chunk of a block of `rows` by `width` that travels in `turn`."""
        key = (rows, width, index, turn if self.schedule.taper == "edge" else 0)
        chunk = self.known.get(key)
        if chunk is None:
            chunk = self.known[key] = self._chunk(*key)
        return chunk

    def _chunk(self, rows: int, width: int, index: int, turn: int) -> Chunk:
        by_rows = self.schedule.cut == "rows"
        bounds = turn_bounds(rows if by_rows else width, self.schedule, turn, 1, "head")
        begin, end = bounds[index], bounds[index + 1]
        return Chunk(begin, end, 0, width) if by_rows else Chunk(0, rows, begin, end)

    def sent(self, peer: int, index: int) -> Chunk:
        """Return a chunk of the block that this rank makes for `peer` (or for itself)."""
        rows, turn = self.blocks.outgoing[peer].rows, (peer - self.rank) % self.world
        return self.chunk(rows, self.widths[self.rank], index, turn)

    def received(self, peer: int, index: int) -> Chunk:
        """Return a chunk of the block that `peer` makes for this rank."""
        rows, turn = self.blocks.incoming[peer].rows, (self.rank - peer) % self.world
        return self.chunk(rows, self.widths[peer], index, turn)

    def arrivals(self) -> list[tuple[int, int]]:
        """Return (peer, chunk) of all arrivals, in order of arrival."""
        order = arrivals(self.schedule, self.world, self.rank)
        return [at for at in order if not self.received(*at).empty]

    def piece(self, peer: int, chunk: Chunk) -> Piece:
        """Return a chunk as a piece to make, in the workspace or in the own result."""
        begin = self.blocks.outgoing[peer].begin
        rows = (begin + chunk.row0, begin + chunk.row1)
        if peer == self.rank:
            top, left = self.own_row, self.own_col
            target = Region(
                self.rank, self.own, top + chunk.row0, top + chunk.row1,
                left + chunk.col0, left + chunk.col1,
            )  # fmt: skip
        else:
            target = Region(self.rank, PARTIAL, *rows, chunk.col0, chunk.col1)
        return Piece(*rows, chunk.col0, chunk.col1, target)

    def arrived(self, peer: int, chunk: Chunk) -> Region:
        """Return the region of a peer's chunk in the own window."""
        top, left = self.blocks.incoming[peer].recv, self.recv_cols[peer]
        return Region(
            self.rank, RECV, top + chunk.row0, top + chunk.row1,
            left + chunk.col0, left + chunk.col1,
        )  # fmt: skip


@dataclass
class Made:
    """The steps so far, the push lane of each peer, and the signals that launches raise."""

    steps: list[Step] = field(default_factory=list)
    lanes: dict[int, str] = field(default_factory=dict)
    launch_signals: list[Signal] = field(default_factory=list)


class _Group(NamedTuple):
    """Chunks that are made at once: (destination, chunk) pairs, own chunks, and their step."""

    name: str
    sent: list[tuple[int, int]]
    own: list[Chunk]
    step: int = -1


Finish = Callable[[int, "Made"], Sequence[Step]]


def finishes_between(schedule: Schedule) -> bool:
    """Return whether steps can be finished while later ones are made.

    This needs several steps, and steps that end before the whole launch does.
    """
    steps = schedule.order == "by_step" and schedule.compute in ("per_step", "per_chunk")
    return steps and schedule.chunks > 1


def make_and_push(cut: Cut, producer: Producer, finish: Finish | None = None) -> Made:
    """Return the steps that make all pieces and push those for peers.

    Args:
        cut: the pieces to make.
        producer: makes the pieces.
        finish: returns the steps that finish a step, if `finishes_between`. They are placed as
            early as possible without delaying others. None: the caller finishes after all this.
    """
    rank, schedule = cut.rank, cut.schedule
    if schedule.pace == "in_step":
        raise ScheduleError(
            "pace='in_step': pieces are made while others are pushed, and this sets the pace; the "
            "nearest that works is pace='free'"
        )
    peers = [(rank + turn) % cut.world for turn in range(1, cut.world)]
    made = Made(lanes=push_lanes(schedule, peers))
    made.steps += [*enter_all(rank, made.lanes), *begun(cut, producer)]
    order = [at for at in departures(schedule, cut.world, rank) if not cut.sent(*at).empty]
    own = [chunk for j in range(schedule.chunks) if not (chunk := cut.sent(rank, j)).empty]
    if schedule.start == "local_first" and own:
        rows, width = cut.blocks.own.rows, cut.widths[rank]
        own = [Chunk(0, rows, 0, width)]
    if schedule.compute == "gated":
        _gated(cut, producer, made, order, own)
        return made
    if finish is None:
        _make(cut, producer, made, _groups(schedule, cut, order, own))
        return made
    for groups, step in _in_turns(schedule, cut, order):
        _make(cut, producer, made, groups)
        made.steps += finish(step, made) if step >= 0 else ()
    return made


def begun(cut: Cut, producer: Producer) -> list[Step]:
    """Return the steps that run before any piece is made."""
    rows = [(block, cut.blocks.outgoing[block].rows) for block in range(cut.world)]
    width = cut.widths[cut.rank]
    return producer.begin(
        _merged([cut.piece(block, Chunk(0, high, 0, width)) for block, high in rows if high])
    )


def _make(cut: Cut, producer: Producer, made: Made, groups: Sequence[_Group]) -> None:
    """Add the steps that make groups, each followed by its pushes."""
    rank = cut.rank
    for group in groups:
        pieces = _merged(
            [cut.piece(peer, cut.sent(peer, j)) for peer, j in group.sent]
            + [cut.piece(rank, chunk) for chunk in group.own]
        )
        if not pieces:
            continue
        steps = producer.steps(group.name, pieces)
        made.steps += steps
        for peer, j in group.sent:
            made.steps += _push(cut, made.lanes, peer, j, after=tuple([s.id for s in steps]))


def _in_turns(
    schedule: Schedule, cut: Cut, order: list[tuple[int, int]]
) -> Iterator[tuple[list[_Group], int]]:
    """Yield the groups that each turn makes, and the step to finish after them, or -1.

    Turn j finishes step j-1.
    """
    own_chunks = _by_chunk(cut)
    together = schedule.start == "together"
    groups = _groups(schedule, cut, order, own=[])  # with "together", groups include own chunks
    for turn in range(schedule.chunks + 1):
        groups_now = [group for group in groups if group.step == turn]
        if not together and turn - 1 in own_chunks:
            groups_now.append(_Group(f"own.{turn - 1}", [], own_chunks[turn - 1]))
        yield groups_now, turn - 1


def _groups(
    schedule: Schedule, cut: Cut, order: list[tuple[int, int]], own: list[Chunk]
) -> list[_Group]:
    """Return the groups to make, in order: peers' chunks first, the whole own block last."""
    together = schedule.start == "together"
    last = [] if together else [_Group("own", [], own)]
    shared = own if together else []
    if schedule.compute == "whole":
        return [_Group("whole", order, shared), *last]
    by_step = schedule.order == "by_step"
    if schedule.compute == "per_step":
        sent: dict[int, list[tuple[int, int]]] = {}
        for peer, j in order:
            key = j if by_step else (peer - cut.rank) % cut.world
            sent.setdefault(key, []).append((peer, j))
        own_chunks = _by_chunk(cut) if together and by_step else {}
        groups = [
            _Group(f"step{key}", sent.get(key, []), own_chunks.get(key, []), key)
            for key in sorted({*sent, *own_chunks})
        ]
        apart = not together or not by_step  # the own part is not in the steps
        return [*groups, *([_Group("own", [], own)] if apart else [])]
    single = [_Group(f"{j}for{peer}", [(peer, j)], [], j) for peer, j in order]
    if together:
        single += [_Group(f"own.{j}", [], chunks, j) for j, chunks in _by_chunk(cut).items()]
    if by_step:
        single.sort(key=lambda group: group.step)  # stable: the own chunk of a step stays last
    return single + last


def _by_chunk(cut: Cut) -> dict[int, list[Chunk]]:
    chunks = ((j, cut.sent(cut.rank, j)) for j in range(cut.schedule.chunks))
    return {j: [chunk] for j, chunk in chunks if not chunk.empty}


def _gated(
    cut: Cut, producer: Producer, made: Made, order: list[tuple[int, int]], own: list[Chunk]
) -> None:
    """Add a launch whose parts raise signals when done; every push waits for its part.

    With sums="within" the own parts, one per chunk, are a second launch, which waits for peers'
    pushes. Thus no part that a peer's launch waits for is queued after a wait, whichever thread
    blocks run. The own parts raise signals if their chunks are pushed on.
    """
    rank = cut.rank
    groups = [
        Gated((cut.piece(peer, cut.sent(peer, j)),), raises=(Signal(rank, "ready", peer, j),))
        for peer, j in order
    ]
    within = cut.schedule.sums == "within"
    if not within:
        groups += [Gated((cut.piece(rank, chunk),)) for chunk in own]
    made.steps += producer.gated("gemm", groups)
    for peer, j in order:
        ready = Signal(rank, "ready", peer, j)
        made.launch_signals.append(ready)
        made.steps += _push(cut, made.lanes, peer, j, ready=ready)
    if within:
        made.steps.append(await_entered(rank, list(made.lanes), COMPUTE))
        summed = [_summed(cut, j, chunk) for j, (chunk,) in _by_chunk(cut).items()]
        made.steps += producer.gated("sum", summed)


def _summed(cut: Cut, index: int, chunk: Chunk) -> Gated:
    """Return an own chunk plus the part of every peer, in rank order."""
    peers = [peer for peer in range(cut.world) if peer != cut.rank]
    arrived = [cut.arrived(peer, chunk) for peer in peers]
    own = cut.piece(cut.rank, chunk)
    rows = row_regions(cut.rank, cut.rows_added, own.col0, own.col1)
    piece = own._replace(add=(*arrived, *rows))
    raised = (Signal(cut.rank, "ready", cut.rank, index),) if cut.passed_on else ()
    waits = tuple([Signal(cut.rank, "data", peer, index) for peer in peers])
    return Gated((piece,), waits, raised)


def _push(
    cut: Cut,
    lanes: dict[int, str],
    peer: int,
    index: int,
    after: tuple[str, ...] = (),
    ready: Signal | None = None,
) -> list[Step]:
    """Return a push followed by its signal. The push follows the steps `after`, or `ready`."""
    rank, lane, name = cut.rank, lanes[peer], f"{index}to{peer}"
    chunk, block = cut.sent(peer, index), cut.blocks.outgoing[peer]
    source = cut.piece(peer, chunk).target
    left = cut.recv_cols[rank]
    target = Region(
        peer, RECV, block.recv + chunk.row0, block.recv + chunk.row1,
        left + chunk.col0, left + chunk.col1,
    )  # fmt: skip
    steps = []
    if ready is not None:
        steps.append(Step(f"made.{name}", lane, "wait", "none", signals=(ready,)))
    steps.append(Step(f"push.{name}", lane, "copy", "dma", (source,), (target,), after=after))
    arrived = (Signal(peer, "data", rank, index),)
    steps.append(Step(f"sent.{name}", lane, "raise", "none", signals=arrived))
    return steps


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Join pieces that are stacked both in the result and in their target."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.target.buffer, p.col0, p.col1, p.row0)):
        last = joined[-1] if joined else None
        if (
            last
            and last.target.buffer == piece.target.buffer
            and (last.col0, last.col1, last.row1) == (piece.col0, piece.col1, piece.row0)
            and last.target.row1 == piece.target.row0
        ):
            target = last.target._replace(row1=piece.target.row1)
            joined[-1] = last._replace(row1=piece.row1, target=target)
        else:
            joined.append(piece)
    return joined
