"""A rank that does not come to what others exchange, which these are told by the timeout.

python absent_worker.py STORE RANK WORLD CHECK
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco

TIMEOUT_S, SOON_S = 2.0, 15.0  # of the group; and far below torch.distributed's own


def model() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8))
    return ficco.overlap(
        net, plan={"0": "colwise", "1": "rowwise"}, schedule="hetero_fused_1d", strict=True
    )


def forward(rank: int, store: Any) -> None:
    """The first forward of a given plan compares the ranks' weights."""
    net = model()
    if rank == 0:
        told(lambda: net(torch.ones(4, 8)))
    else:
        store.wait(["told"], timedelta(seconds=60))


def measure(rank: int, store: Any) -> None:
    """`explain(measure=True)` is a collective call."""
    net = model()
    net(torch.ones(4, 8))
    if rank == 0:
        told(lambda: ficco.explain(net, measure=True))
    else:
        store.wait(["told"], timedelta(seconds=60))


def stopped(rank: int, store: Any) -> None:
    """The first call by `auto` measures the machine; a rank stands still meanwhile."""
    os.environ |= {"FICCO_MEASURE": "1", "XDG_CACHE_HOME": str(Path.cwd() / "cache")}
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    store.set(f"pid{rank}", str(os.getpid()))
    ficco.all_gather_matmul(x, w, schedule="shard_p2p")  # the group is open when a rank stops
    if rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        try:
            while True:
                ficco.all_gather_matmul(x, w)
        except ficco.FiccoError:
            return
    other = int(store.get("pid1"))
    try:
        told(lambda: [ficco.all_gather_matmul(x, w) for _ in range(10**6)])
    finally:
        os.kill(other, signal.SIGCONT)


def told(call: Any) -> None:
    """Hold that a call fails soon, since a rank did not come."""
    begin = time.monotonic()
    try:
        call()
    except (ficco.TimeoutExceeded, ficco.EngineError) as error:
        assert "rank 1" in str(error).lower(), error
    else:
        raise AssertionError("nothing was told")
    assert time.monotonic() - begin < SOON_S, time.monotonic() - begin


CHECKS = {check.__name__: check for check in (forward, measure, stopped)}


def main(store: str, rank: int, world: int, check: str) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(store, world)
    dist.init_process_group(
        "gloo", store=file, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    ficco.prepare(timeout_s=TIMEOUT_S)
    CHECKS[check](rank, file)
    file.set("told", "1")
    print("right", flush=True)
    os._exit(0)  # the group has failed; torch.distributed would wait for ranks


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
