"""Calls with a limit of windows."""

from __future__ import annotations

import logging

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
        assert len(said) == (world > 1 and limit > 0), said  # `gathering` has logged it for 0
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
