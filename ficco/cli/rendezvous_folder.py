"""The folder where a command's ranks meet, and folders that killed commands have left behind.

A folder holds a lock file. The command and its ranks hold the lock; the kernel releases it when the
last of them ends, however it ends. So a folder whose lock is free is nobody's.
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
_OLD_S = 24 * 3600.0  # without a lock: no run of commands lasts as long


class RendezvousFolder(NamedTuple):
    """A folder, and the descriptor of its lock, which ranks are to inherit."""

    path: Path
    lock: int


@contextmanager
def rendezvous_folder() -> Iterator[RendezvousFolder]:
    """Yield a new folder, which is removed at the end; remove first what others left behind."""
    _remove_left(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Other commands look at folders of this name alone, and this one is locked by now.
            path = path.rename(path.with_name(path.name.removeprefix(".")))
            with temporary.noted(path):
                yield RendezvousFolder(path, lock)
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(where: Path) -> None:
    """Remove folders of this user whose lock nobody holds."""
    for path in where.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another command was quicker, or it is no folder of ours
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # it is being removed, or an earlier release's, which had no locks
        if time.time() - found.st_mtime > _OLD_S:
            shutil.rmtree(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody holds it
        shutil.rmtree(path)
    finally:
        os.close(lock)
