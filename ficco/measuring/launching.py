"""Start one process per GPU, bound its time and always end it; a rendezvous of the processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["NO_MULTICAST", "Rendezvous", "make_page", "run_ranks"]

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
GRACE_S = 10.0  # time for the other ranks to end by themselves after one has failed
_STRIDE = 8  # doubles between the slots of two ranks: one cache line


def make_page(folder: Path, world: int) -> None:
    """Write the page that `Rendezvous` shares."""
    (folder / "page").write_bytes(bytes(8 * 3 * world * _STRIDE))


class Rendezvous:
    """Synchronizes all ranks of a machine within microseconds, by spinning on a shared page."""

    def __init__(self, folder: Path, rank: int, world: int, timeout_s: float) -> None:
        shape = (3, world, _STRIDE)
        self._page: Any = np.memmap(folder / "page", dtype=np.float64, mode="r+", shape=shape)
        self._rank, self._timeout_s, self._turn = rank, timeout_s, 0

    def gather(self, value: float = 0.0) -> list[float]:
        """Wait for all ranks and return every rank's value.

        Raises:
            TimeoutError: a rank did not arrive in time.
        """
        self._turn += 1
        values = self._page[1 + self._turn % 2, :, 0]
        values[self._rank] = value
        turns = self._page[0, :, 0]
        turns[self._rank] = self._turn
        limit = time.monotonic() + self._timeout_s
        while turns.min() < self._turn:
            if time.monotonic() > limit:
                late = [rank for rank, turn in enumerate(turns) if turn < self._turn]
                raise TimeoutError(f"ranks {late} did not arrive within {self._timeout_s} s")
        return [float(item) for item in values]


def run_ranks(
    command: Sequence[str],
    world: int,
    folder: Path,
    limit_s: float,
    watch: Callable[[], None],
) -> str:
    """Run a command once per rank until all have ended; return the error, or an empty string.

    Args:
        command: arguments of this Python interpreter.
        world: number of ranks; each gets RANK and WORLD_SIZE in its environment.
        folder: a new folder for the store, the page and each rank's output.
        limit_s: time limit; all ranks are killed after it.
        watch: called a few times a second.
    """
    make_page(folder, world)
    environment = os.environ | NO_MULTICAST
    environment |= {"WORLD_SIZE": str(world), "FICCO_PARENT": str(os.getpid())}
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank{rank}.txt" for rank in range(world)]
    limit, ended_badly = time.monotonic() + limit_s, 0.0
    reason = ""
    try:
        for rank, path in enumerate(logs):
            rank_environment = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=rank_environment,
                    )
                )
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.2)
            watch()
            now = time.monotonic()
            if any(rank.poll() for rank in ranks):
                ended_badly = ended_badly or now
                if now > ended_badly + GRACE_S:
                    break
            if now > limit:
                reason = f"not done after {limit_s:.0f} s"
                break
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for process in ranks:
            process.wait(30)
        watch()
    for rank, process in enumerate(ranks):
        if process.returncode:
            tail = " | ".join(logs[rank].read_text(errors="replace").splitlines()[-12:])
            rank_reason = f"rank {rank} ended with {process.returncode}: {tail[-1500:]}"
            if process.returncode > 0:  # the failed rank; the others were killed
                return f"{reason}; {rank_reason}" if reason else rank_reason
            reason = reason or rank_reason
    return reason
