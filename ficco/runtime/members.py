"""A process's place in a group of torch.distributed."""

from __future__ import annotations

import contextlib
import json
import weakref
from functools import partial
from typing import Any

from ficco.core.errors import EngineError, InputError
from ficco.core.presence import Facts, key_of
from ficco.runtime import forks
from ficco.runtime.bootstrap import Members, note_refusal

# The kind of tensors that a backend supports.
_KINDS = {"gloo": "the CPU", "nccl": "GPUs", "": "any device"}
_turns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def rank_in(group: Any) -> int:
    """Return this process's rank in a ProcessGroup.

    Args:
        group: the group, or what `torch.distributed.new_group` returns outside of the group.

    Raises:
        InputError: this process is not one of its ranks.
    """
    import torch.distributed as dist

    if type(group) is dist.ProcessGroup:  # get_rank is slower
        return int(group.rank())
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError(
            f"group: this process, rank {dist.get_rank()} of all, is not one of its ranks; make "
            "the call on its ranks alone, or pass a group that contains this process"
        )
    return rank


def members_of(group: Any, backend: str = "gloo") -> Members:
    """Return this process's place in a ProcessGroup or a DeviceMesh of one dimension.

    Args:
        group: the group.
        backend: the backend it must have: "gloo" for CPU tensors, "nccl" for GPU tensors; "": any.

    Raises:
        InputError: `group` is neither, does not contain this process, or lacks the backend.
        EngineError: the group belongs to the process from which this one was forked.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"group is a DeviceMesh of {group.ndim} dimensions; pass one of them: mesh['tp']"
            )
        group = group.get_group()
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group: {type(group).__name__} found; a ProcessGroup this process belongs to, or a "
            "DeviceMesh, is needed (dist.group.WORLD, dist.new_group(...), mesh['tp'])"
        )
    if forks.is_of_parent():
        raise EngineError(forks.REFUSAL)
    rank = rank_in(group)
    # The configuration names one backend ("gloo") or several ("cpu:gloo,cuda:nccl").
    if backend not in str(dist.get_backend_config(group)):
        kind = "CPU" if backend == "gloo" else "CUDA"
        raise InputError(
            f"group has the backend {dist.get_backend(group)!r}, which does not support {kind} "
            f"tensors; make it with backend={backend!r} or 'cpu:gloo,cuda:nccl'"
        )
    return _here(group, rank, _KINDS[backend])


def _here(group: Any, rank: int, kind: str) -> Members:
    import torch.distributed as dist

    note_turn(group, 1 + _turns.get(group, 0))
    return Members(
        rank, dist.get_world_size(group), kind, group.get_group_store(), _turns[group], group,
        announced=partial(_announced, group),
    )  # fmt: skip


def _announced(group: Any, rank: int) -> Facts | None:
    """Return what the process of a rank of a group has told by `presence.announce`, or None."""
    import torch.distributed as dist

    key, everyone = key_of(dist.get_global_rank(group, rank)), dist.group.WORLD
    store: Any = everyone.get_group_store() if everyone is not None else None
    facts: Facts | None = json.loads(store.get(key)) if store and store.check([key]) else None
    return facts


def note_turn(group: Any, turn: int) -> None:
    """Record how often the ranks of a group have opened it or refused to open it."""
    _turns[group] = turn


def refuse_to_open(group: Any, reason: str) -> None:
    """Notify the ranks that open a group that an error keeps this rank from opening it."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):  # the store may not answer
        note_refusal(_here(group, dist.get_rank(group), ""), reason)
