"""Where the log goes: to stderr if FICCO_LOG names a level. Nothing of what is logged.

A line has the rank, where the process is one of several:

    ficco [rank 1] info: group of 4 ranks opened on machine host
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from ficco.errors import InputError, closest

__all__ = ["log", "set_up"]

log = logging.getLogger("ficco")
_LEVELS = ("debug", "info", "warning", "error", "critical")
_handlers: list[logging.Handler] = []  # the one of this process, once there is one


def set_up() -> None:
    """Send the log to stderr if FICCO_LOG asks for it; calls after the first change nothing.

    Raises:
        InputError: FICCO_LOG names no level.
    """
    asked = os.environ.get("FICCO_LOG", "")
    if not asked or _handlers:
        return
    if asked.lower() not in _LEVELS:
        raise InputError(
            f"FICCO_LOG={asked!r} is no level{closest(asked.lower(), _LEVELS)}; it is one of "
            f"{', '.join(_LEVELS)}, or unset for no log"
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_WithRank())
    _handlers.append(handler)
    log.addHandler(handler)
    log.setLevel(asked.upper())


class _WithRank(logging.Formatter):
    """Lines with the rank of this process, if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        rank = _rank()
        head = f"ficco [rank {rank}]" if rank else "ficco"
        return f"{head} {record.levelname.lower()}: {super().format(record)}"


def _rank() -> str:
    """Return this process's rank among all; empty: it is none, as far as can be seen."""
    distributed: Any = sys.modules.get("torch.distributed")  # not loaded for a line of a log
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK", "")
