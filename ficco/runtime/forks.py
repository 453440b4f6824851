"""Keep a forked child process from using the groups that its parent has open.

A child has none of its parent's threads, but shares the windows: the parent's peers would take
the child's writes for the parent's. Python calls `_leave` in the child, so calls need no check.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Protocol

REFUSAL = (
    "this process was forked from one that uses the group; the windows, the threads and the "
    "connections of torch.distributed belong to the parent. Do not call ficco in the child (a "
    "DataLoader worker need not), or start it by the method 'spawn' and give it its own group"
)


class _Leaves(Protocol):
    def leave_to_parent(self) -> None:
        """Refuse all calls in this child process; keep objects that must not be freed here."""


_watched: weakref.WeakSet[_Leaves] = weakref.WeakSet()
_of_parent: list[Any] = []  # the group of all ranks when this process was forked


def watch(runtime: _Leaves) -> None:
    """Disable a runtime in children that are forked from this process."""
    _watched.add(runtime)


def is_of_parent() -> bool:
    """Return whether torch.distributed was initialized by the parent before this fork."""
    return bool(_of_parent) and _of_parent[0] is _world_group()


def _world_group() -> Any:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def _leave() -> None:
    for runtime in list(_watched):
        runtime.leave_to_parent()
    group = _world_group()
    _of_parent[:] = [] if group is None else [group]


os.register_at_fork(after_in_child=_leave)
