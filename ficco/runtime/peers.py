"""What the shared memory of a group tells of its ranks: which have left, stopped or refused."""

from __future__ import annotations

import time
from collections.abc import Callable

from ficco.engines import shared_memory
from ficco.errors import EngineError
from ficco.runtime.failures import refused_in_words

__all__ = ["Breaks", "condition_of", "refusal_of_a_peer", "someone_left"]

# A heartbeat comes every 0.05 s. On a busy machine of 2 cores one came 0.2 s late at times.
_STALLED_S = 0.5
# How long a peer's refusal must last before it ends a rendezvous: where all ranks raise the error
# of a rendezvous, some of them raise it, and refuse the call, a little before the others.
_TOLD_S = 0.3


def condition_of(group: shared_memory.Group, rank: int, pid: int) -> str:
    """Return a sentence on a rank that is not as it should be, or nothing."""
    state = shared_memory.state_of(group, rank)
    name = f"Rank {rank} (pid {pid})"
    if state.presence == "died":
        return f"{name} has died."
    if state.presence == "closed":
        return f"{name} has closed its runtime."
    if state.age_s > _STALLED_S:
        return f"{name} has not been seen for {state.age_s:.1f} s: it has died or is stopped."
    return ""


def someone_left(group: shared_memory.Group, own: int) -> bool:
    """Whether a peer of rank `own` has died or closed its runtime, so that no reset can succeed."""
    peers = set(range(group.world)) - {own}
    return any(shared_memory.state_of(group, rank).presence in ("died", "closed") for rank in peers)


def refusal_of_a_peer(group: shared_memory.Group, own: int, remedy: str) -> EngineError | None:
    """Return the error of the next call of rank `own`, if a peer has refused to make it."""
    for rank in range(group.world):
        if rank != own and group.refuses_next(own, rank):
            said = refused_in_words(rank, group.refusal(rank))
            return EngineError(f"{said} Call {remedy} to go on.")
    return None


class Breaks:
    """Returns the error that ends a rendezvous of an open group; None while it can go on.

    A rank calls it again and again while it waits for the others.

    Args:
        failure: what the group has failed with, or None.
        refusal: what a peer refused, or None.
    """

    def __init__(
        self,
        failure: Callable[[], EngineError | None],
        refusal: Callable[[], EngineError | None],
    ) -> None:
        self._failure, self._refusal = failure, refusal
        self._refused_at: float | None = None

    def __call__(self) -> EngineError | None:
        """Return the error that ends the rendezvous."""
        failure = self._failure()
        if failure is not None:
            return failure
        refused = self._refusal()
        if refused is None:
            return None
        self._refused_at = self._refused_at or time.monotonic()
        return refused if time.monotonic() - self._refused_at > _TOLD_S else None
