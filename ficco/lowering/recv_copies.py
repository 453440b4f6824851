"""Moving: copies of arrivals out of the window, several arrivals at a time.

The last arrival is copied alone, because the call ends after it. Each copy before it moves up to
four times as many bytes as the next one. A device copies faster within itself than a link delivers,
so no arrival waits for long, and the host of 8 ranks submits only 3 waits for 7 arrivals, and 3 or
4 copies. Small arrivals are copied with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.plan import Region, Signal, Step

__all__ = ["Arrival", "moves"]

SMALL_BYTES = 512 << 10  # the last copy moves up to this much: 0.3 us on an H200 after its start
GROWTH = 4  # the largest ratio of one copy's bytes to those of the next copy


class Arrival(NamedTuple):
    """Data that arrives together: its signals, its regions in the window, and their targets."""

    name: str
    signals: tuple[Signal, ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


def moves(arrivals: Sequence[Arrival], lane: str, item_bytes: int) -> list[Step]:
    """Return the waits for arrivals, in order of arrival, and their local copies."""
    sizes = [item_bytes * sum([region.area for region in arrival.reads]) for arrival in arrivals]
    steps = []
    for begin, end in _groups(sizes):
        group, name = arrivals[begin:end], arrivals[end - 1].name
        signals = tuple([signal for arrival in group for signal in arrival.signals])
        reads = tuple([region for arrival in group for region in arrival.reads])
        writes = tuple([region for arrival in group for region in arrival.writes])
        steps += [
            Step(f"wait.{name}", lane, "wait", "none", signals=signals),
            Step(f"move.{name}", lane, "local_copy", "sm", reads, writes),
        ]
    return steps


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of the arrivals that each copy moves; `sizes` are in bytes."""
    groups: list[tuple[int, int]] = []
    end, most = len(sizes), SMALL_BYTES
    while end:
        begin, total = end - 1, sizes[end - 1]
        while begin and total + sizes[begin - 1] <= most:
            begin -= 1
            total += sizes[begin]
        groups.append((begin, end))
        end, most = begin, GROWTH * max(total, SMALL_BYTES)
    return groups[::-1]
