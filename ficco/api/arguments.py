"""The arguments of a call: tensors as lists, sizes and axes, the group, and checks of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ficco.core.checking import whole_number, whole_numbers
from ficco.core.errors import InputError, shown
from ficco.core.private.torch_core import group_named
from ficco.operators.problem_checks import MOST

Tensor = torch.Tensor
_DESTROYED = (
    "group: it was destroyed by destroy_process_group(); make another by "
    "torch.distributed.new_group() on all ranks and pass that"
)


def pairs_of(x: Any, w: Any) -> tuple[list[Any], list[Any]]:
    """Return inputs and weights as lists of equal length."""
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        return [x], [w]
    xs, ws = (list(arg) if isinstance(arg, (tuple, list)) else [arg] for arg in (x, w))
    if len(xs) != len(ws) or not xs:
        raise InputError(f"{len(xs)} inputs, {len(ws)} weights: give pairs of x and w")
    return xs, ws


def _several(w: Any) -> list[Any]:
    """Return weights as a list; entries that are not tensors are refused later."""
    if isinstance(w, (tuple, list)):
        return list(w)
    if isinstance(w, (Tensor, type)) or hasattr(w, "shape") or not hasattr(w, "__iter__"):
        return [w]
    return list(w)


def weights_of(w: Any, bias: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """Return the weights, the biases, and per weight whether it has a bias."""
    weights = _several(w)
    if bias is None:
        return weights, [], [False] * len(weights)
    biases = list(bias) if isinstance(bias, (tuple, list)) else [bias] * len(weights)
    return (
        weights,
        [offset for offset in biases if offset is not None],
        [offset is not None for offset in biases],
    )


def sizes(name: str, values: Any) -> Any:
    """Return a copy of sizes as a list, because backward reads it too.

    Raises:
        InputError: they are not a sequence of whole numbers.
    """
    if values is None or torch.compiler.is_dynamo_compiling():
        return copied_list(values)
    if isinstance(values, Iterator):  # read once
        values = list(values)
    try:
        if True in [type(value) is torch.SymInt for value in values]:  # from a tracer
            return list(values)
    except (TypeError, RuntimeError):  # RuntimeError: of a DeviceMesh
        pass  # not a sequence: refused below
    return list(whole_numbers(values, name))


def size(name: str, value: Any) -> Any:
    """Return one size; raise as `sizes`."""
    if torch.compiler.is_dynamo_compiling() or isinstance(value, torch.SymInt):
        return value
    return whole_number(value, name, 0, MOST)


def copied_list(values: Sequence[Any] | None) -> list[Any] | None:
    """Return a copy of the values as a list, because backward reads it too."""
    if values is None or torch.compiler.is_dynamo_compiling():
        return None if values is None else list(values)
    try:
        axes = None if isinstance(values, (str, bytes)) else list(values)
    except (TypeError, RuntimeError):
        axes = None
    if axes is None:
        raise InputError(
            f"axes={shown(values)}: a list with 'rows' or 'contraction' per weight is needed"
        )
    for i, axis in enumerate(axes):
        if not isinstance(axis, str):
            raise InputError(f"axes[{i}]={shown(axis)}: 'rows' or 'contraction' is needed")
    return axes


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


def check_dense(tensor: Tensor, name: str) -> None:
    """Refuse tensors that are not strided.

    Raises:
        InputError: the tensor is nested, sparse, or of another library's layout.
    """
    if tensor.is_nested:
        raise InputError(
            f"{name} is a nested tensor; a dense tensor is needed: pad it by "
            "torch.nested.to_padded_tensor(), or pass its rows, values() of the jagged layout"
        )
    if tensor.layout != torch.strided:
        kind = "sparse" if "sparse" in str(tensor.layout) else "not dense"
        raise InputError(
            f"{name} is {kind} ({tensor.layout}); a dense tensor is needed: pass .to_dense()"
        )


def check_sized(tensor: Tensor, name: str) -> None:
    """Refuse a parameter of a lazy module that has not been called.

    Raises:
        InputError: the tensor is such a parameter.
    """
    if not torch.compiler.is_dynamo_compiling() and is_lazy(tensor):
        raise InputError(
            f"{name} has no size yet: it is a parameter of a lazy module; call the module first"
        )


def check_held(tensor: Tensor, name: str) -> None:
    """Refuse a tensor whose storage was freed or is smaller than the tensor.

    Raises:
        InputError: the storage is too small.
    """
    if torch.compiler.is_compiling() or not tensor.numel():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum([(size - 1) * step for size, step in steps])
    size, needed = tensor.untyped_storage().nbytes(), (last + 1) * tensor.element_size()
    if size < needed:
        raise InputError(
            f"{name} needs {needed} bytes of its storage, which has {size}: it was freed or made "
            "smaller (for example by FSDP after a forward); restore its memory before the call"
        )
