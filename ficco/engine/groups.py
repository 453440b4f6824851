"""Where the ranks of a group tell failures, refused calls and their state to each other.

The words are in the memory of one process, or in memory that processes share. `runtime.rendezvous`
passes shared memory to the processes of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from ficco import _native
from ficco.core.machine import Machine

Group = _native.Group


class RankState(NamedTuple):
    """The known state of a rank; see `Group.rank_state` in ficco/_native.pyi."""

    presence: Literal["absent", "here", "closed", "died"]
    age_s: float
    calls: int
    digest: int
    preparing: bool


def new_group(world: int, machine: Machine, timeout_s: float) -> Group:
    """Return a group whose ranks are threads; links are paced if the machine has a paced link."""
    return Group(world, timeout_s, _fabric(machine, partial(_native.Fabric, world)))


def create(world: int, window_bytes: int) -> int:
    """Create the memory of a group of processes; return its file descriptor, for the caller.

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
    """Join a group's memory as a rank; links are paced as in `new_group`.

    Raises:
        MemoryError: this rank's windows cannot be allocated.
    """
    fabric = _fabric(machine, partial(_native.join_fabric, memory, world))
    return _native.join_group(memory, world, rank, window_bytes, timeout_s, fabric)


def _fabric(
    machine: Machine, make: Callable[[Literal["pair", "port"], float], _native.Fabric]
) -> _native.Fabric | None:
    """Make the paced links of a machine; return None if it has none."""
    link = machine.paced_link
    if link is None:
        return None
    return make("pair" if link.per == "pair" else "port", link.peak_gbps)


def state_of(group: Group, rank: int) -> RankState:
    """Return the current state of a rank."""
    return RankState(*group.rank_state(rank))
