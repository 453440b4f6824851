"""The host engine's windows in memory shared by processes: creating, joining, state of ranks.

`runtime.rendezvous` connects the processes of a group and passes the memory to them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ficco import _native
from ficco.machine import Machine

__all__ = ["Group", "RankState", "create", "join", "state_of"]

Group = _native.Group


class RankState(NamedTuple):
    """The known state of a rank; see `Group.rank_state` in ficco/_native.pyi."""

    presence: Literal["absent", "here", "closed", "died"]
    age_s: float
    calls: int
    digest: int


def create(world: int, window_bytes: int) -> int:
    """Create the memory of a group and return its file descriptor, which the caller closes.

    Args:
        world: number of ranks.
        window_bytes: bytes of one copy of one window.

    Raises:
        MemoryError: the machine has too little memory; the message says how much.
    """
    return _native.create_memory(world, window_bytes)


def join(
    memory: int, world: int, rank: int, window_bytes: int, machine: Machine, timeout_s: float
) -> Group:
    """Join a group's memory as a rank; links are paced as in `host.new_group`.

    Raises:
        MemoryError: this rank's windows cannot be allocated.
    """
    link = machine.paced_link
    fabric = None
    if link is not None:
        per: Literal["pair", "port"] = "pair" if link.per == "pair" else "port"
        fabric = _native.join_fabric(memory, world, per, link.peak_gbps)
    return _native.join_group(memory, world, rank, window_bytes, timeout_s, fabric)


def state_of(group: Group, rank: int) -> RankState:
    """Return the current state of a rank."""
    return RankState(*group.rank_state(rank))
