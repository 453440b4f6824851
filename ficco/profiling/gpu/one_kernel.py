"""The fixed costs of calls that are one kernel, and the rate at which a kernel reads a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ficco
from ficco.measuring.clock import captured
from ficco.profiling.gpu.ranks import Ranks

__all__ = ["measure"]

_ROWS, _COLUMNS, _DEPTH, _CALLS = 8, 2048, 64, 40  # so small that only fixed times remain
_TALL = 4096  # rows of a product that is read from peers: 16 MiB


def measure(ranks: Ranks, launch_us: float, peak_gbps: float) -> dict[str, float]:
    """Return store_us, direct_us, pull_us and peer_reads; ficco must be open for the GPUs.

    A two-shot call stores to peers twice in sequence, a one-shot call once; otherwise the calls are
    equal. A gather stores once, and its ranks also synchronize by words. A call whose sum reads
    peers' products takes pull_us more than its GEMM, a launch and the reads.

    Args:
        ranks: the measuring ranks.
        launch_us: of the profile.
        peak_gbps: the highest rate of a copy to a peer.
    """
    x, w = _operands(ranks, _ROWS)
    reduce: Any = ficco.matmul_all_reduce
    one, two = (_named_us(ranks, reduce, x, w, f"{shots}_shot_sm") for shots in ("one", "two"))
    gather = _named_us(ranks, ficco.all_gather_matmul, x, w, "gather_sm")
    store_us = max(0.1, two - one)
    few_us, many_us = (_read_us(ranks, *_operands(ranks, rows)) for rows in (_ROWS, _TALL))
    more = (ranks.world - 1) * (_TALL - _ROWS) * _COLUMNS * x.element_size()
    at_peak_us = more / peak_gbps / 1e3
    return {
        "store_us": store_us,
        "direct_us": max(0.0, gather - store_us - launch_us),
        "pull_us": max(0.1, few_us - launch_us),
        "peer_reads": max(1.0, (many_us - few_us) / at_peak_us),
    }


def _operands(ranks: Ranks, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros((rows, _DEPTH), dtype=torch.bfloat16, device=ranks.device)
    return x, torch.zeros((_DEPTH, _COLUMNS), dtype=torch.bfloat16, device=ranks.device)


def _read_us(ranks: Ranks, x: torch.Tensor, w: torch.Tensor) -> float:
    """Return the time that a call takes beyond its GEMM, if its sum reads peers' products."""
    y = torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)
    whole = _named_us(ranks, ficco.matmul_all_reduce, x, w, "one_shot_pull")
    return whole - _call_us(ranks, lambda: torch.mm(x, w, out=y))


def _named_us(
    ranks: Ranks, function: Any, x: torch.Tensor, w: torch.Tensor, schedule: str
) -> float:
    return _call_us(ranks, lambda: function(x, w, schedule=schedule))


def _call_us(ranks: Ranks, call: Callable[[], object]) -> float:
    def several(count: int) -> Callable[[], None]:
        def enqueue() -> None:
            for _ in range(count):
                call()

        return enqueue

    several(2)()
    return ranks.slowest(ranks.replayed(captured(several(_CALLS)), _CALLS))
