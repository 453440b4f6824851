"""Connect the processes of a group, once, through a store of torch.distributed.

Every rank connects to rank 0 by a socket. Rank 0 writes the socket's name to the store, and the
others poll the store until they are connected. A rank that is late, retries after a failure, or
never arrives therefore leaves no other rank hanging:

    leader     name -> store | hello of every rank  | welcome -> all
    rank       poll store    | connect, hello       | welcome

Ranks on several nodes cannot share memory. Whoever sees that tells the others through the store,
and every rank then reads from the store where each of them is.

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
from typing import Any, NamedTuple, NoReturn, Protocol

import ficco
from ficco.core.errors import EngineError, SeveralNodes, TimeoutExceeded
from ficco.core.interrupts import is_interrupt
from ficco.core.logs import reporting
from ficco.core.presence import Facts, facts_of_process, has_ended
from ficco.core.settings import equal_variables
from ficco.runtime.failures import GONE

LEADER = 0  # the rank that all others connect to
MESSAGE_BYTES = 1 << 16
_HELLO_TIMEOUT_S = 1.0  # for a new connection to identify itself
_POLL_S = 0.05  # how often a waiting rank checks for ranks that have died or refuse to open
_GRACE_S = 1.0  # for the leader's verdict to arrive after the leader's deadline
_REFUSAL_LASTS_S = 0.5  # before it counts: if all ranks raise an error, all may retry
_NAME = "ficco/leader"  # the store's key for the name of rank 0's socket
_SPREAD = "ficco/nodes"  # the store's key that tells that ranks are on several nodes


class _Spread(Exception):
    """A rank is on another node."""


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
        what: the purpose for which the ranks connect, equal on all ranks.
        announced: returns what a rank's process has told by `presence.announce`, or None.
    """

    rank: int
    world: int
    kind: str
    store: Store
    turn: int = 1
    group: Any = None
    what: str = "open the group"
    announced: Callable[[int], Facts | None] = lambda rank: None


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
        SeveralNodes: the ranks are on several nodes; on all ranks.
        EngineError: the ranks differ in facts, or one has died or makes another call;
            TimeoutExceeded: a rank did not arrive. All connected ranks are notified.
    """
    own = {
        "facts": facts, "kind": members.kind, "turn": members.turn, "what": members.what,
        "version": ficco.__version__, "variables": equal_variables(), **facts_of_process(),
    }  # fmt: skip
    connector = _Connector(members, own, timeout_s, broken)
    try:
        members.store.set(_entry_of(members.rank), json.dumps(own))
        if members.rank != LEADER:  # it makes another attempt; what rank 0 said holds for its turn
            before = members._replace(turn=members.turn - 1)
            members.store.set(_refusal_of(before), json.dumps(None))
        with reporting(connector.waiting_in_words, members.rank == LEADER):
            try:
                return connector.lead() if members.rank == LEADER else connector.follow()
            except _Spread:
                connector.find_nodes()
    except SeveralNodes:
        raise
    except BaseException as error:
        if is_interrupt(error) or not isinstance(error, RuntimeError):
            with contextlib.suppress(RuntimeError):  # the others would wait for this rank
                note_refusal(members, f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        if isinstance(error, EngineError):
            if not isinstance(error, TimeoutExceeded):  # a rank that is late gets this error, too
                with contextlib.suppress(RuntimeError):
                    members.store.set(_refusal_of(members), json.dumps({"verdict": str(error)}))
            raise
        raise EngineError(
            f"rank {members.rank} cannot {members.what}: the store of torch.distributed does not "
            f"answer ({error}). The process that hosts it, mostly that of rank 0, has ended; its "
            "output may say why. Restart all processes."
        ) from error


def note_refusal(members: Members, reason: str) -> None:
    """Notify ranks that open the group that this rank does not, because of an error."""
    members.store.set(_refusal_of(members), json.dumps({"reason": reason[:2000]}))


class _Connector:
    """Connects this rank to the others before a deadline."""

    def __init__(
        self, members: Members, own: Facts, timeout_s: float, broken: Callable[[], Exception | None]
    ) -> None:
        self._members, self._own, self._broken = members, own, broken
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._peers: dict[int, socket.socket] = {}
        self._missing: dict[int, Facts | None] = {}  # ranks, and what is known of their processes
        self._nodes_differ = False  # whether ranks are known to be on several nodes
        self._refused_at: dict[int, float] = {}  # when a rank's refusal was first seen

    def lead(self) -> Connected:
        """Wait for all ranks, and notify them that all are connected, or why not."""
        rank, world, _, store, *_ = self._members
        self._missing = dict.fromkeys(set(range(world)) - {rank})
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
                self._wait_for(sorted(set(range(world)) - set(arrived)))
            pids = [arrived[other]["pid"] for other in range(world)]
            turn = max(entry["turn"] for entry in arrived.values())
            self._notify({"say": "welcome", "pids": pids, "turn": turn})
        except BaseException as error:
            spread = isinstance(error, _Spread)
            end = {"say": "end", "error": self._packed_error(error)}
            self._notify({"say": "spread"} if spread else end)
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
        _check_alike(arrived)

    def _notify(self, message: Facts) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the first rendezvous notices a peer that left
                peer.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def follow(self) -> Connected:
        """Connect to rank 0, and wait until it says that all ranks are connected."""
        while True:
            self._wait_for([LEADER])
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
            time.sleep(_POLL_S / 2)

    def _connect_to_leader(self) -> socket.socket | None:
        """Return a connection to rank 0, or None while it does not listen."""
        entry = _read(self._members.store, _NAME)
        if entry is None:
            return None
        _check_node(entry, self._own)
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
                raise self._timeout_error()
        try:
            data = leader.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        message = json.loads(data)
        if message["say"] == "spread":
            raise _Spread
        if message["say"] == "end":
            raise _unpacked_error(message["error"])
        return Connected({LEADER: leader}, message["pids"], message["turn"])

    def find_nodes(self) -> NoReturn:
        """Read from the store on which node each rank is, and raise SeveralNodes.

        What ranks wrote at an earlier opening serves as well: a process does not change its node.
        """
        members, self._nodes_differ = self._members, True
        members.store.set(_SPREAD, "true")
        while True:
            known = {rank: _read(members.store, _entry_of(rank)) for rank in range(members.world)}
            entries = {rank: entry for rank, entry in known.items() if entry is not None}
            if len(entries) == members.world:
                break
            self._wait_for(sorted(set(known) - set(entries)))
            time.sleep(_POLL_S / 2)
        for rank in entries:
            refused = _read(members.store, _refusal_of(members._replace(rank=rank)))
            if refused is not None and "verdict" in refused:
                raise EngineError(refused["verdict"])
        _check_settings(entries)
        now = {rank: each for rank, each in entries.items() if each["turn"] == members.turn}
        if LEADER in now:
            _check_alike(now)
        nodes: dict[tuple[str, ...], list[int]] = {}
        for rank, entry in sorted(entries.items()):
            nodes.setdefault(tuple(entry["node"]), []).append(rank)
        where = "; ".join(f"{name!r}: ranks {ranks}" for (name, *_), ranks in nodes.items())
        raise SeveralNodes(
            f"its ranks are on {len(nodes)} nodes, which share no memory ({where}); groups of "
            "ranks of one node overlap"
        )

    # ---- missing ranks

    def _check_unbroken(self) -> None:
        if (error := self._broken()) is not None:
            raise error

    def _wait_for(self, missing: list[int]) -> None:
        """Raise if the wait for these ranks is over: one of them will not arrive, or it is late."""
        self._missing = {rank: self._missing.get(rank) for rank in missing}
        self._check_unbroken()
        if not self._nodes_differ and self._members.store.check([_SPREAD]):
            raise _Spread
        for rank in missing:
            self._check_coming(rank)
        if time.monotonic() > self._deadline:
            raise self._timeout_error()

    def _check_coming(self, rank: int) -> None:
        """Raise if a rank is known not to arrive: it refused, or has died."""
        members = self._members
        facts = _read(members.store, _entry_of(rank)) or members.announced(rank)
        self._missing[rank] = facts
        died = False
        if facts is not None:
            if not self._nodes_differ:
                _check_node(facts, self._own)
            died = facts.get("node") == self._own["node"] and has_ended(facts)
        refused = _read(members.store, _refusal_of(members._replace(rank=rank)))
        if refused is not None:
            if "verdict" in refused:
                raise EngineError(refused["verdict"])
            begin = self._refused_at.setdefault(rank, time.monotonic())
            if died or time.monotonic() > begin + _REFUSAL_LASTS_S:
                raise EngineError(
                    f"rank {rank} cannot {members.what} because of an error: {refused['reason']}"
                )
        if facts is not None and died:
            raise EngineError(
                f"rank {rank} (pid {facts['pid']}) has died, so rank {members.rank} "
                f"cannot {members.what}. {GONE}"
            )

    def _missing_in_words(self) -> str:
        return " and ".join(
            f"rank {rank} (" + (f"pid {facts['pid']})" if facts else "it has not called ficco)")
            for rank, facts in self._missing.items()
        )

    def waiting_in_words(self) -> str:
        """Return a sentence about the ranks that this rank waits for."""
        members = self._members
        return f"rank {members.rank} waits for {self._missing_in_words()} to {members.what}"

    def _timeout_error(self) -> TimeoutExceeded:
        return TimeoutExceeded(
            self._members.rank, self._members.what, self._missing_in_words(), self._timeout_s,
            "Every rank must make the same calls in the same order; check that these processes "
            "still run. ficco.prepare(timeout_s=...) sets how long ranks wait for each other.",
        )  # fmt: skip

    def _packed_error(self, error: BaseException) -> Facts:
        if isinstance(error, TimeoutExceeded):
            return {"late": [error.rank, error.step, error.signal, error.seconds, error.hint]}
        if isinstance(error, EngineError):
            return {"text": str(error)}
        return {"text": f"rank {self._members.rank} could not {self._members.what}: {error!r}"}


def _entry_of(rank: int) -> str:
    return f"ficco/rank/{rank}"


def _refusal_of(members: Members) -> str:
    return f"ficco/refused/{members.rank}/{members.turn}"


def _read(store: Store, key: str) -> Facts | None:
    if not store.check([key]):
        return None
    value: Facts | None = json.loads(store.get(key))
    return value


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


# ---- facts that must be equal on all ranks


def _check_node(entry: Facts, own: Facts) -> None:
    """Raise _Spread if another rank is on another node."""
    if entry.get("node", own["node"]) != own["node"]:  # releases that know no nodes are refused
        raise _Spread


def _check_settings(entries: dict[int, Facts]) -> None:
    """Refuse ranks whose release of ficco or variables differ from those of rank 0."""
    first = entries[LEADER]
    for rank, entry in sorted(entries.items()):
        if entry["version"] != first["version"]:
            raise EngineError(
                f"rank 0 has ficco {first['version']} and rank {rank} has {entry['version']}; "
                "install one version for all ranks"
            )
        given, other = first.get("variables", {}), entry.get("variables", {})
        for name in sorted(given | other):
            if given.get(name) != other.get(name):
                raise EngineError(
                    f"rank 0 has {name}={given.get(name, '')!r} and rank {rank} has "
                    f"{name}={other.get(name, '')!r}; set it to one value on all ranks"
                )


def _check_alike(entries: dict[int, Facts]) -> None:
    """Refuse ranks that differ from rank 0; not all ranks have arrived."""
    _check_settings(entries)
    first = entries[LEADER]
    for rank, entry in sorted(entries.items()):
        if entry["what"] != first["what"]:
            raise EngineError(
                f"rank {rank} came to {entry['what']}, rank 0 to {first['what']}. Make the same "
                "calls on every rank, in the same order."
            )
        if entry["kind"] != first["kind"]:
            raise EngineError(
                f"rank 0 opens the group for {first['kind']} and rank {rank} for {entry['kind']}; "
                "pass tensors of one kind of device on all ranks (embedding_all_to_all on a rank "
                "without tables: device=)"
            )
        asked, other = first["facts"], entry["facts"]
        for name in asked | other:
            if asked.get(name) != other.get(name):
                raise EngineError(
                    f"rank 0 requests {name}={asked.get(name)} and rank {rank} requests "
                    f"{name}={other.get(name)}; pass the same on every rank"
                )
