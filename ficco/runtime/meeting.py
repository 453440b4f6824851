"""How the ranks of a group meet, to share memory: the interface, and ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ficco.core.machine import Machine
from ficco.engine.groups import Group, new_group

Facts = dict[str, Any]


class Agenda(NamedTuple):
    """The purpose of a rendezvous, and this rank's contribution to it.

    Attributes:
        what: the purpose, equal on all ranks, for example "open the group".
        facts: JSON values that this rank sends to the leader.
        make: called by the leader with all ranks' facts; returns (file descriptor or None, facts).
        join: called by every rank with that pair; the descriptor is closed afterwards.
        broken: polled while waiting; returns an error that makes waiting pointless, or None.
        condition: returns a sentence about a missing rank, or an empty string.
        overtaken: polled until all ranks have arrived; returns the error if a peer makes another
            call instead, or None. Later a peer may be ahead because it left the rendezvous first.
    """

    what: str
    facts: Facts
    make: Callable[[list[Facts]], tuple[int | None, Facts]]
    join: Callable[[Any, Facts], Any]
    broken: Callable[[], Exception | None]
    condition: Callable[[int], str]
    overtaken: Callable[[], Exception | None] = lambda: None


class Meeting(Protocol):
    """How the ranks of a group meet; `rendezvous.Rendezvous` is that of processes.

    Attributes:
        world: number of ranks.
    """

    world: int

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of this process."""

    def meet(self, agenda: Agenda, timeout_s: float) -> Any:
        """Meet all ranks and return what `agenda.join` returned."""

    def memory(self, window_bytes: int) -> int | None:
        """Make the memory in which all ranks tell their state, for `group`; called on one rank."""

    def group(
        self, memory: int | None, window_bytes: int, machine: Machine, timeout_s: float
    ) -> Group:
        """Join that memory."""

    def close(self) -> None:
        """End the connections; other ranks see that this process has left."""

    def leave_to_parent(self) -> None:
        """Close this forked child's copies of the connections, which its parent keeps."""


class ThreadMeeting:
    """How ranks meet that are threads: one thread speaks for all. See `Meeting`.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.world, self.ranks = world, range(world)

    def meet(self, agenda: Agenda, timeout_s: float) -> Any:
        """See `Meeting.meet`."""
        if error := agenda.broken():
            raise error
        return agenda.join(*agenda.make([agenda.facts]))

    def memory(self, window_bytes: int) -> None:
        """See `Meeting.memory`; the group has memory of this process."""

    def group(
        self, memory: int | None, window_bytes: int, machine: Machine, timeout_s: float
    ) -> Group:
        """See `Meeting.group`."""
        group = new_group(self.world, machine, timeout_s)
        if window_bytes:
            group.grow(window_bytes)
        return group

    def close(self) -> None:
        """See `Meeting.close`; there are no connections."""

    def leave_to_parent(self) -> None:
        """See `Meeting.leave_to_parent`; there are no connections."""
