"""Sentences that several pages share."""

from __future__ import annotations

from naming import MACHINES, where
from tables.comparison import compared
from tables.sources import Page

BASELINES = (
    "`serial` is NCCL and `torch.mm`, one after the other, called by hand on memory that is "
    "already allocated. *Fused* is PyTorch's fused operator of `torch.ops.symm_mem`."
)
REGIMES = (
    "*Captured*: the calls are in a CUDA graph. *Eager*: calls follow one another without a wait. "
    "*Synchronized*: the host waits for the end of each call."
)
NO_MULTICAST = (
    "NCCL and PyTorch's operators ran without NVLink multicast in all measurements "
    "(`NCCL_NVLS_ENABLE=0`). With multicast they may be faster."
)
GAIN = "A speed-up below 1 means that ficco is slower."


def machines_with_comparison(page: Page) -> list[tuple[str, str]]:
    """Return the machines that have a comparison of operators, and their names in words."""
    found = [(machine, compared(page, machine)) for machine in MACHINES]
    return [(machine, where(documents[0][1])) for machine, documents in found if documents]
