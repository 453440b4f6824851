"""The steps that every call on a window has, whatever it sends: its beginning and its end.

    push lane        wait free | pushes, each with data behind it
    handshake lane   clear free | raise entered
                     (behind the push lane's wait)
    compute lane     waits for data, and before the last of them for entered
                     clear data, entered | raise free
                     (behind all waits; behind all reads of the window)

`free[q]` says that q is done with its window, so that q may be written to; `entered` says that this
rank has consumed `free`, so that its peers may raise it again. Why this suffices: see the verifier.

A lane of its own keeps signals, each of which takes a stream 0.7 us, out of the way of copies and
GEMMs; one that pushes to one peer alone does its own beginning. At the end there is nothing to keep
out of the way of: going to another lane and back takes longer than the signals, which on a GPU one
kernel stores. The kernel of a gated step does those that stand right behind it. Waiting for
`entered` before the last compute means that a peer that runs another call is noticed while its data
can still be kept from becoming a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ficco.plan import Signal, Step
from ficco.schedule import Schedule

__all__ = ["HANDSHAKE", "await_entered", "closed", "enter_all", "push_lanes"]

HANDSHAKE = "handshake"


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
    free = tuple([Signal(rank, "free", peer) for peer in peers])
    entered = tuple([Signal(peer, "entered", rank) for peer in peers])
    waited = f"{lane}.wait_free"
    there, after = (lane, ()) if len(peers) == 1 else (HANDSHAKE, (waited,))
    return [
        Step(waited, lane, "wait", "none", signals=free),
        Step(f"{lane}.clear_free", there, "clear", "none", signals=free, after=after),
        Step(f"{lane}.enter", there, "raise", "none", signals=entered),
    ]


def await_entered(rank: int, peers: Sequence[int], lane: str) -> Step:
    """Return the wait for every peer's start of this call."""
    signals = tuple([Signal(rank, "entered", peer) for peer in peers])
    return Step(f"{lane}.wait_entered", lane, "wait", "none", signals=signals)


def _waits(step: Step) -> bool:
    return step.kind == "wait" or any(part.waits for part in step.parts)


def closed(
    rank: int,
    peers: Sequence[int],
    data: Sequence[Signal],
    steps: Sequence[Step],
    lane: str,
    beside: str = "",
    reading: Sequence[str] = (),
) -> list[Step]:
    """Return all steps of a plan: with the wait for `entered`, and those that give the window back.

    Args:
        rank: whose plan it is.
        peers: in the order in which they hear of the end.
        data: the signals that this call has waited for, on any lane: of peers' data, and of own
            parts that a launch told of.
        steps: of the plan so far.
        lane: the one that waits for data and reads the window. If it has waited for `entered`
            already, that is not done again.
        beside: another lane that does both, where there is one: where the former has nothing to
            wait for, this one waits for `entered`.
        reading: lanes that read the window, too, behind what those wait for.
    """
    entered = tuple([Signal(rank, "entered", peer) for peer in peers])
    free = tuple([Signal(peer, "free", rank) for peer in peers])
    result = list(steps)
    waits = {step.lane: i for i, step in enumerate(steps) if _waits(step)}  # the last of each lane
    if not any(step.lane == lane and entered[0] in step.signals for step in steps):
        where = next((name for name in (lane, beside) if name in waits), HANDSHAKE)
        result.insert(waits.get(where, len(steps)), await_entered(rank, peers, where))
    known = {*data, *entered}
    others = {s.lane: s.id for s in result if s.lane != lane and known.intersection(s.signals)}
    last = {step.lane: step.id for step in steps}
    end = lane if lane in last else HANDSHAKE
    behind = others | {name: last[name] for name in (beside, *reading) if name in last}
    signals, after = (*data, *entered), tuple(behind.values())
    return [
        *result,
        Step(f"{end}.clear", end, "clear", "none", signals=signals, after=after),
        Step(f"{end}.leave", end, "raise", "none", signals=free),
    ]
