"""How the processes of a group find each other, once: through torch.distributed, and then sockets.

Every rank connects to rank 0. Sockets have names in no file system, and only processes of the same
user that know what the ranks told each other get past them.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ficco.errors import EngineError, InputError, TimeoutExceeded

__all__ = [
    "LEADER", "MESSAGE_BYTES", "Members", "check_kinds", "connected", "members_of", "ready",
]  # fmt: skip

LEADER = 0  # the rank that all others connect to
MESSAGE_BYTES = 1 << 16
_HELLO_S = 1.0  # how long a new connection may take to say who it is

Facts = dict[str, Any]


class Members(NamedTuple):
    """A process's place in a group.

    Attributes:
        rank, world: this process, of so many.
        gather: returns what every rank gave to it, by rank; a collective call.
    """

    rank: int
    world: int
    gather: Callable[[Any], list[Any]]


def members_of(group: Any, backend: str = "gloo") -> Members:
    """Return this process's place in a ProcessGroup or a DeviceMesh of one dimension.

    Args:
        group: the group.
        backend: what must serve it: "gloo" for CPU tensors, "nccl" for those of GPUs.

    Raises:
        InputError: it is neither, this process is not in it, or the backend does not serve it.
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
    # A backend may stand alone ("gloo") or beside others ("cpu:gloo,cuda:nccl").
    if backend not in str(dist.get_backend_config(group)):
        kind = "CPU" if backend == "gloo" else "CUDA"
        raise InputError(
            f"group has the backend {dist.get_backend(group)!r}, which does not serve {kind} "
            f"tensors; make it with backend={backend!r} or 'cpu:gloo,cuda:nccl'"
        )
    world = dist.get_world_size(group)

    def gather(mine: Any) -> list[Any]:
        found = [None] * world
        dist.all_gather_object(found, mine, group=group)
        return found

    return Members(rank, world, gather)


def connected(
    members: Members, facts: Facts, timeout_s: float
) -> tuple[dict[int, socket.socket], list[int]]:
    """Connect all ranks; a collective call on the group, whose own timeout holds for it.

    Args:
        members: this process's place.
        facts: what must be equal on all ranks; JSON values.
        timeout_s: how long connecting may last once all have called.

    Returns:
        Sockets that do not block, by rank (rank 0 has one to every other, they have one to it), and
        the process ids of all ranks.

    Raises:
        EngineError: the ranks are on several hosts, differ in facts, or one did not connect.
    """
    peers: dict[int, socket.socket] = {}
    listener = _listener() if members.rank == LEADER else None
    try:
        found = members.gather(
            {
                "host": _host(),
                "facts": facts,
                "pid": os.getpid(),
                "address": listener.getsockname().hex() if listener else None,
                "secret": secrets.token_hex(16),
            }
        )
        _check_alike(found)
        if listener is None:
            peers[LEADER] = _reach(members.rank, found, timeout_s)
        else:
            _accept(listener, peers, found, timeout_s)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    finally:
        if listener:
            listener.close()
    return peers, [entry["pid"] for entry in found]


def _reach(rank: int, found: list[Facts], timeout_s: float) -> socket.socket:
    leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        leader.settimeout(timeout_s)
        leader.connect(bytes.fromhex(found[LEADER]["address"]))
        _check_user(leader)
        leader.send(json.dumps({"rank": rank, "secret": found[rank]["secret"]}).encode())
    except OSError as problem:
        leader.close()
        raise EngineError(
            f"rank {rank} cannot reach rank {LEADER} (pid {found[LEADER]['pid']}) on this host: "
            f"{problem}. Does that process still run, and are both in one container?"
        ) from None
    leader.setblocking(False)
    return leader


def _accept(
    listener: socket.socket, peers: dict[int, socket.socket], found: list[Facts], timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while len(peers) < len(found) - 1:
        left = deadline - time.monotonic()
        if left <= 0 or not ready([listener], left):
            missing = sorted(set(range(len(found))) - {LEADER} - set(peers))
            who = " and ".join(f"rank {rank} (pid {found[rank]['pid']})" for rank in missing)
            raise TimeoutExceeded(
                LEADER, "open the group", f"the connection of {who}", timeout_s,
                "Look whether these processes still run.",
            )  # fmt: skip
        peer, _ = listener.accept()
        rank = _introduced(peer, found)
        if rank is None or rank in peers:
            peer.close()  # a stranger
        else:
            peers[rank] = peer


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


def _introduced(peer: socket.socket, found: list[Facts]) -> int | None:
    """Return the rank that a new connection is of; None: a stranger."""
    peer.settimeout(_HELLO_S)
    try:
        _check_user(peer)
        hello = json.loads(peer.recv(MESSAGE_BYTES))
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


def check_kinds(kinds: list[str]) -> None:
    """Refuse (EngineError) ranks that open the same group for different kinds of devices."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise EngineError(
                f"rank 0 opens the group for {kinds[0]} and rank {rank} for {kind}; pass tensors "
                "of one kind of device on all ranks (embedding_all_to_all on a rank without "
                "tables: device=)"
            )


def _check_alike(found: list[Facts]) -> None:
    check_kinds([entry.get("kind", "the CPU") for entry in found])
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
