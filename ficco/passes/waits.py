"""The ways in which a target waits for signals.

A stream waits by itself, or a kernel waits on the caller's stream. There are few such kernels at a
time, since the caller's stream runs them one after another: on lanes of copies they would hold
multiprocessors, on which kernels that they wait for may have to run. So copies wait for the end of
a kernel on the caller's stream.
"""

from __future__ import annotations

from ficco.plan import Signal
from ficco.program import Wait
from ficco.target import MOST_STORED

__all__ = ["waited"]


def waited(
    name: str, lane: str, after: tuple[str, ...], signals: tuple[Signal, ...], how: str
) -> list[Wait]:
    """Return the entries that wait for signals; a kernel waits for MOST_STORED signals at most.

    Args:
        name: id of the entry; several entries have it with a number.
        lane: of the entries.
        after: of the first entry.
        signals: all that must arrive.
        how: of `Wait`.
    """
    if how != "kernel" or len(signals) <= MOST_STORED:
        return [Wait(name, lane, after, signals, how)]
    return [
        Wait(f"{name}[{i}]", lane, () if i else after, signals[begin : begin + MOST_STORED], how)
        for i, begin in enumerate(range(0, len(signals), MOST_STORED))
    ]
