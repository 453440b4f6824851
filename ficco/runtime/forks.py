"""What a process that was forked may not use: the groups that its parent has open.

A child has none of its parent's threads, and shares the windows: what it wrote there, the parent's
peers would take for the parent's. Python calls `_leave` in the child, so that nothing is asked in
a call.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Protocol

__all__ = ["REFUSAL", "is_of_parent", "watch"]

REFUSAL = (
    "this process was forked from one that uses the group; its windows, its threads and the "
    "connections of torch.distributed are the parent's. Let the child call nothing of ficco (as "
    "workers of a DataLoader do), or start it by the method 'spawn' and give it a group of its own"
)


class _Leaves(Protocol):
    def leave_to_parent(self) -> None:
        """Refuse all calls in this process, a child, and keep what must not be freed here."""


_watched: weakref.WeakSet[_Leaves] = weakref.WeakSet()
_of_parent: list[Any] = []  # the group of all ranks when this process was forked


def watch(runtime: _Leaves) -> None:
    """Have a runtime left to this process in children that are forked from it."""
    _watched.add(runtime)


def is_of_parent() -> bool:
    """Whether torch.distributed was initialized by the process from which this one was forked."""
    return bool(_of_parent) and _of_parent[0] is _everyone()


def _everyone() -> Any:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def _leave() -> None:
    for runtime in list(_watched):
        runtime.leave_to_parent()
    everyone = _everyone()
    _of_parent[:] = [] if everyone is None else [everyone]


os.register_at_fork(after_in_child=_leave)
