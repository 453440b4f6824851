"""The beginning and the end of every call on a window: the steps that all calls share.

    push lane        wait free | pushes, each followed by data
    handshake lane   clear free | raise entered
                     (after the push lane's wait)
    compute lane     waits for data; before the last one, a wait for entered
                     clear data, entered | raise free
                     (after all waits and all reads of the window)

`free[q]` means that q is done with its window, so other ranks may write to it. Only where peers
read windows it means that q has read all of them: see `pulling`. `entered` means that
this rank has consumed `free`, so its peers may raise it again. The verifier proves that this
suffices.

A signal takes a stream 0.7 us. The separate handshake lane keeps signals out of the way of copies
and GEMMs. A lane that pushes to one peer only runs its own beginning. The end has no separate lane:
changing lanes takes longer than the signals, which one kernel stores on a GPU. The kernel of a
gated step handles the signals that follow it directly. The wait for `entered` comes before the last
compute, so that a peer that runs another call is detected before its data becomes a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ficco.plan import Signal, Step
from ficco.plan.schedule import Schedule

HANDSHAKE = "handshake"


def push_lanes(schedule: Schedule, peers: Sequence[int]) -> dict[int, str]:
    """Return the lane that pushes to each peer: one lane for all, or one per peer."""
    if schedule.route == "rotation":
        return dict.fromkeys(peers, "push")
    return {peer: f"push{peer}" for peer in peers}


def enter_all(rank: int, lanes: Mapping[int, str]) -> list[Step]:
    """Return the steps that open the peers' windows to all pushes."""
    peers: dict[str, list[int]] = {}
    for peer, lane in lanes.items():
        peers.setdefault(lane, []).append(peer)
    return [step for lane, targets in peers.items() for step in _enter(rank, targets, lane)]


def _enter(rank: int, peers: Sequence[int], lane: str) -> list[Step]:
    free = tuple([Signal(rank, "free", peer) for peer in peers])
    entered = tuple([Signal(peer, "entered", rank) for peer in peers])
    waited = f"{lane}.wait_free"
    enter_lane, after = (lane, ()) if len(peers) == 1 else (HANDSHAKE, (waited,))
    return [
        Step(waited, lane, "wait", "none", signals=free),
        Step(f"{lane}.clear_free", enter_lane, "clear", "none", signals=free, after=after),
        Step(f"{lane}.enter", enter_lane, "raise", "none", signals=entered),
    ]


def await_entered(rank: int, peers: Sequence[int], lane: str) -> Step:
    """Return the step that waits until every peer has started this call."""
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
    """Return a plan's steps with the wait for `entered` and the release of the window added.

    Args:
        rank: the rank of the plan.
        peers: the peers, in the order in which they are notified of the end.
        data: the signals that this call waits for on any lane: those of peers' data, and those that
            launches raise for own parts.
        steps: the steps of the plan so far.
        lane: the lane that waits for data and reads the window. If it already waits for `entered`,
            no second wait is added.
        beside: a second lane that waits and reads, or "". It waits for `entered` if `lane` has no
            waits.
        reading: further lanes that read the window, after the waits of the others.
    """
    entered = tuple([Signal(rank, "entered", peer) for peer in peers])
    free = tuple([Signal(peer, "free", rank) for peer in peers])
    result = list(steps)
    waits = {step.lane: i for i, step in enumerate(steps) if _waits(step)}  # last wait of each lane
    if not any(step.lane == lane and entered[0] in step.signals for step in steps):
        where = next((name for name in (lane, beside) if name in waits), HANDSHAKE)
        result.insert(waits.get(where, len(steps)), await_entered(rank, peers, where))
    known = {*data, *entered}
    others = {s.lane: s.id for s in result if s.lane != lane and known.intersection(s.signals)}
    last = {step.lane: step.id for step in steps}
    end = lane if lane in last else HANDSHAKE
    ends = others | {name: last[name] for name in (beside, *reading) if name in last}
    signals, after = (*data, *entered), tuple(ends.values())
    return [
        *result,
        Step(f"{end}.clear", end, "clear", "none", signals=signals, after=after),
        Step(f"{end}.leave", end, "raise", "none", signals=free),
    ]
