"""Import a module of ficco when one of its names is first used."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ficco.core.errors import EngineError
from ficco.core.presence import announce

_importing: set[int] = set()  # threads that import modules now
_forked_from_them: list[int] = []  # those of the parent, when this process was forked


def loaded(home: str) -> ModuleType:
    """Import a module, as by `importlib.import_module`.

    Handlers of signals run after the import. PyTorch is imported first, if the module needs it;
    during that import handlers run as usual.

    Args:
        home: its name in ficco, for example "api.groups".

    Raises:
        EngineError: this process was forked while another thread imported modules of ficco.
    """
    announce()
    if _forked_from_them:
        raise EngineError(
            "this process was forked while another thread loaded ficco's modules, so they are "
            "incomplete here; do not call ficco in this process, or start it by the method 'spawn'"
        )
    full, thread = f"ficco.{home}", threading.get_ident()
    if full in sys.modules:
        return import_module(full)  # if another thread imports it now, this waits
    try:
        _importing.add(thread)
        source = Path(__file__).parents[1].joinpath(*home.split(".")).with_suffix(".py")
        if source.is_file() and "\nimport torch\n" in source.read_text(encoding="utf-8"):
            import_module("torch")
        with handlers_wait():
            return import_module(full)
    finally:
        _importing.discard(thread)


def _note_fork() -> None:
    """Python's locks of the modules that other threads import stay locked in this child."""
    _forked_from_them[:] = _importing - {threading.get_ident()}


os.register_at_fork(after_in_child=_note_fork)


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
