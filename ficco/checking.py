"""Checks of arguments that several functions take: timeouts and sizes. Nothing about what they do.

`ficco.reading` checks what files hold.
"""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real
from typing import Any

from ficco.errors import InputError

__all__ = ["MOST_SECONDS", "positive_seconds", "whole_number", "whole_numbers"]

MOST_SECONDS = 1e6  # 11 days: sockets, condition variables and kernels can all count to it


def positive_seconds(value: Any, name: str) -> float:
    """Return a timeout as a float.

    Args:
        value: what the user passed.
        name: of the argument, for the message.

    Raises:
        InputError: it is no number above 0, or above MOST_SECONDS.

    Example:
        >>> positive_seconds(30, "timeout_s")
        30.0
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and 0 < value <= MOST_SECONDS:
        return float(value)
    raise InputError(
        f"{name}={value!r:.80}: it is a positive number of seconds, {MOST_SECONDS:,.0f} at most"
    )


def whole_number(value: Any, name: str, least: int, most: float = math.inf) -> int:
    """Return a size as an int; NumPy's integers are taken, too.

    Args:
        value: what the user passed.
        name: of the argument, for the message.
        least: the smallest that is taken.
        most: the largest.

    Raises:
        InputError: it is no whole number (a bool, a float or a text is none), or out of bounds.

    Example:
        >>> whole_number(4, "world", 1, 64)
        4
    """
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if whole and least <= value <= most:
        return int(value)
    bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
    raise InputError(f"{name}={value!r:.80}: it is a whole number {bounds}")


def whole_numbers(values: Any, name: str) -> tuple[int, ...]:
    """Return a sequence of sizes as ints; NumPy's integers are taken, too.

    Args:
        values: what the user passed.
        name: of the argument, for the message.

    Raises:
        InputError: it is no sequence, or an entry is no whole number (a bool or a float is none).

    Example:
        >>> whole_numbers([3, 0], "rows")
        (3, 0)
    """
    try:
        return tuple([v if type(v) is int else _index(v) for v in values])
    except TypeError:
        raise InputError(f"{name}={values!r:.80}: a list of whole numbers is needed") from None


def _index(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
