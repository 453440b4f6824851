"""Moving: what has come is copied out of the window, several arrivals at a time.

The last arrival is moved alone, for the call ends behind it. Those before it are moved four times
as many bytes at a time, those before them four times as many again: a device copies faster within
itself than a link brings, so that no arrival is kept waiting for long, while the host of 8 ranks
submits 3 waits for 7 arrivals, and 3 or 4 copies. Small arrivals are moved with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.plan import Region, Signal, Step

__all__ = ["Arrival", "moves"]

SMALL_BYTES = 512 << 10  # at the end, so much is moved at once: 0.3 us on an H200, behind the start
GROWTH = 4  # the ratio of bytes moved at once to those moved behind them, at most


class Arrival(NamedTuple):
    """What comes together: the signals that say so, where it lies and where it is to go."""

    name: str
    signals: tuple[Signal, ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


def moves(arrivals: Sequence[Arrival], lane: str, item_bytes: int) -> list[Step]:
    """Return the waits for arrivals, in the order in which they come, and their local copies."""
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
    """Return (begin, end) of what is moved at once, of arrivals of these bytes."""
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
