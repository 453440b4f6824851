"""The lock that a thread holds during a call, or a part of one."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from ficco.core.errors import EngineError

_EXIT_S = 1.0  # for calls of daemon threads to end
_REFUSAL = (
    "a call of ficco began inside another call of the same thread, as the handler of a signal can "
    "begin one; set a flag in the handler, and make the call after the other one has ended"
)


class CallLock:
    """A lock of calls: other threads wait for it; the thread that holds it gets an error.

    The handler of a signal runs on the main thread, in the middle of its call. A call that it makes
    would wait for that call, which goes on only after the handler.

    Example:
        >>> lock = CallLock()
        >>> with lock():
        ...     pass
    """

    __slots__ = ("__weakref__", "_is_owned", "_lock")

    def __init__(self) -> None:
        self._renew()
        _all.add(self)

    def _renew(self) -> None:
        lock = threading.RLock()
        self._lock = lock
        # threading.Condition uses this method of locks, too.
        self._is_owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]

    def __call__(self) -> AbstractContextManager[bool]:
        """Return the lock, which `with` takes and frees as one step, also if Ctrl-C comes.

        Raises EngineError: this thread holds it.
        """
        if self._is_owned():
            raise EngineError(_REFUSAL)
        return self._lock


_all: weakref.WeakSet[CallLock] = weakref.WeakSet()


def _renew_all() -> None:
    """Free all locks in a forked child: the threads that hold them are the parent's."""
    for lock in list(_all):
        lock._renew()


def _keep_all() -> None:
    """Wait for the calls of daemon threads when Python exits, and keep them from further calls.

    Python would end such a thread as it returns from native code, and C++ would then abort the
    process. The wait lasts at most `_EXIT_S`. The thread that exits may still make calls.
    """
    deadline = time.monotonic() + _EXIT_S
    for lock in list(_all):
        if not lock._is_owned():
            lock._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        lock._is_owned = lambda: False


os.register_at_fork(after_in_child=_renew_all)
atexit.register(_keep_all)
