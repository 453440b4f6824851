"""What plans of one launch share: needed axes, slices, and the two ends of their one lane.

A kernel that stores at peers runs such a plan (`ficco.kernels`), all signals of a call included.
Copies are its stores: unit "sm". Chunks are slices of columns, over all rows, in order. Peers that
write to mailboxes do not wait until they are free; see `ficco.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.errors import ScheduleError
from ficco.plan import Region, Signal, Step
from ficco.schedule import Schedule

__all__ = ["LANE", "Slice", "check_axes", "closed", "opened", "signals_step", "slices", "stored"]

LANE = "compute"
ALIGN = 16  # columns; so slices begin at a multiple of the widest store, where rows do

_NEEDED = {
    "cut": "columns", "route": "all_peers", "order": "by_step", "start": "together",
    "compute": "gated", "taper": "none", "pace": "free", "sums": "apart",
}  # fmt: skip


class Slice(NamedTuple):
    """Columns [begin, end), and the chunk number."""

    number: int
    begin: int
    end: int


def check_axes(schedule: Schedule) -> None:
    """Refuse a schedule that no launch does as a whole.

    Raises:
        ScheduleError: it names the nearest that works.
    """
    for axis, value in _NEEDED.items():
        if (found := getattr(schedule, axis)) != value:
            raise ScheduleError(
                f"transport='sm' with {axis}={found!r} is not implemented; the nearest that works "
                f"is {axis}={value!r}, or transport='dma'"
            )


def slices(size: int, chunks: int) -> list[Slice]:
    """Cut columns into so many slices, or fewer where they are too few."""
    width = max(1, -(-size // (chunks * ALIGN))) * ALIGN
    begins = range(0, size, width)
    return [Slice(j, begin, min(begin + width, size)) for j, begin in enumerate(begins)]


def signals_step(name: str, kind: str, signals: tuple[Signal, ...]) -> Step:
    """Return a step that waits for, raises or clears signals."""
    return Step(f"{LANE}.{name}", LANE, kind, "none", signals=signals)


def opened(rank: int, peers: Sequence[int], mailbox: bool = False) -> list[Step]:
    """Return the beginning: the peers' windows are free, and this rank enters."""
    free = tuple([Signal(rank, "free", peer) for peer in peers])
    waited = [signals_step("wait_free", "wait", free), signals_step("clear_free", "clear", free)]
    entered = tuple([Signal(peer, "entered", rank) for peer in peers])
    return [*(() if mailbox else waited), signals_step("enter", "raise", entered)]


def closed(
    rank: int, peers: Sequence[int], heard: Sequence[Signal], mailbox: bool = False
) -> list[Step]:
    """Return the end, after all that was `heard` and every peer's `entered` have been awaited."""
    entered = [Signal(rank, "entered", peer) for peer in peers]
    cleared = signals_step("clear", "clear", (*heard, *entered))
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
    """Return stores at peers, and the signals behind them."""
    signals = tuple([Signal(peer, "data", rank, chunk) for peer in peers])
    return [
        Step(f"push.{name}", LANE, "copy", "sm", tuple(sources), tuple(targets)),
        Step(f"sent.{name}", LANE, "raise", "none", signals=signals),
    ]
