"""How the processes of a group meet, and agree on the memory that they share.

They find each other once through torch.distributed. From then on every rank keeps a socket to rank
0, which leads: a rank that comes to a meeting asks, the leader answers that it is there, waits for
all, makes the memory, sends its file descriptor, and says go when all have joined it.

    rank   ask ........ here | memory -> join -> joined | go
    leader      here -> all  | make   -> join -> all    | go

Whatever goes wrong ends the meeting on every rank, with the same words. Sockets have names in no
file system, and only processes of the same user get past them.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ficco.errors import EngineError, InputError, TimeoutExceeded

__all__ = ["Agenda", "Meeting", "Membership", "membership_of"]

Facts = dict[str, Any]

_MESSAGE_BYTES = 1 << 16
_LOOK_S = 0.05  # how often one who waits looks whether the group has failed meanwhile
_GRACE_S = 1.0  # for the leader's verdict to arrive after its own deadline
_LEADER = 0


class Membership(NamedTuple):
    """A process's place in a torch.distributed group."""

    group: Any
    rank: int
    world: int


def membership_of(group: Any) -> Membership:
    """Return this process's place in a ProcessGroup or a DeviceMesh of one dimension.

    Raises:
        InputError: it is neither, this process is not in it, or gloo does not serve it.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"group is a DeviceMesh of {group.ndim} dimensions; pass one of them: mesh['tp']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group: {type(group).__name__} found; a ProcessGroup this process belongs to, or a "
            "DeviceMesh, is needed (dist.group.WORLD, dist.new_group(...), mesh['tp'])"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError("this process is not in the group; only its members may use it")
    # A backend for CPU tensors, alone ("gloo") or beside others ("cpu:gloo,cuda:nccl").
    if "gloo" not in str(dist.get_backend_config(group)):
        raise InputError(
            f"group has the backend {dist.get_backend(group)!r}, which cannot pass words between "
            "processes without GPUs; make it with backend='gloo' or 'cpu:gloo,cuda:nccl'"
        )
    return Membership(group, rank, dist.get_world_size(group))


class Agenda(NamedTuple):
    """What a meeting is for, and what a rank brings to it.

    Attributes:
        what: in words, equal on all ranks: "open the group".
        facts: what this rank says to the leader; JSON values.
        make: by the leader, from all ranks' facts: (file descriptor, what to say with it).
        join: by every rank, from that pair; the descriptor is closed afterwards.
        broken: an error that makes waiting pointless, or None; looked at now and then.
        condition: what is known of a missing rank, as a sentence or nothing.
    """

    what: str
    facts: Facts
    make: Callable[[list[Facts]], tuple[int, Facts]]
    join: Callable[[int, Facts], Any]
    broken: Callable[[], Exception | None]
    condition: Callable[[int], str]


class _Ended(Exception):
    """The meeting has ended without result; `verdict` says why, for all ranks alike."""

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


class Meeting:
    """The standing connection of a group's processes.

    Attributes:
        rank, world: this process's place.
        pids: process ids by rank.
    """

    def __init__(self, members: Membership, facts: Facts, timeout_s: float) -> None:
        """Connect all ranks; a collective call on the group, whose own timeout holds for it.

        Args:
            members: this process's place.
            facts: what must be equal on all ranks; JSON values.
            timeout_s: how long connecting may last once all have called.

        Raises:
            EngineError: the ranks are on several hosts, differ in facts, or one did not connect.
        """
        self.rank, self.world = members.rank, members.world
        self.pids = [os.getpid()]
        self._peers: dict[int, socket.socket] = {}  # of the leader: all; of others: the leader
        self._turn = 0
        self._gone: Facts | None = None  # the verdict on every meeting, once a rank has left
        if self.world > 1:
            self._connect(members, facts, timeout_s)

    # ---- connecting

    def _connect(self, members: Membership, facts: Facts, timeout_s: float) -> None:
        import torch.distributed as dist

        listener = _listener(self.world) if self.rank == _LEADER else None
        try:
            mine = {
                "host": _host(),
                "facts": facts,
                "pid": os.getpid(),
                "address": listener.getsockname().hex() if listener else None,
                "secret": secrets.token_hex(16),
            }
            found: list[Facts] = [{}] * self.world
            dist.all_gather_object(found, mine, group=members.group)
            _check_alike(found)
            self.pids = [entry["pid"] for entry in found]
            deadline = time.monotonic() + timeout_s
            if listener is None:
                self._reach(found, timeout_s)
            else:
                self._accept(listener, found, deadline, timeout_s)
        except BaseException:
            self.close()
            raise
        finally:
            if listener:
                listener.close()

    def _reach(self, found: list[Facts], timeout_s: float) -> None:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._peers[_LEADER] = leader
        leader.settimeout(timeout_s)
        try:
            leader.connect(bytes.fromhex(found[_LEADER]["address"]))
            _check_user(leader)
            leader.send(_packed({"rank": self.rank, "secret": found[self.rank]["secret"]}))
            leader.setblocking(False)
        except OSError as problem:
            raise EngineError(
                f"rank {self.rank} cannot reach rank 0 (pid {self.pids[0]}) on this host: "
                f"{problem}; do they share a network namespace (one container)?"
            ) from None

    def _accept(
        self, listener: socket.socket, found: list[Facts], deadline: float, timeout_s: float
    ) -> None:
        while len(self._peers) < self.world - 1:
            left = deadline - time.monotonic()
            if left <= 0 or not _ready([listener], left):
                missing = sorted(set(range(1, self.world)) - set(self._peers))
                raise TimeoutExceeded(
                    self.rank, "open the group", f"the connection of ranks {missing}", timeout_s,
                    "Look whether these processes still run.",
                )  # fmt: skip
            peer, _ = listener.accept()
            rank = _introduced(peer, found, deadline)
            if rank is None or rank in self._peers:
                peer.close()  # a stranger
            else:
                self._peers[rank] = peer

    # ---- meeting

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
            if self.rank == _LEADER:
                return self._lead(agenda, timeout_s)
            return self._follow(agenda, timeout_s)
        except _Ended as ended:
            raise _error_from(ended.verdict) from None

    def _lead(self, agenda: Agenda, timeout_s: float) -> Any:
        turns: dict[int, int] = {}  # of those who are here: the number they gave to this meeting
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
        """Wait until all ranks have asked for this meeting; answer each that the leader is here."""
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
            self._send(_LEADER, ask)
            while True:
                for _, message in self._listen(agenda, deadline):
                    memory = message.pop("memory", None)
                    if message["turn"] != turn:  # of a meeting that this rank has left
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
                    late = {_LEADER: agenda.condition(_LEADER)}
                    raise _Ended.late(self.rank, agenda.what, late, seconds)
        except BaseException:
            result = None  # a traceback would keep it alive
            self._send(_LEADER, {"say": "withdraw", "turn": turn})
            raise

    def _join(self, agenda: Agenda, turn: int, memory: int, facts: Facts) -> Any:
        """Join; where that fails the leader is told, who then ends the meeting for all."""
        result, verdict = None, None
        try:
            result = _joined(agenda, memory, facts)
        except Exception as error:
            verdict = self._verdict(error)
        self._send(_LEADER, {"say": "joined", "turn": turn, "verdict": verdict})
        return result

    def _verdict(self, error: BaseException) -> Facts:
        if isinstance(error, _Ended):
            return error.verdict
        if isinstance(error, MemoryError):
            return {"kind": "memory", "text": f"rank {self.rank}: {error}"}
        return {"kind": "engine", "text": f"rank {self.rank} gave up: {error!r}"}

    # ---- messages

    def _listen(self, agenda: Agenda, deadline: float) -> Iterator[tuple[int, Facts]]:
        """Yield the messages that have come, or nothing after a short while.

        A file descriptor that came with one is its "memory". Raises where there is no point in
        waiting on: a rank has gone, or the group has failed.
        """
        # Looked at first, raised last: who fails the group tells the meeting before.
        error = agenda.broken()
        wait_s = 0.0 if error else max(0.0, min(_LOOK_S, deadline - time.monotonic()))
        ready = _ready(list(self._peers.values()), wait_s)
        for rank, peer in self._peers.items():
            if peer not in ready:
                continue
            # All there is, so that an old ask is never seen without its withdrawal.
            while (message := _received(peer)) is not None:
                if message["say"] == "gone":
                    self._mourn(message.get("rank", rank), agenda)
                yield rank, message
        if error:
            raise error

    def _mourn(self, rank: int, agenda: Agenda) -> None:
        """End this and all later meetings, because a rank has left; the leader tells all others."""
        if self.rank == _LEADER:
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


def _joined(agenda: Agenda, memory: int, facts: Facts) -> Any:
    try:
        return agenda.join(memory, facts)
    finally:
        os.close(memory)


def _packed(message: Facts) -> bytes:
    return json.dumps(message).encode()


def _received(peer: socket.socket) -> Facts | None:
    """Return the next message, None where there is none yet, "gone" where none will come."""
    try:
        data, memories, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        data, memories = b"", []
    message: Facts = json.loads(data) if data else {"say": "gone"}
    if memories:
        message["memory"] = memories[0]
    return message


def _ready(sockets: list[socket.socket], wait_s: float) -> list[socket.socket]:
    """Return the sockets with something to read, after a wait for the first one."""
    poll = select.poll()
    by_number = {one.fileno(): one for one in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(wait_s * 1e3)]


def _listener(backlog: int) -> socket.socket:
    """Return a socket whose name is in no file system and cannot be guessed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0ficco-" + secrets.token_hex(16).encode())
    listener.listen(backlog)
    return listener


def _check_user(peer: socket.socket) -> None:
    """Refuse (PermissionError) a peer that is another user's process."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise PermissionError(f"the other end belongs to user {user}, not to {os.geteuid()}")


def _introduced(peer: socket.socket, found: list[Facts], deadline: float) -> int | None:
    """Return the rank that a new connection is of; None: a stranger."""
    peer.settimeout(max(0.01, min(_GRACE_S, deadline - time.monotonic())))
    try:
        _check_user(peer)
        hello = json.loads(peer.recv(_MESSAGE_BYTES))
        rank = int(hello["rank"])
        known = 0 < rank < len(found) and secrets.compare_digest(
            str(hello["secret"]), found[rank]["secret"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    peer.setblocking(False)
    return rank if known else None


def _host() -> list[str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return [socket.gethostname(), boot]


def _check_alike(found: list[Facts]) -> None:
    for rank, entry in enumerate(found):
        if entry["host"] != found[0]["host"]:
            raise EngineError(
                f"rank 0 runs on host {found[0]['host'][0]!r} and rank {rank} on "
                f"{entry['host'][0]!r}; the host engine shares memory, so make groups of ranks "
                "of one host (and one container)"
            )
        if entry["facts"] != found[0]["facts"]:
            raise EngineError(
                f"rank 0 asks for {found[0]['facts']} and rank {rank} for {entry['facts']}; "
                "pass the same on every rank"
            )
