"""Calls with a limit of windows."""

from __future__ import annotations

import logging
import time

import torch
from values_worker import Listener, close, draw, gathering, refused

import ficco


def limited(rank: int, world: int) -> None:
    """A call that needs more windows than the limit allows is right, by `serial`."""
    log, listener = logging.getLogger("ficco"), Listener()
    log.addHandler(listener)
    tall, w = draw(rank, 4096, 64), torch.ones(64, 2)
    whole = torch.cat([draw(each, 4096, 64) for each in range(world)]) @ w

    def right() -> None:
        for schedule in ("hetero_fused_1d", "auto", "serial", "hetero_fused_1d"):
            close(
                ficco.all_gather_matmul(tall, w, schedule=schedule), whole, f"{limit}, {schedule}"
            )

    limit: int | None
    for limit in (1 << 16, 0):
        ficco.close()
        ficco.limit_windows(limit)
        gathering(rank, world)
        listener.said.clear()
        right()
        assert ficco.window_bytes() <= (limit + 2048) * world  # 2048: empty windows of GPUs
        said = [line for line in listener.said if "limit_windows" in line]
        assert len(said) <= 1, said
        assert len(said) == (world > 1) or not limit, said  # `gathering` may have logged it
    limit = None
    ficco.limit_windows(limit)
    right()
    if world > 1:
        have = ficco.window_bytes() // world
        refused(lambda: ficco.limit_windows(have - 1), f"have {have} bytes already")
        refused(lambda: ficco.limit_windows(have + rank), "rank 0 limits its windows to")
    ficco.limit_windows(4 * ficco.window_bytes())
    right()
    ficco.close()
    ficco.limit_windows(None)
    log.removeHandler(listener)


def refused_by_one(rank: int, world: int) -> None:
    """A rank that raises an error ends the calls of others that the limit makes serial."""
    if world == 1:
        return
    ficco.close()
    ficco.limit_windows(0)
    gathering(rank, world)
    x, w = draw(rank, 4096, 64), torch.ones(64, 2)
    if rank == 0:
        refused(lambda: ficco.all_gather_matmul(x.double(), w), "float64")
    begin = time.monotonic()
    try:
        if rank:
            ficco.all_gather_matmul(x, w)
    except ficco.EngineError as error:
        assert "rank 0" in str(error) and time.monotonic() < begin + 10, error
    else:
        assert not rank, "the call was made without rank 0"
    ficco.close()
    ficco.limit_windows(None)
