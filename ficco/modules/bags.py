"""What `embedding_all_to_all` is given: lists of tensors; dtype and device of all tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ficco.errors import InputError
from ficco.modules import groups
from ficco.modules.calling import check_dense, check_sized

__all__ = ["like", "listed"]

Tensor = torch.Tensor


def listed(values: Any, name: str) -> list[Tensor]:
    """Return tensors, one per table, as a list; any iterable of them serves.

    Raises:
        InputError: it is a tensor, or nothing to iterate over; an entry is no dense tensor.
    """
    one = isinstance(values, (Tensor, type)) or hasattr(values, "shape")
    if one or not hasattr(values, "__iter__"):
        raise InputError(
            f"{name}: {type(values).__name__} found; give a list of torch tensors, one per table"
        )
    found = list(values)
    for i, each in enumerate(found):
        if not isinstance(each, Tensor):
            weight = "; pass its weight" if isinstance(each, torch.nn.Module) else ""
            kind = type(each).__name__
            raise InputError(f"{name}[{i}]: {kind} found; a torch tensor is needed{weight}")
        check_sized(each, f"{name}[{i}]")
        check_dense(each, f"{name}[{i}]")
    return found


def like(
    tables: Sequence[Tensor],
    dimension: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    group: Any,
) -> Tensor:
    """Return an empty tensor of the dtype and device of all tables.

    Raises:
        InputError: `dtype` or `device` is none, or not that of the first table.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype={dtype!r:.80}: a torch dtype is needed, such as torch.float32")
    if device is not None:
        device = _there(device)
    if not tables:
        where = _device(group) if device is None else device
        return torch.empty((0, dimension), dtype=dtype or torch.float32, device=where)
    found = tables[0].new_empty((0, dimension))
    if dtype is not None and dtype != found.dtype:
        raise InputError(f"dtype={dtype}, and tables[0] is {found.dtype}; leave one of them out")
    if device is not None and device != found.device:
        raise InputError(f"device={device}, and tables[0] is on {found.device}; give one device")
    return found


def _there(device: torch.device | str) -> torch.device:
    """Return the device that PyTorch means by this.

    Raises:
        InputError: there is none.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"device={device!r}: PyTorch has no such device here ({error}); give 'cpu' or 'cuda'"
        ) from None


def _device(group: Any) -> torch.device:
    """Return where a rank without tables works: where its group is open, or can be."""
    if (found := groups.device_of(group)) is not None:
        return torch.device(found)
    backends = str(torch.distributed.get_backend_config(groups.process_group(group)))
    return torch.device("cuda" if "nccl" in backends and torch.cuda.is_available() else "cpu")
