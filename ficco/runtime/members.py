"""A process's place in a group of torch.distributed."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ficco.errors import EngineError, InputError
from ficco.runtime import forks
from ficco.runtime.bootstrap import Members, note_refusal

__all__ = ["members_of", "note_turn", "refuse_to_open"]

_KINDS = {"gloo": "the CPU", "nccl": "GPUs"}  # of tensors that a backend serves
_turns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def members_of(group: Any, backend: str = "gloo") -> Members:
    """Return this process's place in a ProcessGroup or a DeviceMesh of one dimension.

    Args:
        group: the group.
        backend: what must serve it: "gloo" for CPU tensors, "nccl" for those of GPUs.

    Raises:
        InputError: it is neither, this process is not in it, or the backend does not serve it.
        EngineError: the group is that of the process from which this one was forked.
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
    if forks.is_of_parent():
        raise EngineError(forks.REFUSAL)
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
    return _here(group, rank, _KINDS[backend])


def _here(group: Any, rank: int, kind: str) -> Members:
    import torch.distributed as dist

    note_turn(group, 1 + _turns.get(group, 0))
    return Members(
        rank, dist.get_world_size(group), kind, group.get_group_store(), _turns[group], group
    )


def note_turn(group: Any, turn: int) -> None:
    """Note how often the ranks of a group have opened it, or refused to."""
    _turns[group] = turn


def refuse_to_open(group: Any, reason: str) -> None:
    """Tell ranks that open a group that this one does not come, because of an error."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):  # a store that does not answer tells nobody
        note_refusal(_here(group, dist.get_rank(group), ""), reason)
