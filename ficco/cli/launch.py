"""Starting and ending a command's ranks; each rank runs the same command line."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ficco import settings
from ficco.cli.rendezvous_folder import RendezvousFolder, rendezvous_folder
from ficco.errors import InputError
from ficco.logs import log

__all__ = ["end_with_launcher", "launch"]

_PR_SET_PDEATHSIG = 1  # of prctl(2), Linux
GRACE_S = 10.0  # time for the other ranks to end by themselves after one has failed


def launch(world: int) -> int:
    """Run this process's command line in `world` ranks; return the worst exit code.

    Rank 0 inherits this process's stdout, the others have none; all share stderr. When a rank
    fails, the others have GRACE_S to end, then they are killed.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError("the ranks need PyTorch for their rendezvous; pip install torch")
    with rendezvous_folder() as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            with _uninterrupted():  # else a started process may be missing from `ranks`
                for rank in range(world):
                    ranks.append(_start(rank, world, folder))
                    log.info("rank %d is process %d", rank, ranks[-1].pid)
            return _ended(ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
            for process in ranks:
                process.wait()


def end_with_launcher() -> None:
    """In a rank started by `launch`: end this process when its launcher ends for any reason."""
    parent = settings.whole("FICCO_PARENT") if os.environ.get("FICCO_PARENT") else None
    if parent is None or "FICCO_STORE" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the launcher ended before prctl
        sys.exit("ficco: the process that started this rank has ended")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back SIGTERM and SIGINT; resend the first one that arrived on exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [
        signal.signal(number, lambda received, _: arrived.append(received)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for received in arrived[:1]:
            os.kill(os.getpid(), received)


def _start(rank: int, world: int, folder: RendezvousFolder) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "FICCO_STORE": str(folder.path / "store"),
        "FICCO_PARENT": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-P", "-m", "ficco", *sys.argv[1:]]
    stdout = None if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=stdout, pass_fds=(folder.lock,))


def _ended(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; after one has failed, wait at most GRACE_S."""
    deadline: float | None = None
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes) and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for number, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"ficco: rank {number} was ended by signal {-code}", file=sys.stderr)
    known = [1 if code is None or code < 0 else code for code in codes]
    return max(known)
