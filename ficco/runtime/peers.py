"""Read from a group's shared memory which ranks have left, stopped or refused a call."""

from __future__ import annotations

import time
from collections.abc import Callable

from ficco.engines import shared_memory
from ficco.errors import EngineError
from ficco.runtime.failures import refused_in_words

__all__ = ["Breaks", "condition_of", "refusal_of_a_peer", "someone_left"]

# Heartbeats are 0.05 s apart. On a busy machine of 2 cores some were 0.2 s late.
_STALLED_S = 0.5
# How long a peer's refusal must last before it ends a rendezvous. If all ranks raise the error of
# a rendezvous, some of them raise it, and refuse the call, a little before the others.
_REFUSAL_LASTS_S = 0.3


def condition_of(group: shared_memory.Group, rank: int, pid: int) -> str:
    """Return a sentence about a rank that has died, left or stalled; else an empty string."""
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
    """Return whether a peer of rank `own` died or closed its runtime: a reset cannot succeed."""
    peers = set(range(group.world)) - {own}
    return any(shared_memory.state_of(group, rank).presence in ("died", "closed") for rank in peers)


def refusal_of_a_peer(group: shared_memory.Group, own: int, remedy: str) -> EngineError | None:
    """Return the error of the next call of rank `own`, if a peer has refused to make it."""
    for rank in range(group.world):
        if rank != own and group.refuses_next(own, rank):
            refusal = refused_in_words(rank, group.refusal(rank))
            return EngineError(f"{refusal} Call {remedy} to go on.")
    return None


class Breaks:
    """Returns the error that ends a rendezvous of an open group; None while it can continue.

    A rank polls it while it waits for the others.

    Args:
        failure: returns the group's failure, or None.
        refusal: returns the error of a call that a peer refuses, or None.
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
        refusal = self._refusal()
        if refusal is None:
            return None
        self._refused_at = self._refused_at or time.monotonic()
        return refusal if time.monotonic() - self._refused_at > _REFUSAL_LASTS_S else None
