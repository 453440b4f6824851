"""Prompt exit on SIGTERM, sent by `timeout` or a batch system, including child processes.

A command gets SystemExit and cleans up, as after an error. Python raises it only between bytecodes
of the main thread, which may be in a long native call or wait for threads. Therefore a thread also
watches for SIGTERM: after GRACE_S it ends a process that is still running.
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
    """End this process, its children and its temporary folders within a second of SIGTERM.

    Does nothing if the caller handles SIGTERM itself, or calls from another thread than the main
    one.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, end == read_end)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read_end,), name="ficco-ending", daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(write_end)  # ends the thread, unless it has received SIGTERM


def _end(number: int, frame: Any) -> None:
    raise SystemExit(CODE)


def _watch(read_end: int) -> None:
    """Wait for SIGTERM; end the process if it does not end by itself."""
    while signal.SIGTERM not in (numbers := os.read(read_end, 64)):
        if not numbers:
            os.close(read_end)
            return
    threading.Event().wait(GRACE_S)  # usually the process ends during this wait
    for child in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    temporary.remove_all()
    os._exit(CODE)


def _descendants(process: int) -> list[int]:
    """Return all child processes of a process, recursively."""
    descendants = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                descendants += [child, *_descendants(child)]
    return descendants
