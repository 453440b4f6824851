"""Start one process per rank, bound its time and always end it; a rendezvous of the processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ficco.core import settings
from ficco.core.logs import log

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
        import numpy as np  # not needed by those that only start ranks

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


def join(backend: str, **words: Any) -> None:
    """Join the group of all ranks, as the environment describes it.

    FICCO_STORE names the file of their rendezvous; without it torchrun has started them.

    Args:
        backend: of the group.
        words: further arguments of `init_process_group`.
    """
    import torch.distributed as dist

    if "FICCO_STORE" in os.environ:
        words["init_method"] = f"file://{os.environ['FICCO_STORE']}"
        words |= {"rank": settings.whole("RANK"), "world_size": settings.whole("WORLD_SIZE")}
    dist.init_process_group(backend, **words)


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
    begin, paths = time.monotonic(), [folder / f"rank{rank}.txt" for rank in range(world)]
    with ExitStack() as opened:
        logs = [opened.enter_context(path.open("w")) for path in paths]
        opened.callback(watch)  # of the last reports
        codes = exit_codes(
            command, NO_MULTICAST, logs, subprocess.STDOUT, limit_s=limit_s, watch=watch, poll_s=0.2
        )
    late = None in codes and time.monotonic() > begin + limit_s
    reasons = [f"not done after {limit_s:.0f} s"] if late else []
    for rank in sorted(range(world), key=lambda rank: codes[rank] or 0, reverse=True):
        if code := codes[rank]:  # of the failed rank, else of one that a signal has ended
            tail = " | ".join(paths[rank].read_text(errors="replace").splitlines()[-12:])
            reasons.append(f"rank {rank} ended with {code}: {tail[-1500:]}")
            break
    return "; ".join(reasons)


def exit_codes(
    command: Sequence[str],
    variables: Mapping[str, str],
    outputs: Sequence[Any],
    errors: int | None = None,
    *,
    keep: Sequence[int] = (),
    limit_s: float = math.inf,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.02,
) -> list[int | None]:
    """Run a command once per rank; return the exit codes, None of ranks that had to be killed.

    When a rank fails, the others have GRACE_S to end.

    Args:
        command: arguments of this Python interpreter.
        variables: of the environment, besides those that say which rank a process is.
        outputs: the standard output of each rank, as `subprocess.Popen` takes it.
        errors: the standard error of all ranks, likewise.
        keep: descriptors that the ranks inherit.
        limit_s: time limit.
        watch: called every `poll_s` seconds.
        poll_s: see `watch`.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    shared = {**os.environ, **variables, "FICCO_PARENT": str(os.getpid())}
    shared["WORLD_SIZE"] = str(len(outputs))
    limit = time.monotonic() + limit_s
    try:
        with _uninterrupted():  # else a started process may be missing from `ranks`
            for rank, output in enumerate(outputs):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command], env=shared | own, stdout=output, stderr=errors,
                        pass_fds=keep,
                    )
                )  # fmt: skip
                log.info("rank %d is process %d", rank, ranks[-1].pid)
        while None in (codes := [process.poll() for process in ranks]):
            now = time.monotonic()
            if any(codes):
                limit = min(limit, now + GRACE_S)
            if now > limit:
                break
            time.sleep(poll_s)
            watch()
        return codes
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for process in ranks:
            process.wait()


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
