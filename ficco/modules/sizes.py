"""Check the sizes and axes that the user gives, and copy them, because backward reads them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ficco.checking import whole_number, whole_numbers
from ficco.errors import InputError, shown
from ficco.problem import MOST

__all__ = ["copied_list", "size", "sizes"]


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
