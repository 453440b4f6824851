"""Read from a group's shared memory which ranks have left, stopped or refused a call."""

from __future__ import annotations

import time
from collections.abc import Callable

from ficco.engines import shared_memory
from ficco.errors import EngineError, counted
from ficco.runtime.failures import ALIKE, refused_in_words

__all__ = [
    "Breaks", "condition_of", "difference_in_calls", "lateness", "overtaken_by_a_peer",
    "rank_ahead", "refusal_of_a_peer", "someone_left",
]  # fmt: skip

# Heartbeats are 0.05 s apart. On a busy machine of 2 cores some were 0.2 s late.
_STALLED_S = 0.5
# How long a peer's refusal must last before it ends a rendezvous. If all ranks raise the error of
# a rendezvous, some of them raise it, and refuse the call, a little before the others.
_REFUSAL_LASTS_S = 0.3
_WORDS_WITHIN_S = 1.0  # for a peer whose call fails to say which call it was
_POLL_S = 0.02
_CALLS = 1 << 32  # calls are counted modulo this number


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
            refusal = refused_in_words(rank, group.refusal(own, rank))
            return EngineError(f"{refusal} Call {remedy} to go on.")
    return None


def difference_in_calls(group: shared_memory.Group, own: int, rank: int) -> str:
    """Return a sentence if rank `rank` has begun more or fewer calls than `own`, else ""."""
    missing_calls, own_calls = (shared_memory.state_of(group, r).calls for r in (rank, own))
    if missing_calls == own_calls:
        return ""
    return (
        f"Rank {rank} runs, and has begun {counted(missing_calls, 'call')} where rank {own} has "
        f"{own_calls}."
    )


def lateness(group: shared_memory.Group, waiter: int, raiser: int, own_call: str) -> str:
    """Return sentences if the rank that is waited for makes fewer calls, or another one, else "".

    Args:
        group: the group.
        waiter: the rank that waits.
        raiser: the rank that should raise the signal.
        own_call: a sentence about the call of this rank; may be empty.
    """
    waiting, raising = (shared_memory.state_of(group, rank) for rank in (waiter, raiser))
    if raising.calls < waiting.calls:
        return (
            f"Rank {raiser} runs, but has begun {counted(raising.calls, 'call')} and rank {waiter} "
            f"{waiting.calls}."
        )
    if raising.digest != waiting.digest:
        return f"Rank {raiser} runs another call than rank {waiter}. {own_call}".strip()
    return ""


def rank_ahead(group: shared_memory.Group, own: int) -> int | None:
    """Return a rank that has begun more calls than rank `own`, or None."""
    begun = shared_memory.state_of(group, own).calls
    for rank in range(group.world):
        if 0 < (shared_memory.state_of(group, rank).calls - begun) % _CALLS < _CALLS // 2:
            return rank
    return None


def overtaken_by_a_peer(
    group: shared_memory.Group, own: int, call: str, remedy: str
) -> EngineError | None:
    """Return the error of a rank that meets the others for a call, if a peer makes another one.

    A peer that makes the same call would meet, too. The peer is notified: its call fails soon.

    Args:
        group: the group.
        own: this rank.
        call: a sentence about its call.
        remedy: the call that makes the group usable again.
    """
    rank = rank_ahead(group, own)
    if rank is None:
        return None
    group.refuse(own, call)
    deadline = time.monotonic() + _WORDS_WITHIN_S
    while not (words := group.last_refusal(rank)).startswith(f"Rank {rank} runs"):
        if time.monotonic() > deadline:
            begun = shared_memory.state_of(group, rank).calls
            words = f"Rank {rank} has begun call number {begun} of the group."
            break
        time.sleep(_POLL_S)
    return EngineError(
        f"rank {own} runs another call than rank {rank}. {call} {words} {ALIKE}. Call {remedy} to "
        "go on."
    )


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
