"""A ring of sums: a rank adds its part of a block to the sum that arrived, and pushes the result.

A block's sum begins at the rank after its owner and circulates to the owner, which adds the last
part. There is no final pass that adds up, and a rank pushes to the next rank only. This is the
looped reduce-scatter of Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models" (ASPLOS 2023), with copy engines. While one chunk
travels the next is made. With two chunks per block and three ranks, on rank 0 (blocks 2, 1, 0 in
turns 0, 1, 2; "+in" adds the sum that arrived):

    compute   2.0  2.1  [..] 1.0 +in   [..] 1.1 +in   [..] own 0   [..] own 1
    push           2.0->1  2.1->1      1.0->1         1.1->1

Each rank rounds the sum that it pushes, as rings of collectives do. The order of ranks in a sum is
fixed. All chunks circulate together. If owners push sums on and order="by_step", two chunks
circulate at a time, so that the first sums are pushed while the last are made. The route has no
effect.

A rank does not add in place, in the window. If a push times out, the watchdog stores NaN there. A
late push would then overwrite a sum made from this NaN, and the error would stay undetected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ficco.core.errors import ScheduleError
from ficco.lowering.attachments import row_regions
from ficco.lowering.handshake import enter_all
from ficco.lowering.producing import COMPUTE, Piece, Producer
from ficco.lowering.scattering import RECV, Chunk, Cut, Made, begun
from ficco.operators import registry
from ficco.plan import Region, Signal, Step
from ficco.plan.schedule import MAX_CHUNKS, Schedule

PUSH = "push"  # one lane: two would share the link and delay the chunk that is needed first
OPENED = f"{PUSH}.wait_free"  # after this step peers' windows may be written
_AT_ONCE = 2  # chunks that circulate together: while one travels, the other is made


class Own(NamedTuple):
    """A finished own chunk: its index, its region, and the steps that its pushes must follow."""

    chunk: int
    region: Region
    after: tuple[str, ...]


Finish = Callable[[Sequence[Own], Made], None]


def ring_words(schedule: Schedule, world: int) -> int:
    """Return the number of signals per peer that the turns of a ring use."""
    return schedule.chunks * (world - 1)


def check_ring(op: str, schedule: Schedule, world: int) -> None:
    """Reject schedules that are not a ring, or have more pieces than a window has signals.

    Raises:
        ScheduleError: the message names the nearest schedule that works.
    """
    if schedule.pace == "in_step" and not registry.get(op).flow.shares:
        raise ScheduleError(
            f"{op}: pace='in_step': on a ring a rank pushes to one peer only, so there are no "
            "turns; the nearest that works is pace='free'"
        )
    for axis, works in (("compute", "per_chunk"), ("start", "local_first")):
        if getattr(schedule, axis) != works:
            raise ScheduleError(
                f"{op}: sums='along' with {axis}={getattr(schedule, axis)!r}: sums circulate on a "
                f"ring, chunk by chunk, and end at their owner; what works is {axis}={works!r}, or "
                "sums='apart'"
            )
    turns = world if registry.get(op).flow.shares else world - 1
    if schedule.chunks * turns > MAX_CHUNKS:
        raise ScheduleError(
            f"{op}: sums='along' with grain={schedule.chunks}; every chunk travels {turns} times, "
            f"so grain is at most {MAX_CHUNKS // turns}"
        )


def circulate(
    cut: Cut, producer: Producer, finish: Finish | None = None
) -> tuple[Made, list[Signal]]:
    """Return the steps that circulate all sums, and the signals that this rank waits for.

    Args:
        cut: the pieces to make; its own part is in the output.
        producer: makes the pieces.
        finish: adds the steps that follow own chunks that circulated together.
    """
    peers = [(cut.rank + turn) % cut.world for turn in range(1, cut.world)]
    made = Made(lanes=dict.fromkeys(peers, PUSH))
    made.steps += [*enter_all(cut.rank, made.lanes), *begun(cut, producer)]
    chunks = range(cut.schedule.chunks)
    in_pairs = finish is not None and cut.schedule.order == "by_step"
    together = _AT_ONCE if in_pairs else len(chunks)
    signals: list[Signal] = []
    for begin in range(0, len(chunks), together):
        done: list[Own] = []
        for turn in range(cut.world):
            for index in chunks[begin : begin + together]:
                signals += _turn(cut, producer, made, turn, index, done)
        if finish is not None:
            finish(done, made)
    return made, signals


def _turn(
    cut: Cut, producer: Producer, made: Made, turn: int, index: int, done: list[Own]
) -> list[Signal]:
    """Make a chunk of a turn's block plus the sum that arrived; push it, or add it to `done`."""
    rank, world = cut.rank, cut.world
    block = (rank - 1 - turn) % world
    chunk = cut.sent(block, index)
    if chunk.empty:
        return []
    name = f"{index}in{turn}"
    waits = [Signal(rank, "data", (rank - 1) % world, _slot(cut, turn - 1, index))] if turn else []
    if waits:
        made.steps.append(Step(f"wait.{name}", COMPUTE, "wait", "none", signals=tuple(waits)))
    piece = _piece(cut, turn, block, chunk)
    made.steps += producer.steps(name, [piece])
    after = (made.steps[-1].id,)
    if block == rank:
        done.append(Own(index, piece.target, after))
    else:
        follower = (rank + 1) % world
        target = _arrived(cut, follower, turn + 1, chunk)
        arrived = (Signal(follower, "data", rank, _slot(cut, turn, index)),)
        made.steps += [
            Step(f"push.{name}", PUSH, "copy", "dma", (piece.target,), (target,), after=after),
            Step(f"sent.{name}", PUSH, "raise", "none", signals=arrived),
        ]
    return waits


def _slot(cut: Cut, turn: int, index: int) -> int:
    """Return the index of the signal of a chunk that is pushed in a turn."""
    return turn * cut.schedule.chunks + index


def _arrived(cut: Cut, rank: int, turn: int, chunk: Chunk) -> Region:
    """Return the region of a rank's window that holds a turn's chunk; each turn has a slot."""
    top = (turn - 1) * (cut.blocks.window_rows // (cut.world - 1))
    return Region(rank, RECV, top + chunk.row0, top + chunk.row1, chunk.col0, chunk.col1)


def _piece(cut: Cut, turn: int, block: int, chunk: Chunk) -> Piece:
    """Return the piece of a turn's chunk, plus the sum that arrived; the own one plus the bias."""
    incoming = (_arrived(cut, cut.rank, turn, chunk),) if turn else ()
    names = cut.rows_added if block == cut.rank else ()
    rows = row_regions(cut.rank, names, chunk.col0, chunk.col1)
    return cut.piece(block, chunk)._replace(add=(*incoming, *rows))
