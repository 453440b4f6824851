"""Starting a command's ranks: this command line again, once per rank, and its end."""

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
GRACE_S = 10.0  # for the other ranks to end by themselves after one has failed


def launch(world: int) -> int:
    """Run this process's command line in `world` ranks; return the worst exit code.

    Rank 0 has this process's stdout, the others none; all share stderr. When one fails, the others
    get GRACE_S to end, then they are killed.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError("PyTorch is needed for the ranks to meet; pip install torch")
    with rendezvous_folder() as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            with _uninterrupted():  # or one may be started that nobody knows of
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
    """In a rank that `launch` has started: end this process when its launcher does, however so."""
    parent = settings.whole("FICCO_PARENT") if os.environ.get("FICCO_PARENT") else None
    if parent is None or "FICCO_STORE" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        sys.exit("ficco: the process that started this rank has ended")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back SIGTERM and SIGINT; what came is sent again behind this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, lambda number, _: came.append(number)) for each in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for each in came[:1]:
            os.kill(os.getpid(), each)


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
    """Wait for all ranks; once one has failed, for GRACE_S only."""
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
