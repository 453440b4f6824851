"""Limit BLAS to one thread per rank while ranks compute; restore the user's setting afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ficco.call_lock import CallLock

__all__ = ["single_threaded"]

_lock = CallLock()
_users = 0
_limit: Any = None
_controller: Any = None


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit BLAS libraries to one thread; nested and concurrent uses are counted."""
    global _users, _limit, _controller  # noqa: PLW0603 - the libraries' setting is global too
    from threadpoolctl import ThreadpoolController

    with _lock():
        if _controller is None:
            _controller = ThreadpoolController()
        if _users == 0:
            _limit = _controller.limit(limits=1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock():
            _users -= 1
            if _users == 0:
                _limit.restore_original_limits()
