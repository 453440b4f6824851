"""Run the handlers of signals after an import, not in the middle of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

__all__ = ["handlers_wait"]


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Let handlers that are Python functions wait until the context ends.

    A handler may raise an exception, as that of Ctrl-C does. If the exception ends an import, a
    second import can fail, because a module may have registered something already. Handlers run on
    the main thread, so the context does nothing on another thread.

    Example:
        >>> with handlers_wait():
        ...     import json
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as stack:
        waiting = {}
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                waiting[number] = _Waiting(handler)
        for number, each in waiting.items():
            stack.callback(each.end, number)
            signal.signal(number, each)
        yield


class _Waiting:
    """Takes the place of a handler in a context, and runs it at the end if its signal has come."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler, self._ended = handler, False
        self._came: list[FrameType | None] = []  # where the program was

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._ended:
            self._handler(number, frame)
        else:
            self._came = [frame]  # once, as the system keeps a signal that is blocked

    def end(self, number: int) -> None:
        """Put the handler back, and run it if the signal has come."""
        self._ended = True
        signal.signal(number, self._handler)
        for frame in self._came:
            self._handler(number, frame)
