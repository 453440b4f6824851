"""The steps that every call on a window has, whatever it sends: its beginning and its end.

    lane of pushes   wait free | clear free | raise entered at the peers | pushes, each with data
    compute lane     ... last read of the window | wait entered | clear entered, data | raise free

`free[q]` says that q is done with its window, so that q may be written to; `entered` says that this
rank has consumed `free`, so that its peers may raise it again. Why this suffices: see the verifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ficco.plan import Step, Word
from ficco.schedule import Schedule

__all__ = ["await_entered", "enter_all", "leave", "push_lanes"]


def push_lanes(schedule: Schedule, peers: Sequence[int]) -> dict[int, str]:
    """Return the lane that pushes to each peer: one for all, or one each."""
    if schedule.route == "rotation":
        return dict.fromkeys(peers, "push")
    return {peer: f"push{peer}" for peer in peers}


def enter_all(rank: int, lanes: Mapping[int, str]) -> list[Step]:
    """Return the steps that open the peers' windows to all pushes."""
    peers: dict[str, list[int]] = {}
    for peer, lane in lanes.items():
        peers.setdefault(lane, []).append(peer)
    return [step for lane, found in peers.items() for step in _enter(rank, found, lane)]


def _enter(rank: int, peers: Sequence[int], lane: str) -> list[Step]:
    free = tuple([Word(rank, "free", peer) for peer in peers])
    entered = tuple([Word(peer, "entered", rank) for peer in peers])
    return [
        Step(f"{lane}.wait_free", lane, "wait", "none", words=free),
        Step(f"{lane}.clear_free", lane, "clear", "none", words=free),
        Step(f"{lane}.enter", lane, "signal", "none", words=entered),
    ]


def await_entered(rank: int, peers: Sequence[int], lane: str) -> Step:
    """Return the wait for every peer's start of this call."""
    words = tuple([Word(rank, "entered", peer) for peer in peers])
    return Step(f"{lane}.wait_entered", lane, "wait", "none", words=words)


def leave(rank: int, peers: Sequence[int], lane: str, data: Sequence[Word]) -> list[Step]:
    """Return the steps that give the window back, after its last read and `await_entered`."""
    entered = [Word(rank, "entered", peer) for peer in peers]
    free = tuple([Word(peer, "free", rank) for peer in peers])
    return [
        Step(f"{lane}.clear", lane, "clear", "none", words=(*data, *entered)),
        Step(f"{lane}.leave", lane, "signal", "none", words=free),
    ]
