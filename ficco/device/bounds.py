"""Checks of what kernels pass to the functions of this package, in Triton's interpreter.

There, a peer that does not exist would end the process, and elements past the end of a window would
overwrite other memory in silence. Compiled kernels have no checks: their functions stay as they
are.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ficco.core.errors import InputError
from ficco.core.private.triton_interpreter import numbers_in
from ficco.device import layout
from ficco.device.state import on_gpu

_F = TypeVar("_F", bound=Callable[..., Any])


class _Asked(NamedTuple):
    """A call of a function: who makes it, its arguments, and the entries of the window's table."""

    who: str
    given: dict[str, Any]
    table: Any

    def number(self, name: str) -> int:
        """Return an argument that is one integer."""
        return int(numbers_in(self.given[name]).item())

    def peer(self) -> int:
        """Return the rank whose memory is accessed.

        Raises:
            InputError: the window has no such rank.
        """
        world = int(self.table[layout.WORLD])
        peer = self.number("pe") if "pe" in self.given else int(self.table[layout.RANK])
        if not 0 <= peer < world:
            raise self.refusal(f"pe={peer}: the window has the ranks 0 to {world - 1}; pass one")
        return peer

    def refusal(self, what: str) -> InputError:
        return InputError(f"rank {self.table[layout.RANK]}, {self.who}: {what}")


def checked(*, data: str = "", count: str = "", word: str = "") -> Callable[[_F], _F]:
    """Return a decorator of a Triton function: in the interpreter, calls are checked first.

    The arguments `window`, `pe`, `mask`, `distance` and `COUNT`, `place` and `WORLD` mean the same
    in all functions. Without `pe`, the memory is this rank's.

    Args:
        data: name of the argument that points to elements of a rank's data.
        count: name of the argument that is their number; "": a mask says which are accessed.
        word: name of the argument that points to a signal.

    Example:
        >>> @checked(data="dest", count="nelems")
        ... @triton.jit
        ... def put(dest, source, nelems, pe, window): ...
    """

    def decorate(function: _F) -> _F:
        if on_gpu:
            return function
        original = cast(Any, function).fn

        @functools.wraps(original)
        def checking(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            caller = cast(Any, inspect.currentframe()).f_back
            place = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
            who = f"{original.__name__} in {caller.f_code.co_name} ({place})"
            address = int(numbers_in(bound.arguments["window"]).item())
            table = (ctypes.c_int64 * layout.TABLE).from_address(address)
            asked = _Asked(who, bound.arguments, table)
            peer = asked.peer()
            if data:
                _check_elements(asked, peer, data, count)
            if word:
                _check_signals(asked, peer, _offset(asked, word, layout.OWN_SIGNALS).item() // 4, 1)
            if "place" in asked.given:
                _check_barrier(asked)
            return function(*args, **kwargs)

        return cast(_F, checking)

    return decorate


def _offset(asked: _Asked, name: str, base: int) -> Any:
    """Return the distances in bytes of pointers from this rank's data or signals."""
    return numbers_in(asked.given[name]).astype(np.int64) - int(asked.table[base])


def _check_elements(asked: _Asked, peer: int, name: str, count: str) -> None:
    """Refuse elements that are not in a rank's data."""
    kind = asked.given[name].dtype.scalar.element_ty
    size = kind.primitive_bitwidth // 8
    first = _offset(asked, name, layout.OWN_DATA) // size
    if count:
        number = asked.number(count)
        if number < 0:
            raise asked.refusal(f"{count}={number}: a number of elements is needed")
        if number == 0:
            return
        low, high = int(first.item()), int(first.item()) + number
        mend = f"pass a smaller {count}"
    else:
        if "distance" in asked.given:
            first = (
                first + asked.number("distance") * np.arange(asked.number("COUNT"))[:, None, None]
            )
        mask = asked.given.get("mask")
        first = first[np.broadcast_to(True if mask is None else numbers_in(mask) != 0, first.shape)]
        if not first.size:
            return
        low, high = int(first.min()), int(first.max()) + 1
        mend = "correct the mask"
    end = int(asked.table[layout.DATA_BYTES]) // size
    if low < 0 or high > end:
        raise asked.refusal(
            f"{name}: elements {low} to {high - 1} of rank {peer}'s data, {high - low} in length; "
            f"the data have {end} elements of {kind}, 0 to {end - 1}: point into window.tensor and "
            f"{mend}, or make the window larger"
        )


def _check_signals(asked: _Asked, peer: int, first: int, count: int) -> None:
    """Refuse signals that a rank does not have."""
    have = int(asked.table[layout.SIGNAL_COUNT])
    if first < 0 or first + count > have:
        asked_for = f"signal {first}" if count == 1 else f"signals {first} to {first + count - 1}"
        raise asked.refusal(
            f"{asked_for} of rank {peer}: the window has {have} signals, numbered from 0; use one "
            f"of window.signals, or make the window with signals={max(first + count, 1)}"
        )


def _check_barrier(asked: _Asked) -> None:
    """Refuse a barrier of another number of ranks, or one whose signals do not exist."""
    world, ranks = int(asked.table[layout.WORLD]), asked.number("WORLD")
    if ranks != world:
        raise asked.refusal(f"WORLD={ranks}: the window has {world} ranks; pass that number")
    _check_signals(asked, asked.peer(), asked.number("place"), ranks)
