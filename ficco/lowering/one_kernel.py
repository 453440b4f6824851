"""Shared parts of plans that are one launch: required axes, slices, and the ends of their lane.

A kernel that stores at peers runs such a plan (`ficco.kernels`), including all signals of the call.
Copies are the kernel's stores: unit "sm". Chunks are slices of columns, over all rows, in order.
Writers to mailboxes do not wait for them to be free; see `ficco.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.errors import ScheduleError
from ficco.plan import Region, Signal, Step
from ficco.schedule import Schedule

__all__ = ["LANE", "Slice", "check_axes", "closed", "opened", "signals_step", "slices", "stored"]

LANE = "compute"
ALIGN = 16  # columns: slices begin at a multiple of the widest store, if rows do

_NEEDED = {
    "cut": "columns", "route": "all_peers", "order": "by_step", "start": "together",
    "compute": "gated", "taper": "none", "pace": "free", "sums": "apart",
}  # fmt: skip


class Slice(NamedTuple):
    """Columns [begin, end), and the chunk number."""

    number: int
    begin: int
    end: int


def check_axes(schedule: Schedule, **others: str) -> None:
    """Reject a schedule that one launch cannot run.

    Args:
        schedule: the schedule.
        others: axes that need another value than a kernel that multiplies and stores at peers.

    Raises:
        ScheduleError: the message names the nearest schedule that works.
    """
    needed = _NEEDED | others
    wrong = [axis for axis, value in needed.items() if getattr(schedule, axis) != value]
    if wrong:
        found = ", ".join(f"{axis}={getattr(schedule, axis)!r}" for axis in wrong)
        nearest = ", ".join(f"{axis}={needed[axis]!r}" for axis in wrong)
        raise ScheduleError(
            f"transport='sm' with {found} is not implemented; the nearest that works is {nearest}, "
            "or transport='dma'"
        )


def slices(size: int, chunks: int) -> list[Slice]:
    """Cut `size` columns into `chunks` slices, or fewer if there are too few columns."""
    width = max(1, -(-size // (chunks * ALIGN))) * ALIGN
    begins = range(0, size, width)
    return [Slice(j, begin, min(begin + width, size)) for j, begin in enumerate(begins)]


def signals_step(name: str, kind: str, signals: tuple[Signal, ...]) -> Step:
    """Return a step that waits for, raises or clears signals."""
    return Step(f"{LANE}.{name}", LANE, kind, "none", signals=signals)


def opened(rank: int, peers: Sequence[int], mailbox: bool = False) -> list[Step]:
    """Return the beginning: wait until the peers' windows are free, then enter."""
    free = tuple([Signal(rank, "free", peer) for peer in peers])
    waits = [signals_step("wait_free", "wait", free), signals_step("clear_free", "clear", free)]
    entered = tuple([Signal(peer, "entered", rank) for peer in peers])
    return [*(() if mailbox else waits), signals_step("enter", "raise", entered)]


def closed(
    rank: int, peers: Sequence[int], received: Sequence[Signal], mailbox: bool = False
) -> list[Step]:
    """Return the end, after the waits for all `received` signals and for peers' `entered`."""
    entered = [Signal(rank, "entered", peer) for peer in peers]
    cleared = signals_step("clear", "clear", (*received, *entered))
    free = tuple([Signal(peer, "free", rank) for peer in peers])
    return [cleared, *(() if mailbox else (signals_step("leave", "raise", free),))]


def stored(
    rank: int,
    name: str,
    sources: Sequence[Region],
    targets: Sequence[Region],
    peers: Sequence[int],
    chunk: int,
) -> list[Step]:
    """Return stores at peers, and the signals after them."""
    signals = tuple([Signal(peer, "data", rank, chunk) for peer in peers])
    return [
        Step(f"push.{name}", LANE, "copy", "sm", tuple(sources), tuple(targets)),
        Step(f"sent.{name}", LANE, "raise", "none", signals=signals),
    ]
