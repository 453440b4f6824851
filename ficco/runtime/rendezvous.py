"""How the processes of a group meet, and agree on the memory that they share.

Every rank keeps a socket to rank 0 (see `connecting`), which leads: a rank that comes to a
rendezvous asks, the leader answers that it is there, waits for all, makes the memory, sends its
file descriptor, and says go when all have joined it.

    rank   ask ........ here | memory -> join -> joined | go
    leader      here -> all  | make   -> join -> all    | go

Whatever goes wrong ends the rendezvous on every rank, with the same words.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ficco.errors import EngineError, TimeoutExceeded
from ficco.runtime.bootstrap import LEADER, MESSAGE_BYTES, Connected, Members, connected, ready

__all__ = ["Agenda", "Facts", "Rendezvous"]

Facts = dict[str, Any]

_LOOK_S = 0.05  # how often one who waits looks whether the group has failed meanwhile
_GRACE_S = 1.0  # for the leader's verdict to arrive after its own deadline


class Agenda(NamedTuple):
    """What a rendezvous is for, and what a rank brings to it.

    Attributes:
        what: in words, equal on all ranks: "open the group".
        facts: what this rank says to the leader; JSON values.
        make: by the leader, from all ranks' facts: (file descriptor or None, what to say with it).
        join: by every rank, from that pair; the descriptor is closed afterwards.
        broken: an error that makes waiting pointless, or None; looked at now and then.
        condition: what is known of a missing rank, as a sentence or nothing.
    """

    what: str
    facts: Facts
    make: Callable[[list[Facts]], tuple[int | None, Facts]]
    join: Callable[[Any, Facts], Any]
    broken: Callable[[], Exception | None]
    condition: Callable[[int], str]


class _Ended(Exception):
    """The rendezvous has ended without result; `verdict` says why, for all ranks alike."""

    def __init__(self, kind: str, **words: Any) -> None:
        super().__init__(kind)
        self.verdict: Facts = {"kind": kind, **words}

    @classmethod
    def late(cls, waiter: int, what: str, late: Mapping[int, str], seconds: float) -> _Ended:
        """Ranks that did not come, with what is known of each."""
        ranks = " and ".join(f"rank {rank}" for rank in sorted(late))
        known = " ".join(text for _, text in sorted(late.items()) if text)
        hint = f"{known} Every rank makes the same calls in the same order.".strip()
        return cls(
            "late", rank=waiter, what=what, who=ranks, seconds=seconds, hint=hint,
            missing=sorted(late),
        )  # fmt: skip


def _error_from(verdict: Facts) -> Exception:
    if verdict["kind"] == "memory":
        return MemoryError(verdict["text"])
    if verdict["kind"] == "late":
        return TimeoutExceeded(
            verdict["rank"], verdict["what"], verdict["who"], verdict["seconds"], verdict["hint"]
        )
    return EngineError(verdict["text"])


class Rendezvous:
    """The standing connection of a group's processes.

    Attributes:
        rank, world: this process's place.
        pids: process ids by rank.
        turn: how often the ranks have opened the group, equal on all.
    """

    def __init__(self, members: Members, facts: Facts, timeout_s: float) -> None:
        """Connect all ranks; see `connecting.connected`."""
        self.rank, self.world = members.rank, members.world
        found = Connected({}, [os.getpid()], members.turn)
        self._gone: Facts | None = None  # the verdict on every rendezvous, once a rank has left
        if self.world > 1:
            found = connected(members, facts, timeout_s)
        self._peers, self.pids, self.turn = found
        self._turn = 0  # of rendezvous

    # ---- rendezvous

    def meet(self, agenda: Agenda, timeout_s: float) -> Any:
        """Meet all ranks and return what `agenda.join` returned.

        Raises:
            TimeoutExceeded: a rank did not come within `timeout_s`; it is named.
            MemoryError: the memory could not be had, on some rank.
            EngineError: a rank has gone, came for something else, or could not join.
        """
        if self.world == 1:
            return _joined(agenda, *agenda.make([agenda.facts]))
        self._turn += 1
        try:
            if self._gone:
                raise _Ended(**self._gone)
            if self.rank == LEADER:
                return self._lead(agenda, timeout_s)
            return self._follow(agenda, timeout_s)
        except _Ended as ended:
            raise _error_from(ended.verdict) from None

    def gather(self, what: str, mine: Any, timeout_s: float) -> list[Any]:
        """Return what every rank brings, by rank; JSON values. Errors are those of `meet`."""
        agenda = Agenda(
            what,
            {"brings": json.loads(json.dumps(mine))},  # alike on all ranks, the leader too
            lambda brought: (None, {"all": [facts["brings"] for facts in brought]}),
            lambda _, facts: facts["all"],
            lambda: None,
            lambda rank: "",
        )
        found: list[Any] = self.meet(agenda, timeout_s)
        return found

    def _lead(self, agenda: Agenda, timeout_s: float) -> Any:
        turns: dict[int, int] = {}  # of those who are here: the number they gave to this rendezvous
        try:
            brought = self._gather(agenda, turns, timeout_s)
            memory, facts = agenda.make(brought)
            for rank, turn in turns.items():
                self._send(rank, {"say": "memory", "turn": turn, "facts": facts}, memory)
            result = _joined(agenda, memory, facts)
            self._await_joined(agenda, turns, timeout_s)
            for rank, turn in turns.items():
                self._send(rank, {"say": "go", "turn": turn})
            return result
        except BaseException as error:
            for rank, turn in turns.items():
                self._send(rank, {"say": "end", "turn": turn, "verdict": self._verdict(error)})
            raise

    def _gather(self, agenda: Agenda, turns: dict[int, int], timeout_s: float) -> list[Facts]:
        """Wait until all ranks have asked for it; answer each that the leader is here."""
        begin = time.monotonic()
        asks: dict[int, Facts] = {}
        while len(asks) < self.world - 1:
            for rank, message in self._listen(agenda, begin + timeout_s):
                if message["say"] == "ask":
                    asks[rank] = message
                    turns[rank] = message["turn"]
                    self._send(rank, {"say": "here", "turn": message["turn"]})
                elif message["say"] == "withdraw" and turns.get(rank) == message["turn"]:
                    del asks[rank], turns[rank]
            if time.monotonic() > begin + timeout_s:
                missing = set(self._peers) - set(asks)
                late = {rank: agenda.condition(rank) for rank in missing}
                raise _Ended.late(self.rank, agenda.what, late, time.monotonic() - begin)
        for rank, ask in sorted(asks.items()):
            if ask["what"] != agenda.what:
                raise _Ended(
                    "engine",
                    text=f"rank {rank} came to {ask['what']}, rank {self.rank} to {agenda.what}; "
                    "let every rank make the same calls, or call reset() on every rank",
                )
        return [agenda.facts, *(asks[rank]["facts"] for rank in range(1, self.world))]

    def _await_joined(self, agenda: Agenda, turns: dict[int, int], timeout_s: float) -> None:
        begin = time.monotonic()
        missing = dict(turns)
        while missing:
            for rank, message in self._listen(agenda, begin + timeout_s):
                if message["turn"] != missing.get(rank):
                    continue
                if message["say"] == "withdraw":
                    raise _Ended("engine", text=f"rank {rank} gave up to {agenda.what}")
                if message.get("verdict"):
                    raise _Ended(**message["verdict"])
                del missing[rank]
            if missing and time.monotonic() > begin + timeout_s:
                late = {rank: agenda.condition(rank) for rank in missing}
                raise _Ended.late(self.rank, agenda.what, late, time.monotonic() - begin)

    def _follow(self, agenda: Agenda, timeout_s: float) -> Any:
        turn, begin = self._turn, time.monotonic()
        deadline = begin + timeout_s
        result = None
        try:
            ask = {"say": "ask", "turn": turn, "what": agenda.what, "facts": agenda.facts}
            self._send(LEADER, ask)
            while True:
                for _, message in self._listen(agenda, deadline):
                    memory = message.pop("memory", None)
                    if message["turn"] != turn:  # of a rendezvous that this rank has left
                        if memory is not None:
                            os.close(memory)
                        continue
                    deadline = time.monotonic() + timeout_s + _GRACE_S
                    if message["say"] == "memory":
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
            result = None  # a traceback would keep it alive
            self._send(LEADER, {"say": "withdraw", "turn": turn})
            raise

    def _join(self, agenda: Agenda, turn: int, memory: int | None, facts: Facts) -> Any:
        """Join; where that fails the leader is told, who then ends the rendezvous for all."""
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
        if isinstance(error, EngineError) and self.rank == LEADER:  # it speaks for all
            return {"kind": "engine", "text": str(error)}
        return {"kind": "engine", "text": f"rank {self.rank} gave up: {error!r}"}

    # ---- messages

    def _listen(self, agenda: Agenda, deadline: float) -> Iterator[tuple[int, Facts]]:
        """Yield the messages that have come, or nothing after a short while.

        A file descriptor that came with one is its "memory". Raises where there is no point in
        waiting on: a rank has gone, or the group has failed.
        """
        # Looked at first, raised last: who fails the group tells the rendezvous before.
        error = agenda.broken()
        wait_s = 0.0 if error else max(0.0, min(_LOOK_S, deadline - time.monotonic()))
        spoken = ready(list(self._peers.values()), wait_s)
        for rank, peer in self._peers.items():
            if peer not in spoken:
                continue
            # All there is, so that an old ask is never seen without its withdrawal.
            while (message := _received(peer)) is not None:
                if message["say"] == "gone":
                    self._mourn(message.get("rank", rank), agenda)
                yield rank, message
        if error:
            raise error

    def _mourn(self, rank: int, agenda: Agenda) -> None:
        """End this and later rendezvous, because a rank has left; the leader tells all others."""
        if self.rank == LEADER:
            for other in self._peers:
                self._send(other, {"say": "gone", "turn": 0, "rank": rank})
        known = agenda.condition(rank) or f"Rank {rank} has closed its runtime or died."
        self._gone = {
            "kind": "engine",
            "text": f"rank {rank} (pid {self.pids[rank]}) has left the group, so the others cannot "
            f"{agenda.what}. {known} Make a new group of the ranks that are left.",
        }
        raise _Ended(**self._gone)

    def _send(self, rank: int, message: Facts, memory: int | None = None) -> None:
        """Send without waiting. Who does not read, or is gone, is missed by those who listen."""
        try:
            if memory is None:
                self._peers[rank].send(_packed(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            else:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                socket.send_fds(self._peers[rank], [_packed(message)], [memory], flags)
        except OSError:
            pass

    def close(self) -> None:
        """End the connection; other ranks see that this one has left."""
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
    """Return the next message, None where there is none yet, "gone" where none will come."""
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
