"""Rendezvous of a group's processes, in which they agree on the memory that they share.

Every rank has a socket to rank 0, the leader (see `bootstrap`). A rank that enters a rendezvous
sends "ask". The leader answers "here", waits for all ranks, makes the memory, sends its file
descriptor, and sends "go" when all have joined.

    rank   ask ........ here | memory -> join -> joined | go
    leader      here -> all  | make   -> join -> all    | go

Any error ends the rendezvous on every rank, with the same message.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ficco.core.call_lock import CallLock
from ficco.core.errors import EngineError, TimeoutExceeded
from ficco.core.machine import Machine
from ficco.engine import groups
from ficco.runtime.bootstrap import LEADER, MESSAGE_BYTES, Connected, Members, connected, ready
from ficco.runtime.failures import CLOSED
from ficco.runtime.meeting import Agenda, Facts

_Joined = TypeVar("_Joined")

_POLL_S = 0.05  # how often a waiting rank checks whether the group has failed
_GRACE_S = 1.0  # for the leader's verdict to arrive after the leader's deadline


class _Ended(Exception):
    """The rendezvous has ended without a result; `verdict` is the reason, equal on all ranks."""

    def __init__(self, kind: str, **words: Any) -> None:
        super().__init__(kind)
        self.verdict: Facts = {"kind": kind, **words}

    @classmethod
    def late(cls, waiter: int, what: str, late: Mapping[int, str], seconds: float) -> _Ended:
        """Make the verdict for ranks that did not arrive; `late` has a sentence about each."""
        ranks = " and ".join(f"rank {rank}" for rank in sorted(late))
        conditions = " ".join(text for _, text in sorted(late.items()) if text)
        hint = f"{conditions} Every rank must make the same calls in the same order.".strip()
        return cls(
            "late", rank=waiter, what=what, who=ranks, seconds=seconds, hint=hint,
            missing=sorted(late),
        )  # fmt: skip


def _unpacked_error(verdict: Facts) -> Exception:
    if verdict["kind"] == "memory":
        return MemoryError(verdict["text"])
    if verdict["kind"] == "late":
        return TimeoutExceeded(
            verdict["rank"], verdict["what"], verdict["who"], verdict["seconds"], verdict["hint"]
        )
    return EngineError(verdict["text"])


class Rendezvous:
    """The permanent connection between a group's processes.

    It is a `Meeting` of ranks that are processes.

    Attributes:
        rank, world: this process's rank, and the number of ranks.
        ranks: this process's rank alone.
        pids: process ids by rank.
        turn: how often the ranks have opened the group; equal on all ranks.
    """

    def __init__(
        self,
        members: Members,
        facts: Facts,
        timeout_s: float,
        broken: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        """Connect all ranks; see `bootstrap.connected`."""
        self.rank, self.world = members.rank, members.world
        self.ranks = (self.rank,)
        connections = Connected({}, [os.getpid()], members.turn)
        self._departure: Facts | None = None  # verdict on all rendezvous after a rank has left
        if self.world > 1:
            connections = connected(members, facts, timeout_s, broken)
        self._peers, self.pids, self.turn = connections
        self._turn = 0  # number of rendezvous
        self._lock = CallLock()

    # ---- rendezvous

    def meet(self, agenda: Agenda, timeout_s: float) -> Any:
        """Meet all ranks and return what `agenda.join` returned.

        Raises:
            TimeoutExceeded: a rank did not arrive within `timeout_s`; the message names it.
            MemoryError: a rank could not allocate the memory.
            EngineError: a rank has left, came for another purpose, or could not join; or this rank
                has closed its runtime.
        """
        if self.world == 1:
            return _joined(agenda, *agenda.make([agenda.facts]))
        if not self._peers:
            raise EngineError(CLOSED)
        with self._lock():
            self._turn += 1
            try:
                if self._departure:
                    raise _Ended(**self._departure)
                if self.rank == LEADER:
                    return self._lead(agenda, timeout_s)
                return self._follow(agenda, timeout_s)
            except _Ended as ended:
                raise _unpacked_error(ended.verdict) from None

    def memory(self, window_bytes: int) -> int:
        """Make the group's shared memory; return its file descriptor. See `Meeting.memory`."""
        return groups.create(self.world, window_bytes)

    def group(
        self, memory: int | None, window_bytes: int, machine: Machine, timeout_s: float
    ) -> groups.Group:
        """Join the group's shared memory. See `Meeting.group`."""
        assert memory is not None  # the leader has made it
        return groups.join(memory, self.world, self.rank, window_bytes, machine, timeout_s)

    def gather(self, what: str, value: Any, *waits: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank. Raises as `meet`.

        Args:
            what: the purpose, equal on all ranks.
            value: of this rank.
            waits: see `share`.
        """
        values: list[Any] = self.share(
            what,
            lambda brought: (None, {"all": [facts["brings"] for facts in brought]}),
            lambda _, facts: facts["all"],
            *waits,
            brings=json.loads(json.dumps(value)),  # the leader's value, too
        )
        return values

    def share(
        self,
        what: str,
        make: Callable[[list[Facts]], tuple[int | None, Facts]],
        join: Callable[[Any, Facts], _Joined],
        timeout_s: float,
        call: str = "",
        overtaken: Callable[[], Exception | None] = lambda: None,
        broken: Callable[[], Exception | None] = lambda: None,
        *,
        brings: Any = None,
    ) -> _Joined:
        """Make memory on rank 0, and pass its file descriptor to all ranks. Raises as `meet`.

        Args:
            what: the purpose, equal on all ranks.
            make: see `Agenda`.
            join: see `Agenda`.
            timeout_s: how long to wait for the others.
            call: a sentence about the call for which the ranks meet; empty: none.
            overtaken: see `Agenda`.
            broken: see `Agenda`.
            brings: JSON of this rank, for `make`.
        """
        facts = {"brings": brings, "call": call}
        agenda = Agenda(what, facts, make, join, broken, lambda rank: "", overtaken)
        joined: _Joined = self.meet(agenda, timeout_s)
        return joined

    def _lead(self, agenda: Agenda, timeout_s: float) -> Any:
        turns: dict[int, int] = {}  # of ranks that have arrived: their number of this rendezvous
        try:
            brought = self._gather(agenda, turns, timeout_s)
            memory, facts = agenda.make(brought)
            for rank, turn in turns.items():
                self._send(rank, {"say": "memory", "turn": turn, "facts": facts}, memory)
            result = _joined(agenda, memory, facts)
            self._wait_for_joined(agenda, turns, timeout_s)
            for rank, turn in turns.items():
                self._send(rank, {"say": "go", "turn": turn})
            return result
        except BaseException as error:
            for rank, turn in turns.items():
                self._send(rank, {"say": "end", "turn": turn, "verdict": self._verdict(error)})
            raise

    def _gather(self, agenda: Agenda, turns: dict[int, int], timeout_s: float) -> list[Facts]:
        """Wait until all ranks have sent "ask"; answer each with "here"."""
        begin = time.monotonic()
        asks: dict[int, Facts] = {}
        while len(asks) < self.world - 1:
            for rank, message in self._listen(agenda, begin + timeout_s, arriving=True):
                if message["say"] == "ask":
                    asks[rank] = message
                    turns[rank] = message["turn"]
                    self._send(rank, {"say": "here", "turn": message["turn"]})
                elif message["say"] == "withdraw" and turns.get(rank) == message["turn"]:
                    del asks[rank], turns[rank]
            self._compare(agenda, {r: ask for r, ask in asks.items() if ask["facts"].get("call")})
            missing = set(self._peers) - set(asks)
            if missing and time.monotonic() > begin + timeout_s:
                late = {rank: agenda.condition(rank) for rank in missing}
                raise _Ended.late(self.rank, agenda.what, late, time.monotonic() - begin)
        self._compare(agenda, asks)
        return [agenda.facts, *(asks[rank]["facts"] for rank in range(1, self.world))]

    def _compare(self, agenda: Agenda, asks: Mapping[int, Facts]) -> None:
        """End the rendezvous if a rank has come for another purpose."""
        for rank, ask in sorted(asks.items()):
            if ask["what"] != agenda.what:
                purposes = f"rank {rank} came to {ask['what']}, rank {self.rank} to {agenda.what}."
                calls = [facts.get("call") for facts in (agenda.facts, ask["facts"])]
                remedy = "Make the same calls on every rank, or call reset() on every rank."
                raise _Ended("engine", text=" ".join(filter(None, [purposes, *calls, remedy])))

    def _wait_for_joined(self, agenda: Agenda, turns: dict[int, int], timeout_s: float) -> None:
        begin = time.monotonic()
        missing = dict(turns)
        while missing:
            for rank, message in self._listen(agenda, begin + timeout_s):
                if message["turn"] != missing.get(rank):
                    continue
                if message["say"] == "withdraw":
                    raise _Ended("engine", text=f"rank {rank} could not {agenda.what}")
                if message.get("verdict"):
                    raise _Ended(**message["verdict"])
                del missing[rank]
            if missing and time.monotonic() > begin + timeout_s:
                late = {rank: agenda.condition(rank) for rank in missing}
                raise _Ended.late(self.rank, agenda.what, late, time.monotonic() - begin)

    def _follow(self, agenda: Agenda, timeout_s: float) -> Any:
        turn, begin = self._turn, time.monotonic()
        deadline, arriving = begin + timeout_s, True
        result = None
        try:
            ask = {"say": "ask", "turn": turn, "what": agenda.what, "facts": agenda.facts}
            self._send(LEADER, ask)
            while True:
                for _, message in self._listen(agenda, deadline, arriving):
                    memory = message.pop("memory", None)
                    if message["turn"] != turn:  # from a rendezvous that this rank has left
                        if memory is not None:
                            os.close(memory)
                        continue
                    deadline = time.monotonic() + timeout_s + _GRACE_S
                    if message["say"] == "memory":
                        arriving = False
                        result = self._join(agenda, turn, memory, message["facts"])
                    elif message["say"] == "end":
                        raise _Ended(**message["verdict"])
                    elif message["say"] == "go":
                        return result
                if time.monotonic() > deadline:
                    seconds = time.monotonic() - begin
                    late = {LEADER: agenda.condition(LEADER)}
                    raise _Ended.late(self.rank, agenda.what, late, seconds)
        except BaseException:
            result = None  # the traceback would keep it alive
            self._send(LEADER, {"say": "withdraw", "turn": turn})
            raise

    def _join(self, agenda: Agenda, turn: int, memory: int | None, facts: Facts) -> Any:
        """Join; on an error, notify the leader, which then ends the rendezvous for all ranks."""
        result, verdict = None, None
        try:
            result = _joined(agenda, memory, facts)
        except Exception as error:
            verdict = self._verdict(error)
        self._send(LEADER, {"say": "joined", "turn": turn, "verdict": verdict})
        return result

    def _verdict(self, error: BaseException) -> Facts:
        if isinstance(error, _Ended):
            return error.verdict
        if isinstance(error, MemoryError):
            return {"kind": "memory", "text": f"rank {self.rank}: {error}"}
        if isinstance(error, EngineError) and self.rank == LEADER:  # worded for all ranks
            return {"kind": "engine", "text": str(error)}
        return {"kind": "engine", "text": f"rank {self.rank} gave up: {error!r}"}

    # ---- messages

    def _listen(
        self, agenda: Agenda, deadline: float, arriving: bool = False
    ) -> Iterator[tuple[int, Facts]]:
        """Yield the messages that have arrived, or nothing after a short wait.

        A message's "memory" is the file descriptor that arrived with it. Raises if a rank has left
        or the group has failed, because further waiting is pointless. `arriving`: not all ranks are
        known to have arrived.
        """
        # Check first, raise last: a rank sends its message here before it fails the group.
        error = agenda.broken() or (agenda.overtaken() if arriving else None)
        wait_s = 0.0 if error else max(0.0, min(_POLL_S, deadline - time.monotonic()))
        readable = ready(list(self._peers.values()), wait_s)
        for rank, peer in self._peers.items():
            if peer not in readable:
                continue
            # Read all messages, so an old "ask" is never seen without its "withdraw".
            while (message := _received(peer)) is not None:
                if message["say"] == "gone":
                    self._end_for_departure(message.get("rank", rank), agenda)
                yield rank, message
        try:
            if error:
                raise error
        finally:
            error = None  # else a reference cycle keeps the frames of all callers alive

    def _end_for_departure(self, rank: int, agenda: Agenda) -> None:
        """End this and all later rendezvous: a rank has left; the leader notifies the others."""
        if self.rank == LEADER:
            for other in self._peers:
                self._send(other, {"say": "gone", "turn": 0, "rank": rank})
        reason = agenda.condition(rank) or f"Rank {rank} has closed its runtime or died."
        self._departure = {
            "kind": "engine",
            "text": f"rank {rank} (pid {self.pids[rank]}) has left the group, so the others cannot "
            f"{agenda.what}. {reason} Make a new group of the remaining ranks.",
        }
        raise _Ended(**self._departure)

    def _send(self, rank: int, message: Facts, memory: int | None = None) -> None:
        """Send without waiting. Errors are ignored: `_listen` detects a peer that left."""
        try:
            if memory is None:
                self._peers[rank].send(_packed(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            else:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                socket.send_fds(self._peers[rank], [_packed(message)], [memory], flags)
        except OSError:
            pass

    def close(self) -> None:
        """End the connections; other ranks see that this one has left."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the peer has left before
                peer.shutdown(socket.SHUT_RDWR)  # also if a forked child has a copy
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Close this process's copies of the connections, which its parent keeps."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()


def _joined(agenda: Agenda, memory: int | None, facts: Facts) -> Any:
    try:
        return agenda.join(memory, facts)
    finally:
        if memory is not None:
            os.close(memory)


def _packed(message: Facts) -> bytes:
    return json.dumps(message).encode()


def _received(peer: socket.socket) -> Facts | None:
    """Return the next message; None if there is none yet, "gone" if the peer has left."""
    try:
        data, memories, _, _ = socket.recv_fds(peer, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        data, memories = b"", []
    message: Facts = json.loads(data) if data else {"say": "gone"}
    if memories:
        message["memory"] = memories[0]
    return message
