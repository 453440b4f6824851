"""Calls of a library's functions as data, which native code makes in order.

A repeated call of few rows is limited by the host. There, each Python function between two library
functions takes about a microsecond, because the caches are cold after a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ficco import _native

__all__ = ["CallSteps", "Step"]

CallSteps = _native.CallSteps


class Step(NamedTuple):
    """A call of one function. Values of the whole call have places: its inputs come first.

    Attributes:
        function: the function.
        arguments: places of its arguments.
        result: place in which the returned value is stored; -1: nowhere.
        out: place of the argument `out`; -1: there is none.
        waits: whether the current stream waits for the returned work, if one is returned.
        setting: two functions, which return and set a setting of the library; it is cleared during
            the call. The first returns whether the setting is on, or a tuple that starts with that;
            the second takes the values of that tuple. None: there is no setting.
    """

    function: Callable[..., Any]
    arguments: Sequence[int]
    result: int = -1
    out: int = -1
    waits: bool = False
    setting: tuple[Callable[[], Any], Callable[..., None]] | None = None
