"""The rate of a GPU's memory under streaming kernels: the sums that plans use."""

from __future__ import annotations

import torch

from ficco.kernels.summing import sum_partials
from ficco.profiling.figures import gbps
from ficco.profiling.gpu.ranks import Ranks

__all__ = ["measure"]

_ROWS, _COLS, _SLOTS, _CALLS = 8192, 8192, 3, 8
_BYTES = _ROWS * _COLS * 2 * (_SLOTS + 2)  # slots, the rank's own part, the sum


def measure(ranks: Ranks) -> float:
    """Return GB/s of reads plus writes, on the median rank."""
    device = ranks.device
    slots = torch.zeros((_SLOTS * _ROWS, _COLS), dtype=torch.bfloat16, device=device)
    own = torch.zeros((_ROWS, _COLS), dtype=torch.bfloat16, device=device)
    target = torch.empty((_ROWS, _COLS), dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(_CALLS):
            sum_partials(slots[:_ROWS], _ROWS, _SLOTS, own, 1, None, target)

    us = ranks.timed(run, _CALLS, together=False)
    return gbps(_BYTES, ranks.middle(us))
