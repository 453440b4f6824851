"""Which process each rank is, told to the store of torch.distributed before anything is imported.

A rank may die while it imports ficco's modules. Ranks that wait for it then know its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import weakref
from pathlib import Path
from typing import Any

__all__ = ["Facts", "announce", "facts_of_process", "has_ended", "key_of"]

Facts = dict[str, Any]
_told: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of all ranks that know this process


def announce() -> None:
    """Tell this process to the other ranks, once, if torch.distributed is initialized."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    everyone = dist.group.WORLD
    if everyone in _told or dist.get_world_size() == 1:
        return
    _told.add(everyone)
    with contextlib.suppress(RuntimeError):  # the store may not answer; the call itself will tell
        everyone.get_group_store().set(key_of(dist.get_rank()), json.dumps(facts_of_process()))


def key_of(rank: int) -> str:
    """Return the store's key for the process of a rank of the group of all ranks."""
    return f"ficco/process/{rank}"


def facts_of_process() -> Facts:
    """Return facts by which processes of the same PID namespace see whether this one lives."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    name = os.environ.get("FICCO_NODE") or socket.gethostname()
    return {
        # Sockets without a name reach processes of one network namespace.
        "node": [name, boot, os.readlink("/proc/self/ns/net")],
        "pid": os.getpid(),
        "born": _start_time(os.getpid()),
        "sees": os.readlink("/proc/self/ns/pid"),
    }


def has_ended(facts: Facts) -> bool:
    """Return whether a process of this node has ended; False if that cannot be seen from here."""
    if facts["born"] is None or facts["sees"] != os.readlink("/proc/self/ns/pid"):
        return False  # it may run in another container
    return _start_time(facts["pid"]) != str(facts["born"])


def _start_time(pid: int) -> str | None:
    """Return the start time of a process; None if it does not exist or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields[fields.rindex(")") + 2 :].split()
    return None if state in "ZX" else rest[18]
