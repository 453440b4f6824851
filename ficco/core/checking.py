"""Checks of arguments that several functions share: timeouts and sizes.

`ficco.core.reading` checks the contents of files.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from ficco.core.errors import InputError, shown

MOST_SECONDS = 1e6  # 11 days: sockets, condition variables and kernels can all wait that long


def positive_seconds(value: Any, name: str) -> float:
    """Return a timeout as a float.

    Args:
        value: the user's value.
        name: of the argument, for the message.

    Raises:
        InputError: it is not a number above 0, or it is above MOST_SECONDS.

    Example:
        >>> positive_seconds(30, "timeout_s")
        30.0
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and 0 < value <= MOST_SECONDS:
        return float(value)
    raise InputError(
        f"{name}={shown(value)}: a positive number of seconds is needed, {MOST_SECONDS:,.0f} at "
        "most"
    )


def whole_number(value: Any, name: str, least: int, most: float = math.inf) -> int:
    """Return a size as an int; NumPy's integers are accepted too.

    Args:
        value: the user's value.
        name: of the argument, for the message.
        least: the smallest accepted value.
        most: the largest accepted value.

    Raises:
        InputError: it is not a whole number (but a bool, a float or a string), or out of bounds.

    Example:
        >>> whole_number(4, "world", 1, 64)
        4
    """
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if whole and least <= value <= most:
        return int(value)
    bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
    raise InputError(f"{name}={shown(value)}: a whole number {bounds} is needed")


def true_or_false(value: Any, name: str) -> bool:
    """Return a truth value, if it is a bool.

    Raises:
        InputError: it is anything else, such as a text, which Python would take as true.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name}={shown(value)}: True or False is needed")
    return value


def whole_numbers(values: Any, name: str) -> tuple[int, ...]:
    """Return a sequence of sizes as ints; NumPy's integers are accepted too.

    Args:
        values: the user's values.
        name: of the argument, for the message.

    Raises:
        InputError: it is not a sequence, or an entry is not a whole number (a bool or a float).

    Example:
        >>> whole_numbers([3, 0], "rows")
        (3, 0)
    """
    try:
        return tuple([v if type(v) is int else _index(v) for v in values])
    except (TypeError, RuntimeError):  # RuntimeError: of a DeviceMesh
        needed = f"{name}={shown(values)}: a list of whole numbers is needed"
        if isinstance(values, (list, tuple)):
            at = next(i for i, value in enumerate(values) if not _is_whole(value))
            needed = f"{name}[{at}]={shown(values[at])}: a whole number is needed"
        raise InputError(needed) from None


def check_sum(sizes: Sequence[int], name: str, world: int, total: int, total_name: str) -> None:
    """Refuse sizes that are not one per rank, 0 or more each, with a given sum.

    Args:
        sizes: one size per rank.
        name: of the argument, for the message.
        world: number of ranks.
        total: the needed sum.
        total_name: what the sum is, for the message.

    Raises:
        InputError: the message names the first wrong size, or the sum.
    """
    found = f"{name}={shown(list(sizes))}"
    if len(sizes) != world:
        raise InputError(f"{found}: {len(sizes)} sizes found; {world} are needed, one per rank")
    for rank, size in enumerate(sizes):
        if size < 0:
            raise InputError(f"{name}[{rank}]={shown(size)}: a size of 0 or more is needed")
    if sum(sizes) != total:
        raise InputError(
            f"{found} add up to {shown(sum(sizes))}; they must add up to {total}, {total_name}"
        )


def _is_whole(value: Any) -> bool:
    try:
        _index(value)
    except TypeError:
        return False
    return True


def _index(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
