"""Find the process group that the argument `group` of an operator stands for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ficco.errors import InputError, shown
from ficco.private.torch_core import group_named

__all__ = ["process_group"]

_DESTROYED = (
    "group: it was destroyed by destroy_process_group(); make another by "
    "torch.distributed.new_group() on all ranks and pass that"
)


def process_group(group: Any) -> Any:
    """Return the ProcessGroup of a group, a name, a 1-D DeviceMesh, or None (all ranks).

    Raises:
        InputError: torch.distributed is not initialized, the mesh has several dimensions, no group
            has the name, or the group was destroyed.
    """
    if group is None and (everyone := dist.group.WORLD) is not None:
        return everyone
    if not dist.is_initialized():
        raise InputError(
            "torch.distributed is not initialized, or was destroyed; call "
            "torch.distributed.init_process_group on every rank first, with the gloo backend "
            "for CPU tensors"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"group: a DeviceMesh of {group.ndim} dimensions; pass one of them, mesh['tp']"
            )
        try:
            return group.get_group()
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(_DESTROYED) from error
    if isinstance(group, str):
        try:
            return group_named(group)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"group={group!r}: no process group has this name; pass the ProcessGroup itself or "
                "a DeviceMesh of one dimension"
            ) from error
    if isinstance(group, dist.ProcessGroup):
        if not torch.compiler.is_dynamo_compiling():
            _check_not_destroyed(group)
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return group
    raise InputError(
        f"group={shown(group)}: a ProcessGroup, its name, a DeviceMesh of one dimension or None "
        "(all ranks) is needed"
    )


def _check_not_destroyed(group: Any) -> None:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise InputError(_DESTROYED) from None
