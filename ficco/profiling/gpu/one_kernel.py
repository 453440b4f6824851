"""The fixed costs of a call of few rows: the latency of a store to a peer, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ficco
from ficco.profiling.gpu.ranks import Ranks, captured

__all__ = ["measure"]

_ROWS, _COLUMNS, _DEPTH, _CALLS = 8, 2048, 64, 40  # so small that only fixed times remain


def measure(ranks: Ranks, launch_us: float) -> dict[str, float]:
    """Return store_us and direct_us; ficco must be open for the GPUs.

    A two-shot call stores to peers twice in sequence, a one-shot call once; otherwise the calls are
    equal. A gather stores once, and its ranks also synchronize by words.
    """
    x = torch.zeros((_ROWS, _DEPTH), dtype=torch.bfloat16, device=ranks.device)
    w = torch.zeros((_DEPTH, _COLUMNS), dtype=torch.bfloat16, device=ranks.device)
    reduce: Any = ficco.matmul_all_reduce
    one, two = (_call_us(ranks, reduce, x, w, f"{shots}_shot_sm") for shots in ("one", "two"))
    gather = _call_us(ranks, ficco.all_gather_matmul, x, w, "gather_sm")
    store_us = max(0.1, two - one)
    return {"store_us": store_us, "direct_us": max(0.0, gather - store_us - launch_us)}


def _call_us(ranks: Ranks, function: Any, x: torch.Tensor, w: torch.Tensor, schedule: str) -> float:
    def several(count: int) -> Callable[[], None]:
        def enqueue() -> None:
            for _ in range(count):
                function(x, w, schedule=schedule)

        return enqueue

    several(2)()
    return ranks.slowest(ranks.replayed(captured(several(_CALLS)), _CALLS))
