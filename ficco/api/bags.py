"""Check the tensor lists of `embedding_all_to_all`, and find the dtype and device of all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ficco.api import groups
from ficco.api.arguments import check_dense, check_sized, process_group
from ficco.core.errors import InputError, shown
from ficco.operators import bag_functions
from ficco.operators.bag_arrays import bag_modes
from ficco.runtime.members import rank_in

SUMMED, WITH_MODES = bag_functions.SUMMED.name, bag_functions.POOLED.name

Tensor = torch.Tensor
# Options of torch.nn.functional.embedding_bag: what they are by default, and what to do instead.
_OTHERS: dict[str, tuple[Any, str]] = {
    "include_last_offset": (False, "leave out the last offset: pass offsets[:-1]"),
    "padding_idx": (None, "leave the lookups of that row out of indices, and out of offsets"),
    "per_sample_weights": (None, "pass weights=, a list with an entry per table"),
    "max_norm": (None, "renormalize the tables before the call"),
    "scale_grad_by_freq": (False, "scale the gradients after backward"),
}
_LEAF = torch.zeros(1, 1, requires_grad=True)


def listed(values: Any, name: str) -> list[Tensor]:
    """Return an iterable of tensors, one per table, as a list.

    Raises:
        InputError: `values` is a tensor or not iterable, or an entry is not a dense tensor.
    """
    single = isinstance(values, (Tensor, type)) or hasattr(values, "shape")
    if single or not hasattr(values, "__iter__"):
        raise InputError(
            f"{name}: {type(values).__name__} found; give a list of torch tensors, one per table"
        )
    tensors = list(values)
    for i, tensor in enumerate(tensors):
        _check_tensor(tensor, f"{name}[{i}]")
    return tensors


def _check_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        weight = "; pass its weight" if isinstance(tensor, torch.nn.Module) else ""
        kind = type(tensor).__name__
        raise InputError(f"{name}: {kind} found; a torch tensor is needed{weight}")
    check_sized(tensor, name)
    check_dense(tensor, name)


def refuse_others(options: Mapping[str, Any]) -> None:
    """Refuse options that embedding_all_to_all does not have.

    Raises:
        InputError: torch.nn.functional.embedding_bag has such an option. TypeError: it has not.
    """
    for name, value in options.items():
        default, remedy = _OTHERS.get(name, (None, ""))
        if not remedy:
            raise TypeError(f"embedding_all_to_all() got an unexpected keyword argument {name!r}")
        if value is not default:
            raise InputError(f"{name}={shown(value)}: embedding_all_to_all has no {name}; {remedy}")


def pooled_by(mode: Any, weights: Any, count: int) -> tuple[list[str], list[Tensor]]:
    """Return how each of a rank's `count` tables is pooled, and the weights of those that have any.

    Raises:
        InputError: they do not fit; see `bag_modes`.
    """
    if weights is None and isinstance(mode, str) and mode == "sum":
        return ["sum"] * count, []
    modes = bag_modes(mode, weights, count)
    given = [each for each in weights or () if each is not None]
    names = [f"weights[{i}]" for i, each in enumerate(modes) if each == "weighted"]
    for name, each in zip(names, given, strict=True):
        _check_tensor(each, name)
    return list(modes), given


def empty_like_tables(
    tables: Sequence[Tensor],
    dimension: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    group: Any,
) -> Tensor:
    """Return an empty tensor of the dtype and device of all tables.

    Raises:
        InputError: `dtype` or `device` is invalid, or differs from that of the first table.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype={shown(dtype)}: a torch dtype is needed, such as torch.float32")
    if device is not None:
        device = _existing(device)
    if not tables:
        where = _device(group) if device is None else device
        return torch.empty((0, dimension), dtype=dtype or torch.float32, device=where)
    empty = tables[0].new_empty((0, dimension))
    if dtype is not None and dtype != empty.dtype:
        raise InputError(f"dtype={dtype}, but tables[0] is {empty.dtype}; leave dtype= out")
    if device is not None and device != empty.device:
        raise InputError(f"device={device}, but tables[0] is on {empty.device}; give one device")
    return empty


def with_gradient(like: Tensor) -> Tensor:
    """Return a row that needs a gradient, so this rank takes part in backward."""
    if torch.compiler.is_dynamo_compiling():  # dynamo does not support new leaves
        return _LEAF.to(like).expand(1, like.shape[1])
    return like.new_zeros((1, like.shape[1])).requires_grad_()


def _existing(device: torch.device | str) -> torch.device:
    """Return a device, checked by PyTorch.

    Raises:
        InputError: PyTorch has no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"device={device!r}: PyTorch has no such device here ({error}); give one that "
            "it has, such as 'cpu'"
        ) from None


def _device(group: Any) -> torch.device:
    """Return the device of a rank without tables: that of its open group, else of its backend."""
    pg = process_group(group)
    rank_in(pg)
    if (name := groups.device_of(pg)) is not None:
        return torch.device(name)
    backends = str(torch.distributed.get_backend_config(pg))
    return torch.device("cuda" if "nccl" in backends and torch.cuda.is_available() else "cpu")
