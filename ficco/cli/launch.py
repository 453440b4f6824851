"""Starting and ending a command's ranks; each rank runs the same command line."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ficco.core import files, settings
from ficco.core.errors import InputError
from ficco.measure.launching import exit_codes

_PR_SET_PDEATHSIG = 1  # of prctl(2), Linux


def launch(world: int) -> int:
    """Run this process's command line in `world` ranks; return the worst exit code.

    Rank 0 inherits this process's stdout, the others have none; all share stderr. When a rank
    fails, the others have some seconds to end, then they are killed.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError("the ranks need PyTorch for their rendezvous; pip install torch")
    with rendezvous_folder() as folder:
        variables = {
            "FICCO_STORE": str(folder.path / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        command = ("-P", "-m", "ficco", *sys.argv[1:])
        outputs = [None, *[subprocess.DEVNULL] * (world - 1)]
        codes = exit_codes(command, variables, outputs, keep=(folder.lock,))
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"ficco: rank {rank} was ended by signal {-code}", file=sys.stderr)
    return max(1 if code is None or code < 0 else code for code in codes)


def end_with_launcher() -> None:
    """In a rank started by `launch`: end this process when its launcher ends for any reason."""
    parent = settings.whole("FICCO_PARENT") if os.environ.get("FICCO_PARENT") else None
    if parent is None or "FICCO_STORE" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the launcher ended before prctl
        sys.exit("ficco: the process that started this rank has ended")


# ---- the folder of the ranks
#
# A folder contains a lock file. The command and its ranks hold the lock; the kernel releases it
# when the last of them ends for any reason. A folder whose lock is free is therefore unused.

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
            with files.noted(path):
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
