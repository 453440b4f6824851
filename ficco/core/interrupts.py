"""Tell an interrupt of a call from an error of the call itself."""

from __future__ import annotations

import signal
from types import CodeType, TracebackType
from typing import Any


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception interrupts the program: Ctrl-C, or a signal's handler raised it.

    It is then the program's own, and no error that a call may turn into another one.

    Args:
        error: as it was caught, with its traceback.
    """
    if not isinstance(error, Exception):
        return True
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """Return the code of a handler that is a function, a method or a callable object."""
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code
