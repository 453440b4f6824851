"""Limit BLAS to one thread per rank while ranks compute; restore the user's setting afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ficco.call_lock import CallLock

__all__ = ["single_threaded"]

_lock = CallLock()
_uses: set[object] = set()  # that have not ended
_limit: Any = None
_controller: Any = None


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit BLAS libraries to one thread; nested and concurrent uses are counted."""
    global _limit, _controller  # noqa: PLW0603 - the libraries' setting is global too
    from threadpoolctl import ThreadpoolController

    use = object()
    with _lock():
        if _controller is None:
            _controller = ThreadpoolController()
        if not _uses:
            _limit = _controller.limit(limits=1, user_api="blas")
        _uses.add(use)
    try:
        yield
    finally:
        with _lock():
            if use in _uses:  # not so in a child that was forked meanwhile
                _uses.remove(use)
                if not _uses:
                    _limit.restore_original_limits()


def _restore() -> None:
    """Restore the user's setting in a forked child: the parent's threads do not end their uses."""
    if _uses:
        _uses.clear()
        _limit.restore_original_limits()


os.register_at_fork(after_in_child=_restore)
