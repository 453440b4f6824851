"""A ring of sums: what a rank makes of a block is added to what came, and passed on to the next.

A block's sum begins at the rank behind its owner and goes round the ring to the owner, who adds the
last part; no pass adds up at the end, and a rank pushes to the next one alone. That is the looped
reduce-scatter of Wang et al., "Overlap Communication with Dependent Computation via Decomposition
in Large Deep Learning Models" (ASPLOS 2023), with copy engines. While one chunk is on its way the
next is made; with two chunks a block, three ranks, on rank 0 (blocks 2, 1, 0 in turns 0, 1, 2):

    compute   2.0  2.1  [..] 1.0 and what came  [..] 1.1 and what came  [..] own 0  [..] own 1
    push           2.0->1  2.1->1               1.0->1               1.1->1

Each rank rounds what it passes on, as rings of collectives do; a sum's order of ranks is fixed.
All chunks go round together; with order="by_step" two at a time where sums are passed on, so that
the first are while the last are made. The route says nothing here.

What came is not added to where it came: a push that comes late, behind NaN that the watch has put
there in its stead, would take a sum away that was made of these, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ficco import registry
from ficco.errors import ScheduleError
from ficco.lowering.handshake import enter_all
from ficco.lowering.producing import COMPUTE, Piece, Producer
from ficco.lowering.scattering import BIAS, RECV, Chunk, Cut, Made, begun
from ficco.plan import Region, Signal, Step
from ficco.schedule import MAX_CHUNKS, Schedule

__all__ = ["OPENED", "PUSH", "Own", "check_ring", "circulate", "ring_words"]

PUSH = "push"  # one lane: two would share the link, and delay the chunk that is awaited first
OPENED = f"{PUSH}.wait_free"  # the step behind which peers' windows may be written
_AT_ONCE = 2  # chunks that go round in pairs: while one travels, the other is made


class Own(NamedTuple):
    """An own chunk that is done: which one, where it lies, and what to be done after."""

    chunk: int
    region: Region
    after: tuple[str, ...]


Finish = Callable[[Sequence[Own], Made], None]


def ring_words(schedule: Schedule, world: int) -> int:
    """Return how many signals of a peer the turns of a ring take."""
    return schedule.chunks * (world - 1)


def check_ring(op: str, schedule: Schedule, world: int) -> None:
    """Refuse what is no ring, or has more pieces than a window has signals.

    Raises:
        ScheduleError: it names the nearest that works.
    """
    if schedule.pace == "in_step" and not registry.get(op).flow.shares:
        raise ScheduleError(
            f"{op}: pace='in_step': what goes round a ring goes to one peer alone, so there are no "
            "turns; the nearest that works is pace='free'"
        )
    for axis, works in (("compute", "per_chunk"), ("start", "local_first")):
        if getattr(schedule, axis) != works:
            raise ScheduleError(
                f"{op}: sums='along' with {axis}={getattr(schedule, axis)!r}: sums go round a ring "
                f"chunk by chunk, and end at their owner; what works is {axis}={works!r}, or "
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
    """Return the steps that send all sums round, and the signals that this rank waits for.

    Args:
        cut: what is made, in which pieces; its own part is that of the output.
        producer: makes them.
        finish: adds the steps that follow on own chunks that went round together.
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
    """Make a chunk of a turn's block, with what has come of it; push it on, or tell it is done."""
    rank, world = cut.rank, cut.world
    block = (rank - 1 - turn) % world
    chunk = cut.sent(block, index)
    if chunk.empty:
        return []
    name = f"{index}in{turn}"
    came = [Signal(rank, "data", (rank - 1) % world, _slot(cut, turn - 1, index))] if turn else []
    made.steps += (
        [Step(f"wait.{name}", COMPUTE, "wait", "none", signals=tuple(came))] if came else []
    )
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
    return came


def _slot(cut: Cut, turn: int, index: int) -> int:
    """Return the place of the signal that tells what has left in a turn."""
    return turn * cut.schedule.chunks + index


def _arrived(cut: Cut, rank: int, turn: int, chunk: Chunk) -> Region:
    """Return where a chunk lies in a rank's window that it adds to in a turn: a slot each."""
    top = (turn - 1) * (cut.blocks.window_rows // (cut.world - 1))
    return Region(rank, RECV, top + chunk.row0, top + chunk.row1, chunk.col0, chunk.col1)


def _piece(cut: Cut, turn: int, block: int, chunk: Chunk) -> Piece:
    """Return what is made of a chunk in a turn, with what came; of the own one with the bias."""
    came = (_arrived(cut, cut.rank, turn, chunk),) if turn else ()
    last = block == cut.rank and cut.biased
    bias = (Region(cut.rank, BIAS, 0, 1, chunk.col0, chunk.col1),) if last else ()
    return cut.piece(block, chunk)._replace(add=(*came, *bias))
