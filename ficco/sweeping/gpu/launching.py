"""A process per GPU: started here, bounded here, and never left behind; and how they meet."""

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
GRACE_S = 10.0  # for the other ranks to end by themselves after one has failed
_STRIDE = 8  # doubles from one rank's place to the next, a cache line


def make_page(folder: Path, world: int) -> None:
    """Write the page through which ranks meet."""
    (folder / "page").write_bytes(bytes(8 * 3 * world * _STRIDE))


class Rendezvous:
    """Meets all ranks of a machine within microseconds, by spinning on a page that they share."""

    def __init__(self, folder: Path, rank: int, world: int, timeout_s: float) -> None:
        shape = (3, world, _STRIDE)
        self._page: Any = np.memmap(folder / "page", dtype=np.float64, mode="r+", shape=shape)
        self._rank, self._timeout_s, self._turn = rank, timeout_s, 0

    def gather(self, value: float = 0.0) -> list[float]:
        """Wait for all ranks and return everybody's value.

        Raises:
            TimeoutError: some rank did not come.
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
                raise TimeoutError(f"ranks {late} did not come within {self._timeout_s} s")
        return [float(each) for each in values]


def run_ranks(
    command: Sequence[str],
    world: int,
    folder: Path,
    limit_s: float,
    watch: Callable[[], None],
) -> str:
    """Run a command once per rank until all have ended; return what went wrong, or nothing.

    Args:
        command: given to this Python.
        world: ranks; each finds RANK and WORLD_SIZE in its environment.
        folder: fresh; holds the store, the page and what each rank says.
        limit_s: all are killed after it.
        watch: called a few times a second.
    """
    make_page(folder, world)
    given = os.environ | NO_MULTICAST
    given |= {"WORLD_SIZE": str(world), "FICCO_PARENT": str(os.getpid())}
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank{rank}.txt" for rank in range(world)]
    limit, ended_badly = time.monotonic() + limit_s, 0.0
    reason = ""
    try:
        for rank, path in enumerate(logs):
            own = given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=own
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
            said = f"rank {rank} ended with {process.returncode}: {tail[-1500:]}"
            if process.returncode > 0:  # the others were killed for it
                return f"{reason}; {said}" if reason else said
            reason = reason or said
    return reason
