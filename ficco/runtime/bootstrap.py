"""Connect the processes of a group, once, through a store of torch.distributed.

Every rank connects to rank 0 by a socket. Rank 0 writes the socket's name to the store, and the
others poll the store until they are connected. A rank that is late, retries after a failure, or
never arrives therefore leaves no other rank hanging:

    leader     name -> store | hello of every rank  | welcome -> all
    rank       poll store    | connect, hello       | welcome

The sockets have no name in a file system. They accept only processes of the same user that know
the secret in the store.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ficco.errors import EngineError, TimeoutExceeded
from ficco.interrupts import is_interrupt
from ficco.runtime.failures import GONE

__all__ = [
    "LEADER", "MESSAGE_BYTES", "Connected", "Members", "Store", "check_kinds", "connected",
    "note_refusal", "ready",
]  # fmt: skip

LEADER = 0  # the rank that all others connect to
MESSAGE_BYTES = 1 << 16
_HELLO_TIMEOUT_S = 1.0  # for a new connection to identify itself
_POLL_S = 0.05  # how often a waiting rank checks for ranks that have died or refuse to open
_GRACE_S = 1.0  # for the leader's verdict to arrive after the leader's deadline
_REFUSAL_LASTS_S = 0.5  # before it counts: if all ranks raise an error, all may retry
_WHAT = "open the group"
_NAME = "ficco/leader"  # the store's key for the name of rank 0's socket

Facts = dict[str, Any]


class Store(Protocol):
    """The part of the interface of a torch.distributed store that is used here."""

    def set(self, key: str, value: str, /) -> Any:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of an existing key."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""


class Members(NamedTuple):
    """A process's place in a group.

    Attributes:
        rank, world: this process's rank, and the number of ranks.
        kind: the kind of devices that the group is opened for: "the CPU", "GPUs".
        store: the store that only the ranks of this group use.
        turn: how often this rank has opened the group or refused to, including this time.
        group: the process group, for `members.note_turn`.
    """

    rank: int
    world: int
    kind: str
    store: Store
    turn: int = 1
    group: Any = None


class Connected(NamedTuple):
    """The connections of this process.

    Attributes:
        peers: non-blocking sockets by rank: rank 0 has one per other rank, others one to rank 0.
        pids: process ids of all ranks.
        turn: the largest turn of all ranks; all ranks count on from it.
    """

    peers: dict[int, socket.socket]
    pids: list[int]
    turn: int


def connected(
    members: Members,
    facts: Facts,
    timeout_s: float,
    broken: Callable[[], Exception | None] = lambda: None,
) -> Connected:
    """Connect all ranks; a collective call on the group.

    Args:
        members: this process's place.
        facts: JSON values that must be equal on all ranks.
        timeout_s: the longest time to wait for all ranks, in seconds.
        broken: returns the error that ends the wait, or None while it can go on.

    Raises:
        EngineError: the ranks are on several hosts or differ in facts, or one has died or makes
            another call; TimeoutExceeded: a rank did not arrive. All connected ranks are notified.
    """
    own = {
        "host": _host(), "facts": facts, "kind": members.kind, "turn": members.turn,
        **_process_identity(),
    }  # fmt: skip
    connector = _Connector(members, own, timeout_s, broken)
    try:
        members.store.set(_refusal_of(members.rank), json.dumps(None))  # clear an earlier refusal
        members.store.set(_entry_of(members.rank), json.dumps(own))
        return connector.lead() if members.rank == LEADER else connector.follow()
    except BaseException as error:
        if is_interrupt(error) or not isinstance(error, RuntimeError):
            with contextlib.suppress(RuntimeError):  # the others would wait for this rank
                note_refusal(members, f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        if isinstance(error, EngineError):
            raise
        raise EngineError(
            f"rank {members.rank} cannot {_WHAT}: the store of torch.distributed does not answer "
            f"({error}). The process that hosts it may have ended; restart all processes."
        ) from error


def note_refusal(members: Members, reason: str) -> None:
    """Notify ranks that open the group that this rank does not, because of an error."""
    note = {"turn": members.turn, "reason": reason[:2000]}
    members.store.set(_refusal_of(members.rank), json.dumps(note))


class _Connector:
    """Connects this rank to the others before a deadline."""

    def __init__(
        self, members: Members, own: Facts, timeout_s: float, broken: Callable[[], Exception | None]
    ) -> None:
        self._members, self._own, self._broken = members, own, broken
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._peers: dict[int, socket.socket] = {}
        self._refused_at: dict[int, float] = {}  # when a rank's refusal was first seen

    def lead(self) -> Connected:
        """Wait for all ranks, and notify them that all are connected, or why not."""
        rank, world, _, store, *_ = self._members
        arrived = {rank: self._own}
        listener, secret = _listener(), secrets.token_hex(16)
        try:
            name = {"address": listener.getsockname().hex(), "secret": secret}
            store.set(_NAME, json.dumps({**self._own, **name}))
            while len(arrived) < world:
                readable = ready([listener, *self._peers.values()], _POLL_S)
                if listener in readable:
                    self._accept(listener, secret, arrived)
                    continue
                for lost in [other for other, peer in self._peers.items() if peer in readable]:
                    self._peers.pop(lost).close()  # a waiting rank sends nothing: it has closed
                    del arrived[lost]
                missing = sorted(set(range(world)) - set(arrived))
                self._check_unbroken()
                for other in missing:
                    self._check_coming(other)
                if time.monotonic() > self._deadline:
                    raise self._timeout_error(missing)
            entries = [arrived[other] for other in range(world)]
            _check_alike(entries)
            pids = [entry["pid"] for entry in entries]
            turn = max(entry["turn"] for entry in entries)
            self._notify({"say": "welcome", "pids": pids, "turn": turn})
        except BaseException as error:
            self._notify({"say": "end", "error": _packed_error(error, rank)})
            for peer in self._peers.values():
                peer.close()
            raise
        finally:
            listener.close()
        return Connected(self._peers, pids, turn)

    def _accept(self, listener: socket.socket, secret: str, arrived: dict[int, Facts]) -> None:
        peer, _ = listener.accept()
        hello = _hello_of(peer, secret, self._members.world)
        if hello is None:
            peer.close()  # not a rank of this group
            return
        rank = int(hello["rank"])
        earlier = self._peers.pop(rank, None)
        if earlier is not None:  # the rank had given up and retries
            earlier.close()
        self._peers[rank], arrived[rank] = peer, hello

    def _notify(self, message: Facts) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the first rendezvous notices a peer that left
                peer.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def follow(self) -> Connected:
        """Connect to rank 0, and wait until it says that all ranks are connected."""
        while True:
            leader = self._connect_to_leader()
            if leader is not None:
                try:
                    connections = self._wait_for_welcome(leader)
                except BaseException:
                    leader.close()
                    raise
                if connections is not None:
                    return connections
                leader.close()  # rank 0 has given up; it may retry
            self._check_unbroken()
            self._check_coming(LEADER)
            if time.monotonic() > self._deadline:
                raise self._timeout_error([LEADER])
            time.sleep(_POLL_S / 2)

    def _connect_to_leader(self) -> socket.socket | None:
        """Return a connection to rank 0, or None while it does not listen."""
        entry = _read(self._members.store, _NAME)
        if entry is None:
            return None
        _check_hosts({LEADER: entry, self._members.rank: self._own})
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            leader.settimeout(_HELLO_TIMEOUT_S)
            leader.connect(bytes.fromhex(entry["address"]))
            _check_user(leader)
            hello = {**self._own, "rank": self._members.rank, "secret": entry["secret"]}
            leader.send(json.dumps(hello).encode())
        except PermissionError as problem:
            leader.close()
            raise EngineError(
                f"rank {self._members.rank} cannot reach rank {LEADER} (pid {entry['pid']}) on "
                f"this host: {problem}. Run all ranks as one user, and in one container."
            ) from None
        except OSError:  # the name is stale
            leader.close()
            return None
        leader.setblocking(False)
        return leader

    def _wait_for_welcome(self, leader: socket.socket) -> Connected | None:
        """Wait for rank 0's answer; return None if it has closed the connection."""
        while not ready([leader], _POLL_S):
            self._check_unbroken()
            if time.monotonic() > self._deadline + _GRACE_S:
                raise self._timeout_error([LEADER])
        try:
            data = leader.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        message = json.loads(data)
        if message["say"] == "end":
            raise _unpacked_error(message["error"])
        return Connected({LEADER: leader}, message["pids"], message["turn"])

    # ---- missing ranks

    def _check_unbroken(self) -> None:
        if (error := self._broken()) is not None:
            raise error

    def _check_coming(self, rank: int) -> None:
        """Raise if a rank is known not to arrive: it refused, or has died."""
        store = self._members.store
        refused = _read(store, _refusal_of(rank))
        if refused is None or refused["turn"] != self._members.turn:
            self._refused_at.pop(rank, None)
        elif time.monotonic() > _REFUSAL_LASTS_S + self._refused_at.setdefault(
            rank, time.monotonic()
        ):
            raise EngineError(
                f"rank {rank} cannot {_WHAT} because of an error: {refused['reason']}"
            )
        entry = _read(store, _entry_of(rank))
        if entry is None:
            return
        _check_hosts({rank: entry, self._members.rank: self._own})
        if _has_ended(entry):
            raise EngineError(
                f"rank {rank} (pid {entry['pid']}) has died, so rank {self._members.rank} "
                f"cannot {_WHAT}. {GONE}"
            )

    def _timeout_error(self, missing: list[int]) -> TimeoutExceeded:
        names = []
        for rank in missing:
            entry = _read(self._members.store, _entry_of(rank))
            pid = f" (pid {entry['pid']})" if entry else ""
            names.append(f"rank {rank}{pid}")
        return TimeoutExceeded(
            self._members.rank, _WHAT, " and ".join(names), self._timeout_s,
            "Every rank must make the same calls in the same order; check that these processes "
            "still run.",
        )  # fmt: skip


def _entry_of(rank: int) -> str:
    return f"ficco/rank/{rank}"


def _refusal_of(rank: int) -> str:
    return f"ficco/refused/{rank}"


def _read(store: Store, key: str) -> Facts | None:
    if not store.check([key]):
        return None
    value: Facts | None = json.loads(store.get(key))
    return value


def _packed_error(error: BaseException, rank: int) -> Facts:
    if isinstance(error, TimeoutExceeded):
        return {"late": [error.rank, error.step, error.signal, error.seconds, error.hint]}
    if isinstance(error, EngineError):
        return {"text": str(error)}
    return {"text": f"rank {rank} could not {_WHAT}: {error!r}"}


def _unpacked_error(packed: Facts) -> EngineError:
    if "late" in packed:
        return TimeoutExceeded(*packed["late"])
    return EngineError(packed["text"])


def ready(sockets: list[socket.socket], wait_s: float) -> list[socket.socket]:
    """Wait until a socket is readable; return all readable sockets."""
    poll = select.poll()
    by_descriptor = {sock.fileno(): sock for sock in sockets}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(wait_s * 1e3)]


def _listener() -> socket.socket:
    """Return a listening socket with a random name that is in no file system."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0ficco-" + secrets.token_hex(16).encode())
    listener.listen(128)  # more than the largest number of ranks
    return listener


def _check_user(peer: socket.socket) -> None:
    """Refuse (PermissionError) a peer process of another user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise PermissionError(f"the other end belongs to user {user}, not to {os.geteuid()}")


def _hello_of(peer: socket.socket, secret: str, world: int) -> Facts | None:
    """Return the hello of a new connection; None if it is not a rank of this group."""
    peer.settimeout(_HELLO_TIMEOUT_S)
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


def _process_identity() -> Facts:
    """Return facts by which processes in the same pid namespace see whether this one lives."""
    return {
        "pid": os.getpid(),
        "born": _start_time(os.getpid()),
        "sees": os.readlink("/proc/self/ns/pid"),
    }


def _start_time(pid: int) -> str | None:
    """Return the start time of a process; None if it does not exist or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields[fields.rindex(")") + 2 :].split()
    return None if state in "ZX" else rest[18]


def _has_ended(entry: Facts) -> bool:
    if entry["sees"] != os.readlink("/proc/self/ns/pid"):
        return False  # it may run in another container
    return _start_time(entry["pid"]) != str(entry["born"])


# ---- facts that must be equal on all ranks


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
    (first_rank, first), *others = sorted(entries.items())
    for rank, entry in others:
        if entry["host"] != first["host"]:
            raise EngineError(
                f"rank {first_rank} runs on host {first['host'][0]!r} and rank {rank} on "
                f"{entry['host'][0]!r}; ficco's windows are memory of one host, so make groups of "
                "ranks of one host (and one container)"
            )


def _check_alike(entries: list[Facts]) -> None:
    _check_hosts(dict(enumerate(entries)))
    check_kinds([entry["kind"] for entry in entries])
    for rank, entry in enumerate(entries):
        if entry["facts"] != entries[0]["facts"]:
            first, other = entries[0]["facts"], entry["facts"]
            name = next(name for name in first | other if first.get(name) != other.get(name))
            raise EngineError(
                f"rank 0 requests {name}={first.get(name)} and rank {rank} requests "
                f"{name}={other.get(name)}; pass the same on every rank"
            )
