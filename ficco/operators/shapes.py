"""Checks of shapes that a Node and the functions of PyTorch share.

A Node has the arrays of all ranks, a function those of its own rank. Both name an array in errors
as the user passed it. This module loads neither library; it reads shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.core.errors import InputError, shown
from ficco.operators.reference import is_tensor
from ficco.operators.registry import Array

ALONG = ("rows", "contraction")  # axes of products


class Named(NamedTuple):
    """A pair of x and w that are multiplied, and their names in messages."""

    x_name: str
    x: Array
    w_name: str
    w: Array


def sized(array: Array) -> str:
    """Return the shape of an array, as text to follow its name."""
    shape = tuple(array.shape)
    return f"is {list(shape)}" if is_tensor(array) else f"has shape {shape}"


def check_weight(w: Array, name: str, inner: int, given: str) -> None:
    """Check that a weight has `inner` rows; `given` says what they follow from."""
    if w.shape[0] != inner:
        raise InputError(
            f"{name} {sized(w)}; with {given} it is [{inner}, n_r] (pass linear.weight.T)"
        )


def check_bias(bias: Array, name: str, columns: int) -> None:
    """Check that a bias has an element per column."""
    if tuple(bias.shape) not in ((columns,), (1, columns)):
        raise InputError(f"{name} {sized(bias)}; it is [{columns}]")


def checked_axes(axes: Any, count: int) -> Sequence[str]:
    """Return the axis of each of a rank's weights; None: all are along rows."""
    if axes is None:
        return ("rows",) * count
    if not isinstance(axes, (tuple, list)):
        raise InputError(
            f"axes={shown(axes)}: a list is needed, 'rows' or 'contraction' per weight"
        )
    if len(axes) != count:
        raise InputError(f"axes has {len(axes)} entries, there are {count} weights per rank")
    for i, axis in enumerate(axes):
        if axis not in ALONG:
            raise InputError(f"axes[{i}]={axis!r}: it is 'rows' or 'contraction'")
    return axes


def check_summed(pairs: Sequence[Named]) -> None:
    """Check pairs whose products are added up: they may differ only in the depth k_r."""
    first = pairs[0]
    for x_name, x, w_name, w in pairs:
        shapes = f"{x_name} is {list(x.shape)}, {w_name} is {list(w.shape)}"
        if x.shape[:-1] != first.x.shape[:-1] or w.shape[1] != first.w.shape[1]:
            raise InputError(
                f"{x_name} has {math.prod(x.shape[:-1])} rows, {w_name} has {w.shape[1]} columns: "
                f"{shapes}; all are [m, k_r] and [k_r, n], as {first.x_name} "
                f"{list(first.x.shape)} and {first.w_name} {list(first.w.shape)}"
            )
        if x.shape[-1] != w.shape[0]:
            raise InputError(
                f"{x_name} has {x.shape[-1]} columns, {w_name} has {w.shape[0]} rows: {shapes}; "
                "x_r is [m, k_r], w_r is [k_r, n] (pass linear.weight.T)"
            )


def check_exchanged(pairs: Sequence[Named]) -> None:
    """Check pairs whose rows or products are exchanged: only their rows may differ."""
    k, n = pairs[0].x.shape[1], pairs[0].w.shape[1]
    for x_name, x, w_name, w in pairs:
        if x.shape[1] != k or tuple(w.shape) != (k, n):
            raise InputError(
                f"{x_name} {sized(x)}, {w_name} {sized(w)}; with k={k} and n={n} x is [rows, k], "
                "w is [k, n]"
            )


def check_bags(index: Array, start: Array, height: int, where: str) -> None:
    """Raise InputError if lookups or offsets of bags leave their table of `height` rows."""
    begins_at_0 = not len(start) or bool(start[0] == 0)
    fits = begins_at_0 and not (start[1:] < start[:-1]).any() and not (start > len(index)).any()
    if not fits or (len(index) and not (index.min() >= 0 and index.max() < height)):
        raise _wrong_bags(index, start, height, where)


def _wrong_bags(index: Array, start: Array, height: int, where: str) -> InputError:
    """Return the error about the first wrong offset, or else the first wrong index."""
    indices, before = index.tolist(), 0
    for at, offset in enumerate(start.tolist()):
        found = f"offsets{where}[{at}]={offset}"
        if at == 0 and offset != 0:
            return InputError(f"{found}: the first offset must be 0")
        if offset < before:
            return InputError(f"{found}: an offset must not be below the one before, {before}")
        if offset > len(indices):
            return InputError(
                f"{found}: an offset may be at most {len(indices)}, the number of entries of "
                f"indices{where}"
            )
        before = offset
    at = next(at for at, row in enumerate(indices) if not 0 <= row < height)
    return InputError(
        f"indices{where}[{at}]={indices[at]}: an index must be 0 or more and below {height}, the "
        f"number of rows of tables{where}"
    )
