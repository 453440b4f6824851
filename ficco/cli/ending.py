"""Ending by SIGTERM, as from `timeout` or a batch system: soon, and with all that was started.

A command gets SystemExit and ends in order, as after an error. Python raises it only between
bytecodes of the main thread, which may be in a long native call or wait for threads. So a thread
looks, too: what has not ended in order after GRACE_S is ended by it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ficco import temporary

__all__ = ["ending"]

GRACE_S = 0.6
CODE = 128 + signal.SIGTERM


@contextmanager
def ending() -> Iterator[None]:
    """End this process within a second of SIGTERM: its children, its temporary folders, itself.

    Where the caller handles SIGTERM itself, or another thread than the main one calls, nothing is
    changed.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    seen, told = os.pipe()
    for end in (seen, told):
        os.set_blocking(end, end == seen)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(seen,), name="ficco-ending", daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(told)  # the thread ends, but for one that has seen SIGTERM


def _end(number: int, frame: Any) -> None:
    raise SystemExit(CODE)


def _watch(seen: int) -> None:
    """Wait for SIGTERM; end the process where it does not end by itself."""
    while signal.SIGTERM not in (came := os.read(seen, 64)):
        if not came:
            os.close(seen)
            return
    threading.Event().wait(GRACE_S)  # mostly, the process ends meanwhile
    for child in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    temporary.remove_all()
    os._exit(CODE)


def _descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found
