"""The rendezvous folder of a command's ranks, and the removal of abandoned folders.

A folder contains a lock file. The command and its ranks hold the lock; the kernel releases it when
the last of them ends for any reason. A folder whose lock is free is therefore unused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ficco import temporary

__all__ = ["RendezvousFolder", "rendezvous_folder"]

PREFIX = "ficco-run-"
_LOCK = "lock"
_OLD_S = 24 * 3600.0  # for folders without a lock: no command runs as long


class RendezvousFolder(NamedTuple):
    """A folder, and the descriptor of its lock, which the ranks inherit."""

    path: Path
    lock: int


@contextmanager
def rendezvous_folder() -> Iterator[RendezvousFolder]:
    """Remove abandoned folders, then yield a new folder and remove it at the end."""
    _remove_left(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Other commands look only at folders with the final name; this one is locked already.
            path = path.rename(path.with_name(path.name.removeprefix(".")))
            with temporary.noted(path):
                yield RendezvousFolder(path, lock)
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(where: Path) -> None:
    """Remove this user's folders whose lock is free."""
    for path in where.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another command removed it, or it is not a rendezvous folder
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # it is being removed, or from an earlier release without locks
        if time.time() - status.st_mtime > _OLD_S:
            shutil.rmtree(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the lock is held
        shutil.rmtree(path)
    finally:
        os.close(lock)
