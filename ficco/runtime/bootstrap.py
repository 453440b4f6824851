"""How the processes of a group find each other, once: through a store of torch.distributed.

Every rank connects to rank 0 by a socket. Rank 0 leaves the socket's name in the store, and the
others look for it until they have connected, so that a rank which comes late, comes again after a
failure, or never comes, leaves nobody hanging:

    leader     name -> store | hello of every rank  | welcome -> all
    rank       look in store | connect, hello       | welcome

Sockets have names in no file system, and only processes of the same user that know the secret of
the store get past them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ficco.errors import EngineError, TimeoutExceeded
from ficco.runtime.failures import GONE

__all__ = [
    "LEADER", "MESSAGE_BYTES", "Connected", "Members", "Store", "check_kinds", "connected",
    "note_refusal", "ready",
]  # fmt: skip

LEADER = 0  # the rank that all others connect to
MESSAGE_BYTES = 1 << 16
_HELLO_S = 1.0  # how long a new connection may take to say who it is
_LOOK_S = 0.05  # how often one who waits looks for ranks that have died or do not come
_GRACE_S = 1.0  # for the leader's verdict to arrive after its own deadline
_TOLD_S = 0.5  # a rank that has raised an error may come after all, as all may have raised it
_WHAT = "open the group"
_NAME = "ficco/leader"  # under this key is the name of rank 0's socket

Facts = dict[str, Any]


class Store(Protocol):
    """What a store of torch.distributed does, so far as it is needed here."""

    def set(self, key: str, value: str, /) -> Any:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that there is."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether there are these keys."""


class Members(NamedTuple):
    """A process's place in a group.

    Attributes:
        rank, world: this process, of so many.
        kind: of the devices that the group is opened for, in words: "the CPU", "GPUs".
        store: that all ranks of the group use, and no other group.
        turn: how often this rank has opened the group, or refused to, this time included.
        group: the process group, for `members.note_turn`.
    """

    rank: int
    world: int
    kind: str
    store: Store
    turn: int = 1
    group: Any = None


class Connected(NamedTuple):
    """What `connected` found.

    Attributes:
        peers: sockets that do not block, by rank: rank 0 has one to every other, they one to it.
        pids: process ids of all ranks.
        turn: the largest of all ranks, from which all count on.
    """

    peers: dict[int, socket.socket]
    pids: list[int]
    turn: int


def connected(members: Members, facts: Facts, timeout_s: float) -> Connected:
    """Connect all ranks; a collective call on the group.

    Args:
        members: this process's place.
        facts: what must be equal on all ranks; JSON values.
        timeout_s: how long it may last for all ranks to come.

    Raises:
        EngineError: the ranks are on several hosts or differ in facts, or one has died or makes
            another call; TimeoutExceeded: one did not come. All ranks that came are told.
    """
    me = {"host": _host(), "facts": facts, "kind": members.kind, "turn": members.turn, **_life()}
    seeker = _Seeker(members, me, time.monotonic() + timeout_s, timeout_s)
    try:
        members.store.set(_refusal_of(members.rank), json.dumps(None))  # an earlier one is over
        members.store.set(_entry_of(members.rank), json.dumps(me))
        return seeker.lead() if members.rank == LEADER else seeker.follow()
    except RuntimeError as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(
            f"rank {members.rank} cannot {_WHAT}: the store of torch.distributed does not answer "
            f"({error}). The process that serves it may have ended; restart all processes."
        ) from error


def note_refusal(members: Members, reason: str) -> None:
    """Tell ranks that open the group that this one does not come, because of an error."""
    note = {"turn": members.turn, "reason": reason[:2000]}
    members.store.set(_refusal_of(members.rank), json.dumps(note))


class _Seeker:
    """A rank that connects to the others, until a deadline."""

    def __init__(self, members: Members, me: Facts, deadline: float, timeout_s: float) -> None:
        self._members, self._me, self._deadline = members, me, deadline
        self._timeout_s = timeout_s
        self._peers: dict[int, socket.socket] = {}
        self._refused_at: dict[int, float] = {}  # when it was seen that a rank does not come

    def lead(self) -> Connected:
        """Wait for all ranks, and tell them that all are here, or why not."""
        rank, world, _, store, *_ = self._members
        came = {rank: self._me}
        listener, secret = _listener(), secrets.token_hex(16)
        try:
            name = {"address": listener.getsockname().hex(), "secret": secret}
            store.set(_NAME, json.dumps({**self._me, **name}))
            while len(came) < world:
                spoken = ready([listener, *self._peers.values()], _LOOK_S)
                if listener in spoken:
                    self._accept(listener, secret, came)
                    continue
                for each in [rank for rank, peer in self._peers.items() if peer in spoken]:
                    self._peers.pop(each).close()  # it waits, and says nothing: it has gone
                    del came[each]
                missing = sorted(set(range(world)) - set(came))
                for each in missing:
                    self._look_for(each)
                if time.monotonic() > self._deadline:
                    raise self._late(missing)
            entries = [came[each] for each in range(world)]
            _check_alike(entries)
            pids, turn = [each["pid"] for each in entries], max(each["turn"] for each in entries)
            self._tell({"say": "welcome", "pids": pids, "turn": turn})
        except BaseException as error:
            self._tell({"say": "end", "error": _words_of(error, rank)})
            for peer in self._peers.values():
                peer.close()
            raise
        finally:
            listener.close()
        return Connected(self._peers, pids, turn)

    def _accept(self, listener: socket.socket, secret: str, came: dict[int, Facts]) -> None:
        peer, _ = listener.accept()
        hello = _introduced(peer, secret, self._members.world)
        if hello is None:
            peer.close()  # a stranger
            return
        rank = int(hello["rank"])
        before = self._peers.pop(rank, None)
        if before is not None:  # it had given up, and comes again
            before.close()
        self._peers[rank], came[rank] = peer, hello

    def _tell(self, message: Facts) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(
                OSError
            ):  # it has gone, which the first rendezvous will notice
                peer.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def follow(self) -> Connected:
        """Connect to rank 0, and wait until it says that all are here."""
        while True:
            leader = self._reach()
            if leader is not None:
                try:
                    found = self._answer(leader)
                except BaseException:
                    leader.close()
                    raise
                if found is not None:
                    return found
                leader.close()  # rank 0 has given up; it may come again
            self._look_for(LEADER)
            if time.monotonic() > self._deadline:
                raise self._late([LEADER])
            time.sleep(_LOOK_S / 2)

    def _reach(self) -> socket.socket | None:
        """Return a connection to rank 0, or None as long as it does not listen."""
        entry = _read(self._members.store, _NAME)
        if entry is None:
            return None
        _check_hosts({LEADER: entry, self._members.rank: self._me})
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            leader.settimeout(_HELLO_S)
            leader.connect(bytes.fromhex(entry["address"]))
            _check_user(leader)
            hello = {**self._me, "rank": self._members.rank, "secret": entry["secret"]}
            leader.send(json.dumps(hello).encode())
        except PermissionError as problem:
            leader.close()
            raise EngineError(
                f"rank {self._members.rank} cannot reach rank {LEADER} (pid {entry['pid']}) on "
                f"this host: {problem}. Run all ranks as one user, and in one container."
            ) from None
        except OSError:  # the name is of an earlier time
            leader.close()
            return None
        leader.setblocking(False)
        return leader

    def _answer(self, leader: socket.socket) -> Connected | None:
        """Wait for what rank 0 says; None: it has closed the connection."""
        while not ready([leader], _LOOK_S):
            if time.monotonic() > self._deadline + _GRACE_S:
                raise self._late([LEADER])
        try:
            data = leader.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        message = json.loads(data)
        if message["say"] == "end":
            raise _error_of(message["error"])
        return Connected({LEADER: leader}, message["pids"], message["turn"])

    # ---- ranks that are not here

    def _look_for(self, rank: int) -> None:
        """Raise if it is known that a rank will not come."""
        store = self._members.store
        refused = _read(store, _refusal_of(rank))
        if refused is None or refused["turn"] != self._members.turn:
            self._refused_at.pop(rank, None)
        elif time.monotonic() - self._refused_at.setdefault(rank, time.monotonic()) > _TOLD_S:
            raise EngineError(
                f"rank {rank} does not come to {_WHAT}, because of an error: {refused['reason']}"
            )
        entry = _read(store, _entry_of(rank))
        if entry is None:
            return
        _check_hosts({rank: entry, self._members.rank: self._me})
        if _has_ended(entry):
            raise EngineError(
                f"rank {rank} (pid {entry['pid']}) has died, so that rank {self._members.rank} "
                f"cannot {_WHAT}. {GONE}"
            )

    def _late(self, missing: list[int]) -> TimeoutExceeded:
        known = []
        for rank in missing:
            entry = _read(self._members.store, _entry_of(rank))
            pid = f" (pid {entry['pid']})" if entry else ""
            known.append(f"rank {rank}{pid}")
        return TimeoutExceeded(
            self._members.rank, _WHAT, " and ".join(known), self._timeout_s,
            "Every rank makes the same calls in the same order; look whether these processes "
            "still run.",
        )  # fmt: skip


def _entry_of(rank: int) -> str:
    return f"ficco/rank/{rank}"


def _refusal_of(rank: int) -> str:
    return f"ficco/refused/{rank}"


def _read(store: Store, key: str) -> Facts | None:
    if not store.check([key]):
        return None
    found: Facts | None = json.loads(store.get(key))
    return found


def _words_of(error: BaseException, rank: int) -> Facts:
    if isinstance(error, TimeoutExceeded):
        return {"late": [error.rank, error.step, error.signal, error.seconds, error.hint]}
    if isinstance(error, EngineError):
        return {"text": str(error)}
    return {"text": f"rank {rank} gave up to {_WHAT}: {error!r}"}


def _error_of(words: Facts) -> EngineError:
    if "late" in words:
        return TimeoutExceeded(*words["late"])
    return EngineError(words["text"])


def ready(sockets: list[socket.socket], wait_s: float) -> list[socket.socket]:
    """Return the sockets with something to read, after a wait for the first one."""
    poll = select.poll()
    by_number = {one.fileno(): one for one in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(wait_s * 1e3)]


def _listener() -> socket.socket:
    """Return a socket whose name is in no file system and cannot be guessed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0ficco-" + secrets.token_hex(16).encode())
    listener.listen(128)  # more than there can be ranks
    return listener


def _check_user(peer: socket.socket) -> None:
    """Refuse (PermissionError) a peer that is another user's process."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise PermissionError(f"the other end belongs to user {user}, not to {os.geteuid()}")


def _introduced(peer: socket.socket, secret: str, world: int) -> Facts | None:
    """Return what a new connection says of itself; None: a stranger."""
    peer.settimeout(_HELLO_S)
    try:
        _check_user(peer)
        hello: Facts = json.loads(peer.recv(MESSAGE_BYTES))
        known = 0 < int(hello["rank"]) < world and secrets.compare_digest(
            str(hello["secret"]), secret
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    peer.setblocking(False)
    return hello if known else None


# ---- which process it is


def _host() -> list[str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return [socket.gethostname(), boot]


def _life() -> Facts:
    """Return what tells whether this process lives, to processes that see the same ones."""
    return {
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "sees": os.readlink("/proc/self/ns/pid"),
    }


def _born(pid: int) -> str | None:
    """Return when a process was started; None: there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields[fields.rindex(")") + 2 :].split()
    return None if state in "ZX" else rest[18]


def _has_ended(entry: Facts) -> bool:
    if entry["sees"] != os.readlink("/proc/self/ns/pid"):
        return False  # it may be one of another container
    return _born(entry["pid"]) != str(entry["born"])


# ---- what must be alike


def check_kinds(kinds: list[str]) -> None:
    """Refuse (EngineError) ranks that open the same group for different kinds of devices."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise EngineError(
                f"rank 0 opens the group for {kinds[0]} and rank {rank} for {kind}; pass tensors "
                "of one kind of device on all ranks (embedding_all_to_all on a rank without "
                "tables: device=)"
            )


def _check_hosts(entries: dict[int, Facts]) -> None:
    (first, one), *others = sorted(entries.items())
    for rank, entry in others:
        if entry["host"] != one["host"]:
            raise EngineError(
                f"rank {first} runs on host {one['host'][0]!r} and rank {rank} on "
                f"{entry['host'][0]!r}; ficco's windows are memory of one host, so make groups of "
                "ranks of one host (and one container)"
            )


def _check_alike(entries: list[Facts]) -> None:
    _check_hosts(dict(enumerate(entries)))
    check_kinds([entry["kind"] for entry in entries])
    for rank, entry in enumerate(entries):
        if entry["facts"] != entries[0]["facts"]:
            raise EngineError(
                f"rank 0 asks for {entries[0]['facts']} and rank {rank} for {entry['facts']}; "
                "pass the same on every rank"
            )
