"""The log: written to stderr if FICCO_LOG names a level.

A line has the rank, if the process is one of several:

    ficco [rank 1] info: group of 4 ranks opened on machine host
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ficco.core.errors import InputError, closest, escaped

log = logging.getLogger("ficco")
_LEVELS = ("debug", "info", "warning", "error", "critical")
FIRST_REPORT_S, NEXT_REPORT_S = 2.0, 10.0  # until a long task is reported, and again
_handlers: list[logging.Handler] = []  # this process's handler, after `set_up`


def set_up() -> None:
    """Send the log to stderr if FICCO_LOG names a level; later calls change nothing.

    Raises:
        InputError: FICCO_LOG names no level.
    """
    level = os.environ.get("FICCO_LOG", "")
    if not level or _handlers:
        return
    if level.lower() not in _LEVELS:
        raise InputError(
            f"FICCO_LOG={level!r} is not a level{closest(level.lower(), _LEVELS)}; set it to one "
            f"of {', '.join(_LEVELS)}, or unset it for no log"
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_WithRank())
    _handlers.append(handler)
    log.addHandler(handler)
    log.setLevel(level.upper())


@contextmanager
def reporting(task: str | Callable[[], str], enabled: bool = True) -> Iterator[None]:
    """Report a task that takes more than two seconds, as a warning of the log every ten seconds.

    Args:
        task: what the block does, such as "measuring this machine"; or a function that returns it.
        enabled: whether this process reports; only one of several ranks does.
    """
    if not enabled:
        yield
        return
    begin, over = time.monotonic(), threading.Event()

    def report() -> None:
        wait_s = FIRST_REPORT_S
        while not over.wait(wait_s):
            words = task if isinstance(task, str) else task()
            log.warning("%s, for %.0f s so far", words, time.monotonic() - begin)
            wait_s = NEXT_REPORT_S

    thread = threading.Thread(target=report, name="ficco-reporting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _escape(record: logging.LogRecord) -> bool:
    """Escape control characters, so that text of a file or a path forges no line of the log."""
    record.msg, record.args = escaped(record.getMessage()), ()
    return True


log.addFilter(_escape)


class _WithRank(logging.Formatter):
    """Formats lines with the rank of this process, if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        rank = _rank()
        head = f"ficco [rank {rank}]" if rank else "ficco"
        return f"{head} {record.levelname.lower()}: {super().format(record)}"


def _rank() -> str:
    """Return this process's rank; an empty string if it is not known to be a rank."""
    distributed: Any = sys.modules.get("torch.distributed")  # do not import it for the log
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK", "")
